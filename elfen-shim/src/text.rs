//! A summary as text that fits on one screen.

use elfen_console::duration::{number, show};
use elfen_console::paragraph::wrap;
use elfen_console::table;

use crate::recording::Source;
use crate::summary::{SignalFigure, Summary, TagFigure, Values};

const COLUMNS: usize = 80;
/// The maximum number of rows of each table. The number of further rows is printed below it.
const ROWS: usize = 12;

/// The note about programs whose functions report their entries, but not their returns.
pub const NO_RETURNS: &str = "functions report that they are entered, but not that they return: \
                              the time of a caller after a call counts for the called function, so \
                              callers' shares are too low; build it with \
                              -mfunction-return=thunk-extern as well, and link it with \
                              libelfen_return.a";

/// The whole text. `more` contains suggestions of what else could be observed.
pub fn text(summary: &Summary, more: &[String]) -> String {
    let mut text = opening(summary);
    text += &tags(summary);
    text += &values(&summary.signals);
    text += &rates(summary);
    let notes = notes(summary);
    for (heading, sentences) in [("", &notes[..]), ("More can be observed:\n", more)] {
        if sentences.is_empty() {
            continue;
        }
        text += &format!("\n{heading}");
        for sentence in sentences {
            text += &format!("- {}\n", wrap(sentence, COLUMNS - 2).join("\n  "));
        }
    }
    text
}

/// The observed program and lanes, and the resolution.
pub fn opening(summary: &Summary) -> String {
    let Summary { program, on, samples, period_ns, .. } = summary;
    let (from, looked_ns) = summary.from_lanes();
    let lanes = if summary.observers.is_empty() { "lane" } else { "lanes" };
    let program = wrap(program, usize::MAX).join(" ");
    let mut lines = wrap(
        &format!(
            "{program}: {} on lanes {on} from {lanes} {from}, {samples} samples",
            show(looked_ns),
        ),
        COLUMNS,
    );
    let (median, p99) = (show(period_ns.median), show(period_ns.p99));
    let mut about = format!("one sample per {median} (p99 {p99})");
    if let Some(round_trip) = summary.line_round_trip_ns {
        about += &format!(", cache line round trip {}", show(round_trip));
    }
    about += &format!("; resolution {}", show(whole(summary.resolution_ns)));
    lines.extend(wrap(&about, COLUMNS));
    lines.join("\n") + "\n"
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a time above 0")]
fn whole(ns: f64) -> u64 {
    ns.round() as u64
}

fn tags(summary: &Summary) -> String {
    let mut text = String::new();
    let mut signals: Vec<&str> = summary.tags.iter().map(|tag| tag.signal.as_str()).collect();
    signals.dedup();
    for signal in signals {
        let tags: Vec<&TagFigure> =
            summary.tags.iter().filter(|tag| tag.signal == signal).collect();
        let is_task =
            |known: &SignalFigure| known.name == signal && known.source == Source::TaskMap;
        let of_process = summary.process != 0 && !summary.children;
        let (rows, more) = if of_process && summary.signals.iter().any(is_task) {
            (tasks(summary, &tags), 0)
        } else {
            let rows = tags.iter().take(ROWS).map(|tag| row(tag)).collect();
            (rows, tags.len().saturating_sub(ROWS))
        };
        text += "\n";
        text += &table::lines(&[signal, "share", "time", "runs", "median", "longest"], &rows);
        if more > 0 {
            text += &format!("and {more} more\n");
        }
    }
    text
}

fn row(tag: &TagFigure) -> Vec<String> {
    let lengths = [
        length(tag.run_ns.median, tag.run_ns_at_least.median),
        length(tag.run_ns.max, tag.run_ns_at_least.max),
    ];
    cells(&tag.name, tag.share_percent, tag.time_ns, tag.runs + tag.cut_runs, lengths)
}

fn cells(name: &str, percent: f64, ns: u64, runs: u64, lengths: [String; 2]) -> Vec<String> {
    let about = [clipped(name), format!("{percent:.1} %"), show(ns), runs.to_string()];
    about.into_iter().chain(lengths).collect()
}

/// The rows of a task signal. The threads of the observed process come first, with one row even if
/// none ran. Then follow the idle task, and one row for all other tasks, which would fill the
/// screen on a busy machine.
fn tasks(summary: &Summary, tags: &[&TagFigure]) -> Vec<Vec<String>> {
    let process = summary.process.to_string();
    let is_own = |tag: &&TagFigure| {
        let id = tag.name.rsplit(' ').next().unwrap_or_default();
        id.split('/').next() == Some(process.as_str())
    };
    let (own, rest): (Vec<&TagFigure>, Vec<&TagFigure>) = tags.iter().partition(|tag| is_own(tag));
    let (idle, others): (Vec<&TagFigure>, Vec<&TagFigure>) =
        rest.into_iter().partition(|tag| tag.name == "(idle)");
    let none = || ["-", "-"].map(str::to_owned);
    let mut rows: Vec<Vec<String>> = own.iter().take(ROWS).map(|tag| row(tag)).collect();
    if own.is_empty() {
        rows.push(cells(&format!("{} {process}", summary.program), 0.0, 0, 0, none()));
    }
    let (_, unnamed) = own.split_at(own.len().min(ROWS));
    rows.extend(idle.iter().map(|tag| row(tag)));
    for (what, folded) in [("more threads of it", unnamed), ("others", &others)] {
        if !folded.is_empty() {
            let percent = folded.iter().map(|tag| tag.share_percent).sum();
            let ns = folded.iter().map(|tag| tag.time_ns).sum();
            let runs = folded.iter().map(|tag| tag.runs + tag.cut_runs).sum();
            rows.push(cells(&format!("{} {what}", folded.len()), percent, ns, runs, none()));
        }
    }
    rows
}

/// Prints a length of the runs that were observed from end to end. If cut runs make it clearly
/// longer, prints a lower bound instead.
pub fn length(whole_ns: u64, at_least_ns: u64) -> String {
    const EXACT_PARTS: u64 = 20;
    if at_least_ns > whole_ns + whole_ns / EXACT_PARTS {
        format!(">= {}", show(at_least_ns))
    } else {
        show(whole_ns)
    }
}

pub(crate) fn clipped(name: &str) -> String {
    const MOST: usize = 36;
    let plain: String = name.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
    match plain.char_indices().nth(MOST) {
        Some((cut, _)) => format!("{}…", &plain[..cut]),
        None => plain,
    }
}

fn values(signals: &[SignalFigure]) -> String {
    let row = |signal: &SignalFigure| {
        let Values { first, last, least, most, mean } = signal.values?;
        // Threads that never set a value have the value 0, which needs no row.
        let is_own = signal.name == "value" || signal.name.starts_with("value#");
        let said = !is_own || most > 0;
        let numbers = [first, last, least, most].map(|value| value.to_string());
        let cells = [clipped(&signal.name), signal.new_values.to_string()].into_iter();
        said.then(|| cells.chain(numbers).chain([format!("{mean:.1}")]).collect())
    };
    let rows: Vec<Vec<String>> = signals.iter().filter_map(row).collect();
    if rows.is_empty() {
        return String::new();
    }
    let heading = ["value", "new values", "first", "last", "least", "most", "mean"];
    "\n".to_owned() + &table::lines(&heading, &rows)
}

fn rates(summary: &Summary) -> String {
    if summary.rates.is_empty() {
        return String::new();
    }
    let row = |rate: &crate::recording::RateFigure| {
        let numbers = [rate.median, rate.p10, rate.p90].map(|value| format!("{value:.3}"));
        let cells = [rate.name.clone(), clipped(&rate.tag)].into_iter().chain(numbers);
        cells.chain([format!("{:.1} %", rate.kept_percent)]).collect()
    };
    let rows: Vec<Vec<String>> = summary.rates.iter().take(ROWS).map(row).collect();
    "\n".to_owned() + &table::lines(&["rate", "in", "median", "p10", "p90", "kept"], &rows)
}

/// Explanations that a reader of the numbers needs.
pub fn notes(summary: &Summary) -> Vec<String> {
    let figures = &summary.figures;
    let mut notes = Vec::new();
    if summary.gaps > 0 {
        let share =
            100.0 * number(summary.gap_ns) / number((summary.gap_ns + summary.observed_ns).max(1));
        notes.push(format!(
            "no samples in {} gaps, {share:.1} % of the time, the longest {}{}: a run continues \
             through a gap if nothing can have changed in it; other gaps are not part of any share",
            summary.gaps,
            show(summary.longest_gap_ns),
            // More than interrupts take.
            if share > 5.0 { ", as other threads ran on the observer's lane" } else { "" }
        ));
    }
    if let Some(percent) = summary.not_running_percent {
        notes.push(format!("the thread did not run for {percent:.1} % of the observed time"));
    }
    if let Some(missed) = figures.missed_switches.filter(|&missed| missed > 0) {
        notes.push(format!("{missed} of the lanes' context switches were not detected"));
    }
    if summary.steal_ns > 0 {
        notes.push(format!("steal time: the host took {} from the lanes", show(summary.steal_ns)));
    }
    if figures.stopped_ns > 0 {
        let at_end = figures.stopped_at_end_ns;
        notes.push(format!(
            "the process was stopped for {} to share its pages, and for {} at the end to make them \
             private again",
            show(figures.stopped_ns.saturating_sub(at_end)),
            show(at_end),
        ));
    }
    if let Some(dte) = &figures.dte {
        notes.push(format!(
            "double-time error: {} rates kept, {} discarded (tolerance {} %, at least {:.0} ns); a \
             counter shrank in {} samples",
            dte.kept, dte.discarded, dte.tolerance_percent, dte.floor_ns, dte.shrunk
        ));
    }
    if let Some(cost) = &figures.cost_percent {
        notes.push(format!(
            "observation cost {:.1} % (95 % interval: {:.1} to {:.1}){}",
            cost.median,
            cost.low,
            cost.high,
            summary.two_percent_at_ns.map_or_else(String::new, |ns| format!(
                "; a --period of {} would cost about 2 %",
                show(ns)
            ))
        ));
    }
    if !figures.cost_unknown.is_empty() {
        notes.push(format!("the cost of observation is unknown: {}", figures.cost_unknown));
    }
    if figures.refused_threads > 0 {
        notes.push(format!(
            "{} threads have no tags or functions: all slots of the program's page were taken",
            figures.refused_threads
        ));
    }
    if summary.returns == Some(false) {
        notes.push(NO_RETURNS.to_owned());
    }
    if figures.ambiguous_entries > 0 {
        notes.push(format!(
            "{} of {} functions do not report that they run, as the lower half of their address is \
             that of another function: their time counts for their callers",
            figures.ambiguous_entries,
            figures.entries + figures.ambiguous_entries
        ));
    }
    if !summary.ended.is_empty() {
        notes.push(format!("about this recording: {}", summary.ended));
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recording::{Head, Kind, Recording, Run, Signal, State};

    /// Goal: the observed process comes first, even if it never ran, and all other processes share
    /// one row. Method: a lane that ran other processes, idled, and ran two threads of the process,
    /// or none.
    #[test]
    fn the_observed_process_comes_first() {
        let names = ["apt 7", "(idle)", "redis 42", "redis 42/43", "dpkg 742", "redis 4"];
        let names = (1..).zip(names).map(|(value, name)| (value, name.to_owned())).collect();
        let (name, source, kind) = ("task".to_owned(), Source::TaskMap, Kind::Tags);
        let signal = Signal { name, source, kind, signed: false, names };
        let clock =
            crate::clock::Clock { ticks_per_second: 1_000_000_000, step_ticks: 1, unit_ticks: 0 };
        let (program, process) = ("redis".to_owned(), 42);
        let head = Head { clock, program, process, signals: vec![signal], ..Head::default() };
        let first_cells = |values: &[u64]| {
            let run = |(at, value): (u64, &u64)| Run {
                start_ticks: at * 1_000,
                state: State::Value(*value),
                samples: 1,
            };
            let runs = vec![(0..).zip(values).map(run).collect()];
            let summary = Summary::of(&Recording { head: head.clone(), runs, cut: false });
            let text = text(&summary, &[]);
            let table = text.lines().skip_while(|line| !line.starts_with("task"));
            let rows = table.skip(1).take_while(|line| !line.is_empty());
            let name = |line: &str| line.split("  ").next().unwrap().to_owned();
            rows.map(name).collect::<Vec<String>>()
        };
        let seen = first_cells(&[1, 2, 3, 4, 5, 6, 1, 2, 2]);
        assert_eq!(seen, ["redis 42", "redis 42/43", "(idle)", "3 others"]);
        assert_eq!(first_cells(&[1, 2, 5, 2]), ["redis 42", "(idle)", "2 others"]);
    }
}
