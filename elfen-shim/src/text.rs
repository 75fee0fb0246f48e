//! A summary for people, on one screen.

use elfen_console::duration::{number, show};
use elfen_console::paragraph::wrap;
use elfen_console::table;

use crate::summary::{SignalFigure, Summary, TagFigure, Values};

const COLUMNS: usize = 80;
/// Rows of each table; the rest is counted.
const ROWS: usize = 12;

/// Where functions are seen at their entries alone.
pub const NO_RETURNS: &str = "functions say that they are entered and not that they return: what a \
                              caller does after a call counts for what it called, so callers' \
                              shares are too low; build it with -mfunction-return=thunk-extern as \
                              well, and link it with libelfen_return.a";

/// All of it; `more` are sentences on what else would be possible.
pub fn text(summary: &Summary, more: &[String]) -> String {
    let mut text = opening(summary);
    text += &tags(summary);
    text += &values(&summary.signals);
    text += &rates(summary);
    let notes = notes(summary);
    for (heading, sentences) in [("", &notes[..]), ("More would be possible:\n", more)] {
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

fn opening(summary: &Summary) -> String {
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
    let mut about = format!("one each {} (p99 {})", show(period_ns.median), show(period_ns.p99));
    if let Some(round_trip) = summary.line_round_trip_ns {
        about += &format!(", a line goes there and back in {}", show(round_trip));
    }
    let finest = show(whole(summary.resolution_ns));
    about += &format!("; nothing shorter than {finest} is told apart");
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
        let row = |tag: &&TagFigure| {
            vec![
                clipped(&tag.name),
                format!("{:.1} %", tag.share_percent),
                show(tag.time_ns),
                (tag.runs + tag.cut_runs).to_string(),
                length(tag.run_ns.median, tag.run_ns_at_least.median),
                length(tag.run_ns.max, tag.run_ns_at_least.max),
            ]
        };
        let rows: Vec<Vec<String>> = tags.iter().take(ROWS).map(row).collect();
        text += "\n";
        text += &table::lines(&[signal, "share", "time", "runs", "median", "longest"], &rows);
        if tags.len() > ROWS {
            text += &format!("and {} more\n", tags.len() - ROWS);
        }
    }
    text
}

/// A length of the runs that were seen whole; `>=` if those that were cut make it more than it is
/// exact anyway.
pub fn length(whole_ns: u64, at_least_ns: u64) -> String {
    const EXACT_PARTS: u64 = 20;
    match at_least_ns > whole_ns + whole_ns / EXACT_PARTS {
        true => format!(">= {}", show(at_least_ns)),
        false => show(whole_ns),
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
        // A word that nobody ever wrote says nothing.
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

fn notes(summary: &Summary) -> Vec<String> {
    let mut notes = Vec::new();
    if summary.gaps > 0 {
        let share =
            100.0 * number(summary.gap_ns) / number((summary.gap_ns + summary.observed_ns).max(1));
        notes.push(format!(
            "nobody looked in {} gaps, {share:.1} % of the time, the longest {}{}: a run is \
             joined through a gap in which nothing can have changed; the other time in gaps is in \
             no share",
            summary.gaps,
            show(summary.longest_gap_ns),
            // More than interrupts take.
            if share > 5.0 { ", as others had the observer's lane" } else { "" }
        ));
    }
    if let Some(percent) = summary.not_running_percent {
        notes.push(format!("the thread did not run for {percent:.1} % of the observed time"));
    }
    if let Some(missed) = summary.missed_switches.filter(|&missed| missed > 0) {
        notes.push(format!("{missed} switches of the lanes came and went between two samples"));
    }
    if summary.steal_ns > 0 {
        notes.push(format!("the host took {} from the lanes: steal time", show(summary.steal_ns)));
    }
    if summary.stopped_ns > 0 {
        let at_end = summary.stopped_at_end_ns;
        notes.push(format!(
            "it was stopped for {} to share its pages, and for {} at the end to have its own",
            show(summary.stopped_ns.saturating_sub(at_end)),
            show(at_end),
        ));
    }
    if let Some(dte) = &summary.dte {
        notes.push(format!(
            "double-time error: {} rates kept, {} left out (tolerance {} %, at least {:.0} ns); {} \
             samples in which a counter shrank",
            dte.kept, dte.discarded, dte.tolerance_percent, dte.floor_ns, dte.shrunk
        ));
    }
    if let Some(cost) = &summary.cost_percent {
        notes.push(format!(
            "being observed cost {:.1} % (95 %: {:.1} to {:.1}){}",
            cost.median,
            cost.low,
            cost.high,
            summary.two_percent_at_ns.map_or_else(String::new, |ns| format!(
                "; a look each {} would cost some 2 %: --period",
                show(ns)
            ))
        ));
    }
    if !summary.cost_unknown.is_empty() {
        notes.push(format!("the cost of being observed is not known: {}", summary.cost_unknown));
    }
    if summary.refused_threads > 0 {
        notes
            .push(format!("{} threads found no slot to say what they do", summary.refused_threads));
    }
    if summary.returns == Some(false) {
        notes.push(NO_RETURNS.to_owned());
    }
    if summary.ambiguous_entries > 0 {
        notes.push(format!(
            "{} of {} functions have the lower half of their address from another and say nothing: \
             their time counts for their callers",
            summary.ambiguous_entries,
            summary.entries + summary.ambiguous_entries
        ));
    }
    if !summary.ended.is_empty() {
        notes.push(format!("of this recording: {}", summary.ended));
    }
    notes
}
