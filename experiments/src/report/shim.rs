//! The report of a recording of `elfen shim`: where the time went, how long each run was, and when
//! it was.
//!
//! A recording may come from an untrusted source, so names are shortened. Figures show only as many
//! tags as can be told apart, and tables show the rest. The report's check refuses NaN and
//! infinities.

use elfen_console::duration::{number, show};
use elfen_console::page::Table;
use elfen_shim::recording::{Kind, RateFigure, Recording, Run, State};
use elfen_shim::summary::{Summary, TagFigure};
use elfen_shim::tags::Tags;
use elfen_shim::text::{self, length};

use super::figure::Style;
use super::figure::{Across, Axis, Figure, HtmlReport, Mark, Panel, Point, Scale, Series, Source};
use super::text::{clip, sentence};

/// How many tags get a bar. `STYLES` limits how many get a line.
const BARS: usize = 16;
const STYLES: [Style; 6] =
    [Style::BLUE, Style::RED, Style::AQUA, Style::ORANGE, Style::VIOLET, Style::OCHRE];
/// The number of parts into which the whole time is divided.
const SLICES: usize = 200;
const LONGEST: usize = 10;
const NAME_CHARS: usize = 48;

/// Creates the report. `command` is the command that draws the page.
pub fn report(recording: &Recording, command: &str) -> HtmlReport {
    let summary = Summary::of(recording);
    let maker = Maker { recording, summary: &summary, command };
    let mut report = HtmlReport {
        title: format!("{}: recording of elfen shim", clean(&summary.program)),
        command: command.to_owned(),
        notes: maker.notes(),
        tables: Vec::new(),
        figures: Vec::new(),
        appendix: Vec::new(),
    };
    for (index, signal) in recording.head.signals.iter().enumerate() {
        match signal.kind {
            Kind::Tags => {
                let tags: Vec<&TagFigure> =
                    summary.tags.iter().filter(|tag| tag.signal == signal.name).collect();
                if !tags.is_empty() {
                    report.figures.extend(maker.of_tags(index, &tags));
                    report.tables.push(maker.longest(index));
                    report.appendix.push(of_each(&signal.name, &tags));
                }
            }
            Kind::Values => report.figures.extend(maker.of_values(index)),
        }
    }
    report.figures.extend(maker.rates());
    report
}

struct Maker<'a> {
    recording: &'a Recording,
    summary: &'a Summary,
    command: &'a str,
}

impl Maker<'_> {
    fn notes(&self) -> Vec<String> {
        let cut = "The file is truncated. This report contains the part that was readable.";
        let cut = self.recording.cut.then(|| cut.to_owned());
        let opening = sentence(&text::opening(self.summary).trim_end().replace('\n', "; "));
        let notes = text::notes(self.summary).into_iter().map(|note| sentence(&note));
        std::iter::once(opening).chain(cut).chain(notes).collect()
    }

    fn figure(
        &self,
        (id, title, reading): (String, String, String),
        x: Across,
        y: Axis,
        series: Vec<Series>,
    ) -> Figure {
        let head = &self.recording.head;
        Figure {
            id,
            title,
            reading,
            source: Source::Live,
            made_with: format!(
                "{}, lane {} observed from lane {}.",
                clean(&head.machine),
                clean(&head.on),
                clean(&self.summary.from_lanes().0)
            ),
            command: self.command.to_owned(),
            x,
            panels: vec![Panel::new(y, series)],
        }
    }

    /// Draws the time by tag, the lengths of runs by tag, and the shares of the tags over time.
    fn of_tags(&self, index: usize, tags: &[&TagFigure]) -> Vec<Figure> {
        let signal = clean(&self.recording.head.signals[index].name);
        let names = tags.iter().take(BARS).map(|tag| clean(&tag.name)).collect();
        let shares = tags.iter().take(BARS).enumerate();
        let shares = shares.map(|(at, tag)| Point::at(number(at as u64), tag.share_percent));
        let texts = (
            format!("time-{index}"),
            format!("Time by {signal}"),
            format!(
                "{} has {:.1} % of the observed time in which the thread ran.",
                clean(&tags[0].name),
                tags[0].share_percent
            ),
        );
        let x = Across::names(&signal, names, false);
        let series = Series::new("share", Mark::Bars, Style::BLUE, shares.collect());
        let time = self.figure(texts, x, Axis::new("share", "%"), vec![series]);
        vec![time, self.lengths(index, &signal, tags), self.strip(index, &signal, tags)]
    }

    fn lengths(&self, index: usize, signal: &str, tags: &[&TagFigure]) -> Figure {
        let all = Tags::of(self.recording, index);
        let mut series = Vec::new();
        for (tag, style) in tags.iter().zip(STYLES) {
            let Some(found) = all.by_name.get(&tag.name) else { continue };
            let mut halves: Vec<(f64, f64)> = Vec::new();
            for (low, _, count) in found.lengths.columns() {
                // Two columns for each doubling of the length. Narrower columns would mostly show
                // noise.
                let half = (number(low.max(1)).log2() * 2.0).floor();
                match halves.last_mut() {
                    Some((last, sum)) if *last == half => *sum += number(count),
                    _ => halves.push((half, number(count))),
                }
            }
            let point = |(half, count): (f64, f64)| Point::at((half / 2.0).exp2() / 1e3, count);
            let points = halves.into_iter().map(point).collect();
            series.push(Series::new(clean(&tag.name), Mark::Line, style, points));
        }
        let texts = (
            format!("lengths-{index}"),
            format!("Lengths of runs by {signal}"),
            "The number of runs by length, without runs that a gap or a context switch \
                interrupted."
                .to_owned(),
        );
        let x = Across::Number(Axis::new("length of a run", "us").scaled(Scale::Log));
        self.figure(texts, x, Axis::new("runs", "").scaled(Scale::Log), series)
    }

    /// Draws the share of each tag in each slice of the time.
    fn strip(&self, index: usize, signal: &str, tags: &[&TagFigure]) -> Figure {
        let names = Names::of(self.recording, index);
        let slices = Slices::of(self.recording);
        let mut sums = vec![[0.0; SLICES]; STYLES.len() + 1];
        for (run, end) in self.recording.joined(index) {
            let row = match run.state {
                State::Gap => STYLES.len(),
                State::NotRunning => continue,
                state => {
                    let name = names.of_state(state);
                    match tags.iter().take(STYLES.len()).position(|tag| tag.name == name) {
                        Some(row) => row,
                        None => continue,
                    }
                }
            };
            slices.add(run.start_ticks, end, |slice, part| sums[row][slice] += part * 100.0);
        }
        let series_of = |(row, name, style): (usize, String, Style)| {
            let points = sums[row].iter().enumerate();
            let points = points.map(|(at, share)| Point::at(slices.ms(at), *share)).collect();
            Series::new(name, Mark::Curve, style, points)
        };
        let shown = tags.iter().zip(STYLES).enumerate();
        let shown = shown.map(|(row, (tag, style))| (row, clean(&tag.name), style));
        let gaps = (self.summary.gaps > 0).then(|| (STYLES.len(), "(gap)".to_owned(), Style::GREY));
        let texts = (
            format!("when-{index}"),
            format!("Shares over time, by {signal}"),
            format!("The share of each {signal} in {SLICES} equal slices of the recording."),
        );
        let series = shown.chain(gaps).map(series_of).collect();
        self.figure(texts, Across::number("time", "ms"), Axis::new("share", "%"), series)
    }

    /// Lists the longest runs, which deserve a closer look.
    fn longest(&self, index: usize) -> Table {
        let (recording, names) = (self.recording, Names::of(self.recording, index));
        let clock = recording.head.clock;
        let first = recording.span().map_or(0, |(first, _)| first);
        let mut stays: Vec<Stay> = Vec::new();
        let mut is_seen = false;
        for (run, end) in recording.joined(index) {
            if matches!(run.state, State::Gap | State::NotRunning) {
                is_seen = false;
                continue;
            }
            match stays.last_mut().filter(|stay| stay.state == run.state) {
                Some(stay) if is_seen => stay.go_on(stay.part_from, end),
                Some(stay) => {
                    stay.is_cut = true;
                    stay.go_on(run.start_ticks, end);
                }
                None => stays.push(Stay::of(run, end)),
            }
            is_seen = true;
        }
        stays.sort_by_key(|stay| std::cmp::Reverse(stay.longest_ticks));
        let row = |stay: &Stay| {
            let at = clock.ns(stay.from.saturating_sub(first));
            let until = clock.ns(stay.until.saturating_sub(first));
            let name = clean(&names.of_state(stay.state));
            let part = format!("--between {}us..{}us", at / 1_000, until / 1_000 + 1);
            let length = show(clock.ns(stay.longest_ticks));
            let length = if stay.is_cut { format!(">= {length}") } else { length };
            vec![name, length, show(at), part]
        };
        let signal = clean(&recording.head.signals[index].name);
        let head = ["name", "length", "begins at", "option to extract it"];
        let rows = stays.iter().take(LONGEST).map(row).collect();
        Table::new(format!("The longest runs of {signal}"), &head, rows).noted(
            "With this option, `elfen shim show` and `elfen shim export` use only this part \
                of the recording.",
        )
    }

    /// Draws a number over time: its mean in each slice, with its minimum and maximum.
    fn of_values(&self, index: usize) -> Option<Figure> {
        let signal = &self.recording.head.signals[index];
        let slices = Slices::of(self.recording);
        let mut found = vec![(0.0, 0.0, f64::MAX, f64::MIN); SLICES];
        for (run, end) in self.recording.joined(index) {
            let State::Value(value) = run.state else { continue };
            let value = signal.number(value) as f64;
            slices.add(run.start_ticks, end, |slice, part| {
                let (sum, weight, least, most) = &mut found[slice];
                *sum += value * part;
                *weight += part;
                (*least, *most) = (least.min(value), most.max(value));
            });
        }
        let point = |(at, (sum, weight, least, most)): (usize, &(f64, f64, f64, f64))| {
            let interval = Some((*least, *most));
            (*weight > 0.0).then(|| Point { x: slices.ms(at), y: sum / weight, interval })
        };
        let points: Vec<Point> = found.iter().enumerate().filter_map(point).collect();
        // A word that was never written has nothing to show.
        if points.iter().all(|point| point.y == 0.0) {
            return None;
        }
        let name = clean(&signal.name);
        let reading = format!(
            "The mean of {name} in each of {SLICES} time slices, with minimum and maximum."
        );
        let texts = (format!("value-{index}"), name.clone(), reading);
        let series = vec![Series::new(name, Mark::Curve, Style::BLUE, points)];
        let (x, y) = (Across::number("time", "ms"), Axis::new("value", ""));
        Some(self.figure(texts, x, y, series))
    }

    fn rates(&self) -> Vec<Figure> {
        let mut names: Vec<&str> =
            self.summary.rates.iter().map(|rate| rate.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        let of_one = |(at, name): (usize, &&str)| {
            let of_it = self.summary.rates.iter().filter(|rate| rate.name == **name);
            let rates: Vec<&RateFigure> = of_it.take(BARS).collect();
            let point = |(at, rate): (usize, &&RateFigure)| Point {
                x: number(at as u64),
                y: rate.median,
                interval: Some((rate.p10, rate.p90)),
            };
            let points = rates.iter().enumerate().map(point).collect();
            let tags = rates.iter().map(|rate| clean(&rate.tag)).collect();
            let name = clean(name);
            let reading = format!(
                "{name}: the median, with the 10th and the 90th percentile. Rates that the \
                 double-time error discarded are not included."
            );
            let series = vec![Series::new(name.clone(), Mark::Dots, Style::BLUE, points)];
            let (x, y) = (Across::names("in", tags, false), Axis::new(name.clone(), ""));
            self.figure((format!("rate-{at}"), name, reading), x, y, series)
        };
        names.iter().enumerate().map(of_one).collect()
    }
}

/// A run. Gaps may hide parts of it, so it took at least as long as its longest part.
struct Stay {
    state: State,
    from: u64,
    until: u64,
    part_from: u64,
    longest_ticks: u64,
    is_cut: bool,
}

impl Stay {
    fn of(run: Run, end: u64) -> Self {
        let (state, from) = (run.state, run.start_ticks);
        let mut stay =
            Self { state, from, until: end, part_from: from, longest_ticks: 0, is_cut: false };
        stay.go_on(from, end);
        stay
    }

    /// Extends the run, with a last part that begins at `part_from`.
    fn go_on(&mut self, part_from: u64, end: u64) {
        (self.part_from, self.until) = (part_from, end);
        self.longest_ticks = self.longest_ticks.max(end.saturating_sub(part_from));
    }
}

fn of_each(signal: &str, tags: &[&TagFigure]) -> Table {
    const ROWS: usize = 200;
    let row = |tag: &&TagFigure| {
        let (whole, all) = (tag.run_ns, tag.run_ns_at_least);
        let lengths = [(whole.median, all.median), (whole.p99, all.p99), (whole.max, all.max)];
        let lengths = lengths.map(|(whole, all)| length(whole, all));
        let about = [clean(&tag.name), format!("{:.2} %", tag.share_percent), show(tag.time_ns)];
        about.into_iter().chain([(tag.runs + tag.cut_runs).to_string()]).chain(lengths).collect()
    };
    let heading = ["name", "share", "time", "runs", "median", "p99", "longest"];
    let rows = tags.iter().take(ROWS).map(row).collect();
    let table = Table::new(format!("Every {}", clean(signal)), &heading, rows);
    match tags.len().saturating_sub(ROWS) {
        0 => table,
        more => table.noted(format!("{more} more are not shown.")),
    }
}

/// Shortens a name from a file for the page.
fn clean(name: &str) -> String {
    clip(name, NAME_CHARS)
}

/// The names of a signal's values, as the summary prints them.
struct Names<'a>(std::collections::HashMap<u64, &'a str>);

impl<'a> Names<'a> {
    fn of(recording: &'a Recording, signal: usize) -> Self {
        let names = recording.head.signals[signal].names.iter();
        Self(names.map(|(value, name)| (*value, name.as_str())).collect())
    }

    fn of_state(&self, state: State) -> String {
        match state {
            State::Gap | State::NotRunning => String::new(),
            State::Other => "(others)".to_owned(),
            State::Value(value) => match self.0.get(&value) {
                Some(name) => (*name).to_owned(),
                None if value == 0 => elfen_shim::symbols::NO_NAME.to_owned(),
                None => format!("{value:#x}"),
            },
        }
    }
}

/// Divides the whole time into equal parts.
struct Slices {
    first: f64,
    length: f64,
    ms_per_tick: f64,
}

impl Slices {
    fn of(recording: &Recording) -> Self {
        let (first, last) = recording.span().unwrap_or((0, 1));
        let length = number(last.saturating_sub(first)).max(1.0) / SLICES as f64;
        let ms_per_tick = 1e3 / number(recording.head.clock.ticks_per_second.max(1));
        Self { first: number(first), length, ms_per_tick }
    }

    fn ms(&self, slice: usize) -> f64 {
        slice as f64 * self.length * self.ms_per_tick
    }

    /// Calls `give` for each slice between two times, with the part of the slice that lies between
    /// them.
    fn add(&self, from: u64, to: u64, mut give: impl FnMut(usize, f64)) {
        let at = |ticks: u64| (number(ticks) - self.first) / self.length;
        let (from, to) = (at(from).max(0.0), at(to).min(SLICES as f64));
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to SLICES")]
        let index = |at: f64| at as usize;
        for slice in index(from)..=index(to).min(SLICES - 1) {
            let part = to.min(slice as f64 + 1.0) - from.max(slice as f64);
            if part > 0.0 {
                give(slice, part);
            }
        }
    }
}
