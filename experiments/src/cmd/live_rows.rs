//! The table of a live experiment, and the remarks below it.

use std::path::Path;

use elfen_console::table;

use crate::live::summary::{Figure, Foreseen, Row};
use crate::record::{Line, runs, setup};

const HEADING: [&str; 11] = [
    "load",
    "scenario",
    "batch",
    "p50 ms",
    "p99 ms",
    "p99 / none",
    "batch work",
    "request lane",
    "batch lane",
    "overlap",
    "reaction",
];

/// Formats a median, with its interval if it has one.
pub(crate) fn interval(figure: &Figure) -> String {
    match figure.ci95 {
        Some([low, high]) => format!("{:.3} [{low:.3}, {high:.3}]", figure.median),
        None => format!("{:.3}", figure.median),
    }
}

/// Returns the table of these rows.
pub(crate) fn text(rows: &[Row]) -> String {
    let mut heading = HEADING.to_vec();
    let mut cells: Vec<Vec<String>> = rows.iter().map(|row| cells(row).to_vec()).collect();
    if rows.iter().any(|row| row.p99_cost.is_some()) {
        heading.push("p99 cost");
        let cost = |row: &Row| row.p99_cost.as_ref().map_or_else(dash, interval);
        cells.iter_mut().zip(rows).for_each(|(cells, row)| cells.push(cost(row)));
    }
    if rows.iter().any(|row| row.expected.is_some()) {
        heading.extend(["p99 predicted", "both lanes", "predicted"]);
        cells.iter_mut().zip(rows).for_each(|(cells, row)| cells.extend(predicted(row)));
    }
    table::lines(&heading, &cells)
}

/// Returns three cells: the predicted p99 ratio, the measured utilisation of both lanes, and the
/// predicted utilisation. Each prediction is followed by the deviation of the measurement.
fn predicted(row: &Row) -> [String; 3] {
    let percent = |off: f64| format!("{:+.1}", off * 100.0);
    let with_deviation = |of: fn(&Foreseen) -> (Figure, Figure)| match row.expected.as_ref().map(of)
    {
        Some((Figure { median: predicted, .. }, Figure { median: off, ci95 })) => {
            let interval = ci95.map(|ends| ends.map(percent).join(", "));
            let interval = interval.map_or_else(String::new, |ends| format!(" [{ends}]"));
            format!("{predicted:.3}: {} %{interval}", percent(off))
        }
        None => "-".to_owned(),
    };
    [
        with_deviation(|expected| (expected.p99_ratio, expected.p99_ratio_off)),
        format!("{:.3}", row.utilisation.median),
        with_deviation(|expected| (expected.utilisation, expected.utilisation_off)),
    ]
}

fn dash() -> String {
    "-".to_owned()
}

fn percent(figure: &Figure) -> String {
    format!("{:.1} %", figure.median * 100.0)
}

/// Formats the batch's work, as a part of its work alone.
pub(crate) fn work(row: &Row) -> String {
    match (&row.batch_relative, row.batch_verified) {
        (Some(relative), Some(false)) => format!("{} WRONG", percent(relative)),
        (Some(relative), _) => percent(relative),
        (None, _) => dash(),
    }
}

pub(crate) fn cells(row: &Row) -> [String; HEADING.len()] {
    let has_batch = row.batch.is_some();
    [
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

/// Returns what a reader of these rows has to know, as one sentence for each point.
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
            "not shown: the overlap, and other programs on the request lane. Both require the task \
             map (root, or membership of group elfen if elfend runs); the service's page reports \
             only its requests"
                .to_owned(),
        );
    }
    remarks.extend(setup(lines).into_iter().flat_map(|setup| setup.limits.clone()));
    let starved = runs(lines).filter(|run| run.batch.is_some() && run.batch_per_second.is_none());
    let starved = starved.count();
    if starved > 0 {
        remarks.push(format!(
            "in {starved} runs the batch got too little time to finish: other programs kept the \
             request lane busy, and the batch also naps for them; with --source service it naps \
             only for the service"
        ));
    }
    if rows.iter().any(|row| row.expected.is_some()) {
        remarks.push(
            "predicted: by the model of `elfen lab simulate`, from the requests of each run and \
             their service times without the emulated slowdown; after the colon, by how much the \
             measurement exceeds the prediction, compared within each run"
                .to_owned(),
        );
    }
    remarks.extend(restarts(lines));
    remarks.extend(recordings(lines));
    remarks.extend(rows.iter().filter(|row| row.errors > 0).map(|row| {
        let Row { errors, requests, asked, load, .. } = row;
        let percent = load * 100.0;
        format!(
            "{errors} of {requests} requests failed in {asked} at {percent:.0} % load: each counts \
             as a latency of 10 s"
        )
    }));
    if rows.iter().any(|row| row.batch_verified == Some(false)) {
        remarks.push(
            "a batch computed a wrong result, or another result than when it ran alone".to_owned(),
        );
    }
    remarks
}

/// Describes how often the user's own program ended within a run and was started again.
fn restarts(lines: &[Line]) -> Option<String> {
    let ends: Vec<u32> = runs(lines).map(|run| run.batch_ends).filter(|ends| *ends > 0).collect();
    let (count, sum) = (ends.len(), ends.iter().sum::<u32>());
    (count > 0).then(|| format!("the batch ended and was restarted {sum} times in {count} runs"))
}

/// Describes where the recordings are and how many, if the runs were recorded.
fn recordings(lines: &[Line]) -> Option<String> {
    let files: Vec<&Path> = runs(lines).filter_map(|run| run.shim.as_deref()).collect();
    let folder = files.last()?.parent()?.display();
    let count = files.len();
    Some(format!(
        "recorded by Shim: {count} runs, in files that the results name; `elfen lab report \
         FILE.shim --html FILE.html` draws a recording of {folder}"
    ))
}

/// Whether the results of all batch programs are correct.
pub(crate) fn all_right(rows: &[Row]) -> bool {
    rows.iter().all(|row| row.batch_verified != Some(false))
}
