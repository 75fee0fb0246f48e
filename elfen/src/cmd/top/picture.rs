//! What `elfen top` draws: a pure function from what was seen to lines that fit the terminal.

use elfen_console::duration;

/// Everything that a picture shows.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct View {
    pub(super) batches: Vec<BatchView>,
    pub(super) lanes: Vec<LaneView>,
    pub(super) services: Vec<ServiceView>,
    /// While `elfen tailor watch` runs.
    pub(super) tails: Vec<TailView>,
    /// The batch that keys change.
    pub(super) selected: usize,
    /// What the last key did, or why not.
    pub(super) note: Option<String>,
}

/// A share of the time since the last picture, in thousandths; `None` in the first one.
pub(super) type Share = Option<u64>;

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct BatchView {
    pub(super) pid: u32,
    pub(super) program: String,
    pub(super) policy: &'static str,
    pub(super) budget_ns: Option<u64>,
    pub(super) borrowed: Share,
    pub(super) overlapped: Share,
    pub(super) reaction_p99_ns: Option<u64>,
    pub(super) slo: Option<SloView>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct SloView {
    pub(super) per_million: u32,
    pub(super) latency_ns: u64,
    /// Of the last ten seconds; `None` without requests.
    pub(super) tail_ns: Option<u64>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct LaneView {
    pub(super) request: u64,
    pub(super) request_runs: String,
    pub(super) batch: u64,
    pub(super) batch_runs: String,
    pub(super) state: &'static str,
    pub(super) borrowed: Share,
    pub(super) overlapped: Share,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct ServiceView {
    pub(super) name: String,
    pub(super) lane: u64,
    pub(super) alive: bool,
    pub(super) per_second: Option<u64>,
    pub(super) queue: u64,
    pub(super) median_ns: Option<u64>,
    pub(super) p99_ns: Option<u64>,
}

/// A cause of a service's tail, over the last minute.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct TailView {
    pub(super) service: String,
    pub(super) slow: u64,
    pub(super) threshold_ns: u64,
    pub(super) cause: String,
    pub(super) share: Share,
    /// What a slow request has of it, on average.
    pub(super) each_ns: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Style {
    Plain,
    Heading,
    Selected,
    Alarm,
    Dim,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Line {
    pub(super) style: Style,
    pub(super) text: String,
}

impl Line {
    fn new(style: Style, text: impl Into<String>) -> Self {
        Self { style, text: text.into() }
    }
}

const KEYS: &str = "q quit   up/down select   p policy   +/- budget";

/// The picture: at most `rows` lines of at most `columns` columns; the last one says what keys do.
pub(super) fn draw(view: &View, columns: usize, rows: usize) -> Vec<Line> {
    let selected = view.batches.iter().take(view.selected + 1).map(height).sum::<usize>();
    let sections = [
        Section { heading: heading(&BATCHES), rows: batch_rows(view, columns), keep: selected },
        Section { heading: heading(&LANES), rows: lane_rows(view, columns), keep: 1 },
        Section { heading: heading(&SERVICES), rows: service_rows(view), keep: 1 },
        Section { heading: heading(&TAILS), rows: tail_rows(view), keep: 1 },
    ];
    let mut lines = vec![Line::new(Style::Heading, summary(view))];
    let left = rows.saturating_sub(2);
    for (section, room) in sections.iter().zip(rooms(&sections, left)) {
        lines.extend(section.lines(room));
    }
    lines.truncate(rows.saturating_sub(1));
    lines.resize(rows.saturating_sub(1), Line::new(Style::Plain, ""));
    lines.push(match &view.note {
        Some(note) => Line::new(Style::Selected, note.as_str()),
        None => Line::new(Style::Dim, KEYS),
    });
    lines.iter_mut().for_each(|line| line.text = cut(&line.text, columns));
    lines
}

fn summary(view: &View) -> String {
    let count = |state| view.lanes.iter().filter(|lane| lane.state == state).count();
    let number =
        |n: usize, one: &str, more: &str| format!("{n} {}", if n == 1 { one } else { more });
    format!(
        "elfen {}   {}   {}: {} running, {} napping   {}",
        env!("CARGO_PKG_VERSION"),
        number(view.batches.len(), "batch", "batches"),
        number(view.lanes.len(), "batch lane", "batch lanes"),
        count("running"),
        count("napping"),
        number(view.services.len(), "service lane", "service lanes"),
    )
}

/// A column of a table: title, width, whether its cells are at the right, and the cell of a row.
type Column<T> = (&'static str, usize, bool, fn(&T) -> String);

const BATCHES: [Column<BatchView>; 7] = [
    ("PID", 8, false, |batch| batch.pid.to_string()),
    ("PROGRAM", 17, false, |batch| batch.program.clone()),
    ("POLICY", 15, false, |batch| batch.policy.to_owned()),
    ("BUDGET", 8, true, |batch| time(batch.budget_ns)),
    ("BORROWED", 8, true, |batch| percent(batch.borrowed)),
    ("OVERLAP", 7, true, |batch| percent(batch.overlapped)),
    ("REACT p99", 9, true, |batch| time(batch.reaction_p99_ns)),
];

const LANES: [Column<LaneView>; 7] = [
    ("CPU", 4, true, |lane| lane.request.to_string()),
    ("RUNS", 17, false, |lane| lane.request_runs.clone()),
    ("BATCH", 5, true, |lane| lane.batch.to_string()),
    ("RUNS", 17, false, |lane| lane.batch_runs.clone()),
    ("STATE", 9, false, |lane| lane.state.to_owned()),
    ("BORROWED", 8, true, |lane| percent(lane.borrowed)),
    ("OVERLAP", 7, true, |lane| percent(lane.overlapped)),
];

const SERVICES: [Column<ServiceView>; 7] = [
    ("SERVICE", 30, false, |service| service.name.clone()),
    ("CPU", 4, true, |service| service.lane.to_string()),
    ("REQ/S", 8, true, |service| service.per_second.map_or("-".to_owned(), |n| n.to_string())),
    ("QUEUE", 6, true, |service| service.queue.to_string()),
    ("MEDIAN", 8, true, |service| time(service.median_ns)),
    ("P99", 8, true, |service| time(service.p99_ns)),
    ("", 4, false, |service| if service.alive { String::new() } else { "gone".to_owned() }),
];

const TAILS: [Column<TailView>; 6] = [
    ("TAIL OF", 22, false, |tail| tail.service.clone()),
    ("ABOVE", 8, true, |tail| time(Some(tail.threshold_ns))),
    ("SLOW", 6, true, |tail| tail.slow.to_string()),
    ("BECAUSE OF", 22, false, |tail| tail.cause.clone()),
    ("SHARE", 7, true, |tail| percent(tail.share)),
    ("EACH", 8, true, |tail| time(Some(tail.each_ns))),
];

fn heading<T>(columns: &[Column<T>]) -> String {
    line(columns, |(title, ..)| (*title).to_owned())
}

fn row<T>(columns: &[Column<T>], of: &T) -> String {
    line(columns, |(.., cell)| cell(of))
}

fn line<T>(columns: &[Column<T>], text: impl Fn(&Column<T>) -> String) -> String {
    let cell = |column: &Column<T>| {
        let (_, width, right, _) = *column;
        let text = cut(&printable(&text(column)), width);
        if right { format!("{text:>width$}") } else { format!("{text:width$}") }
    };
    let cells: Vec<String> = columns.iter().map(cell).collect();
    format!("  {}", cells.join(" ").trim_end())
}

/// Lines of a batch: one, and another for its SLO.
fn height(batch: &BatchView) -> usize {
    1 + usize::from(batch.slo.is_some())
}

fn batch_rows(view: &View, columns: usize) -> Vec<Line> {
    let mut rows = Vec::new();
    for (at, batch) in view.batches.iter().enumerate() {
        let mut row = row(&BATCHES, batch);
        let is_selected = at == view.selected;
        if is_selected {
            row.replace_range(0..1, ">");
        }
        rows.push(Line::new(if is_selected { Style::Selected } else { Style::Plain }, row));
        rows.extend(batch.slo.map(|slo| slo_row(slo, columns)));
    }
    rows
}

/// The tail against its SLO, as a bar that is full where the SLO breaks.
fn slo_row(slo: SloView, columns: usize) -> Line {
    let SloView { per_million, latency_ns, tail_ns } = slo;
    let percentile = format!("{}.{:04}", per_million / 10_000, per_million % 10_000);
    let percentile = percentile.trim_end_matches('0').trim_end_matches('.');
    let limit = duration::show(latency_ns);
    let Some(tail_ns) = tail_ns else {
        return Line::new(
            Style::Dim,
            format!("           p{percentile}: no requests; SLO {limit}"),
        );
    };
    let share = u128::from(tail_ns) * 1000 / u128::from(latency_ns.max(1));
    let share = u64::try_from(share).unwrap_or(u64::MAX);
    let bar = bar(&[('#', share.min(1000))], columns.saturating_sub(58).clamp(10, 100));
    let verdict = match 1000u64.checked_sub(share) {
        Some(left) => format!("{} left", percent(Some(left))),
        None => "BROKEN".to_owned(),
    };
    let tail = duration::show(tail_ns);
    let text = format!("           p{percentile} {tail:>8} of {limit:<8} [{bar}] {verdict}");
    Line::new(if share > 1000 { Style::Alarm } else { Style::Plain }, text)
}

/// Columns of a lane's row before its bar, and what is the least that a bar can show.
const LANE_COLUMNS: usize = 78;
const LEAST_BAR: usize = 12;

fn lane_rows(view: &View, columns: usize) -> Vec<Line> {
    let width = columns.saturating_sub(LANE_COLUMNS).min(100);
    let with_bar = |lane: &LaneView| {
        let mut row = row(&LANES, lane);
        if let (Some(borrowed), Some(overlapped), true) =
            (lane.borrowed, lane.overlapped, width >= LEAST_BAR)
        {
            let bar = bar(&[('#', borrowed), ('+', overlapped)], width - 4);
            row = format!("{row:LANE_COLUMNS$} [{bar}]");
        }
        Line::new(Style::Plain, row)
    };
    view.lanes.iter().map(with_bar).collect()
}

fn service_rows(view: &View) -> Vec<Line> {
    let style = |service: &ServiceView| if service.alive { Style::Plain } else { Style::Dim };
    let line = |service| Line::new(style(service), row(&SERVICES, service));
    view.services.iter().map(line).collect()
}

fn tail_rows(view: &View) -> Vec<Line> {
    view.tails.iter().map(|tail| Line::new(Style::Plain, row(&TAILS, tail))).collect()
}

struct Section {
    heading: String,
    rows: Vec<Line>,
    /// So many rows of it must be seen, or the last of them.
    keep: usize,
}

impl Section {
    /// A blank line, the heading, and as many rows as there is room for.
    fn lines(&self, room: usize) -> Vec<Line> {
        if self.rows.is_empty() || room == 0 {
            return Vec::new();
        }
        let mut lines =
            vec![Line::new(Style::Plain, ""), Line::new(Style::Heading, self.heading.as_str())];
        if self.rows.len() <= room {
            lines.extend(self.rows.iter().cloned());
            return lines;
        }
        let shown = room - 1;
        let first = self.keep.saturating_sub(shown);
        lines.extend(self.rows.iter().skip(first).take(shown).cloned());
        lines.push(Line::new(Style::Dim, format!("  {} more", self.rows.len() - shown)));
        lines
    }
}

/// How many rows of each section fit: the longest gives way first.
fn rooms(sections: &[Section], left: usize) -> Vec<usize> {
    let mut rooms: Vec<usize> = sections.iter().map(|section| section.rows.len()).collect();
    let taken = |rooms: &[usize]| {
        rooms.iter().map(|&room| if room == 0 { 0 } else { room + 2 }).sum::<usize>()
    };
    while taken(&rooms) > left {
        let Some(longest) = rooms.iter_mut().max().filter(|room| **room > 0) else { break };
        *longest -= 1;
    }
    rooms
}

fn time(ns: Option<u64>) -> String {
    ns.map_or("-".to_owned(), duration::show)
}

fn percent(share: Share) -> String {
    share.map_or("-".to_owned(), |share| format!("{}.{} %", share / 10, share % 10))
}

/// Shares of a bar one after the other, and dots for the rest.
fn bar(parts: &[(char, u64)], width: usize) -> String {
    let mut bar = String::with_capacity(width);
    let mut sum = 0;
    for &(mark, share) in parts {
        sum += share;
        let end = usize::try_from(sum.min(1000)).unwrap_or(1000) * width / 1000;
        while bar.chars().count() < end {
            bar.push(mark);
        }
    }
    format!("{bar:.<width$}")
}

/// Names come from other processes: nothing that a terminal obeys is let through.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

fn cut(text: &str, columns: usize) -> String {
    if text.chars().count() <= columns {
        return text.to_owned();
    }
    let mut cut: String = text.chars().take(columns.saturating_sub(1)).collect();
    if columns > 0 {
        cut.push('~');
    }
    cut
}

#[cfg(test)]
mod tests;
