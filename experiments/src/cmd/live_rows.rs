//! The rows of live runs as people read them, and what has to be known of them.

use std::path::Path;

use elfen_console::table;

use crate::live::summary::{Figure, Foreseen, Row};
use crate::record::Line;

const HEADING: [&str; 11] = [
    "load",
    "company",
    "batch",
    "p50 ms",
    "p99 ms",
    "p99 to none",
    "batch work",
    "request lane",
    "batch lane",
    "overlap",
    "reaction",
];

/// A median with its interval, if it has one.
pub(crate) fn interval(figure: &Figure) -> String {
    match figure.ci95 {
        Some([low, high]) => format!("{:.3} [{low:.3}, {high:.3}]", figure.median),
        None => format!("{:.3}", figure.median),
    }
}

/// The rows as columns for people.
pub(crate) fn text(rows: &[Row]) -> String {
    let mut heading = HEADING.to_vec();
    let mut cells: Vec<Vec<String>> = rows.iter().map(cells).collect();
    if rows.iter().any(|row| row.expected.is_some()) {
        heading.extend(["p99 foreseen", "both lanes", "foreseen"]);
        cells.iter_mut().zip(rows).for_each(|(cells, row)| cells.extend(foreseen(row)));
    }
    table::lines(&heading, &cells)
}

/// What the model makes of the row, and how far the row is from that.
fn foreseen(row: &Row) -> [String; 3] {
    let percent = |off: f64| format!("{:+.1}", off * 100.0);
    let beside = |of: fn(&Foreseen) -> (Figure, Figure)| match row.expected.as_ref().map(of) {
        Some((Figure { median: foreseen, .. }, Figure { median: off, ci95 })) => {
            let interval = ci95.map(|ends| ends.map(percent).join(", "));
            let interval = interval.map_or_else(String::new, |ends| format!(" [{ends}]"));
            format!("{foreseen:.3}: {} %{interval}", percent(off))
        }
        None => "-".to_owned(),
    };
    [
        beside(|expected| (expected.p99_ratio, expected.p99_ratio_off)),
        format!("{:.3}", row.utilisation.median),
        beside(|expected| (expected.utilisation, expected.utilisation_off)),
    ]
}

fn cells(row: &Row) -> Vec<String> {
    let dash = || "-".to_owned();
    let percent = |figure: &Figure| format!("{:.1} %", figure.median * 100.0);
    let work = |row: &Row| match (&row.batch_relative, row.batch_verified) {
        (Some(relative), Some(false)) => format!("{} WRONG", percent(relative)),
        (Some(relative), _) => percent(relative),
        (None, _) => dash(),
    };
    let has_batch = row.batch.is_some();
    vec![
        format!("{:.0} %", row.load * 100.0),
        row.asked.clone(),
        row.batch.clone().unwrap_or_else(dash),
        format!("{:.3}", row.p50_ms.median),
        format!("{:.3}", row.p99_ms.median),
        row.p99_ratio.as_ref().map_or_else(dash, interval),
        work(row),
        percent(&row.request_lane_utilisation),
        if has_batch { percent(&row.batch_lane_utilisation) } else { dash() },
        row.overlapped
            .as_ref()
            .map_or_else(dash, |overlap| format!("{:.2} %", overlap.median * 100.0)),
        row.reaction_us.as_ref().map_or_else(dash, |us| format!("{:.1} us", us.median)),
    ]
}

/// The remarks that a reader of these rows needs, a sentence each.
pub(crate) fn remarks(lines: &[Line], rows: &[Row]) -> Vec<String> {
    let mut remarks = Vec::new();
    let mechanisms: Vec<&str> = rows.iter().filter_map(|row| row.mechanisms.as_deref()).collect();
    for mechanism in &mechanisms {
        let remark = format!("ran with: {mechanism}");
        if !remarks.contains(&remark) {
            remarks.push(remark);
        }
    }
    if mechanisms.iter().any(|mechanism| mechanism.contains("service alone")) {
        remarks.push(
            "not shown: the overlap, and what others do on the request lane; that takes the task \
             map (root, or group elfen beside elfend), while the service's page says no more than \
             when its requests run"
                .to_owned(),
        );
    }
    let limits = lines.iter().filter_map(|line| match line {
        Line::Setup(setup) => Some(&setup.limits),
        Line::Run(_) => None,
    });
    remarks.extend(limits.flatten().cloned());
    let starved = |line: &&Line| match line {
        Line::Run(run) => run.batch.is_some() && run.batch_per_second.is_none(),
        Line::Setup(_) => false,
    };
    let starved = lines.iter().filter(starved).count();
    if starved > 0 {
        remarks.push(format!(
            "in {starved} runs the batch got so little that it could not even end: others kept the \
             request lane busy, and it naps for them as well; with --signal service it naps for \
             the service alone"
        ));
    }
    if rows.iter().any(|row| row.expected.is_some()) {
        remarks.push(
            "foreseen: by the model of `elfen lab simulate`, for the very requests of each run, as \
             long as they worked there without what was emulated; behind the colon, how much more \
             was measured, invocation by invocation"
                .to_owned(),
        );
    }
    remarks.extend(ends(lines));
    remarks.extend(recordings(lines));
    remarks.extend(rows.iter().filter(|row| row.errors > 0).map(|row| {
        let Row { errors, requests, asked, load, .. } = row;
        let percent = load * 100.0;
        format!(
            "{errors} of {requests} requests failed beside {asked} at {percent:.0} %: they count \
             as 10 s"
        )
    }));
    if rows.iter().any(|row| row.batch_verified == Some(false)) {
        remarks.push("a batch found a result wrong, or not the one that it has alone".to_owned());
    }
    remarks
}

/// How often a program of the user's own came to its end within a run, if it did.
fn ends(lines: &[Line]) -> Option<String> {
    let runs = lines.iter().filter_map(|line| match line {
        Line::Run(run) if run.batch_ends > 0 => Some(run),
        _ => None,
    });
    let (runs, ends) = runs.fold((0, 0), |(runs, ends), run| (runs + 1, ends + run.batch_ends));
    (runs > 0).then(|| {
        format!(
            "runs in which the batch came to its end and was started again: {runs}, {ends} times"
        )
    })
}

/// Where the recordings of runs are, if there are any.
fn recordings(lines: &[Line]) -> Option<String> {
    let runs = lines.iter().filter_map(|line| match line {
        Line::Run(run) => run.shim.as_deref(),
        Line::Setup(_) => None,
    });
    let files: Vec<&Path> = runs.collect();
    let folder = files.last()?.parent()?.display();
    let count = files.len();
    Some(format!(
        "recorded by Shim: {count} runs, each named in the results; `elfen lab report FILE.shim \
         --html FILE.html` draws one of {folder}"
    ))
}

/// Whether every batch found its results right.
pub(crate) fn all_right(rows: &[Row]) -> bool {
    rows.iter().all(|row| row.batch_verified != Some(false))
}
