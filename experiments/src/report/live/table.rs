//! The table on top: every load with everything that shared the core.

use super::measured::{Measured, Side, finite, percent};
use crate::live::summary::{Figure, Row};
use crate::report::Table;
use crate::report::scale::{self, said, short};

const NOTE: &str = "Medians over invocations; in parentheses the 95 % interval (bootstrap), from \
    three invocations on. p99 to no batch: within an invocation. Batch: its work, as a part of \
    what it does with nothing beside it. Utilisation: of both lanes, 1.0 is one lane that is \
    always busy. Overlap: the part of the requests' time that the batch ran beside them. Reaction: \
    from a request's start until the batch is off its lane, median and p99.";
const HELPERS: &str = " With helpers: load generator and coordinator counted in, where they share \
    the batch lane's CPU.";
/// Helpers that take less of a lane than this are not worth a column.
const HELPED: f64 = 0.005;

pub(super) fn table(measured: &Measured) -> Table {
    let several = measured.batches().len() > 1;
    let helped = measured.rows.iter().any(|row| row.helper_utilisation.median > HELPED);
    let columns: Vec<(&str, Cell)> = [
        ("load", (|row| scale::percent(percent(row) / 100.0)) as Cell),
        ("beside the service", |row| Side::of(row).title()),
        ("program", |row| row.batch.clone().unwrap_or_default()),
        ("p50, ms", |row| with_interval(Some(row.p50_ms), 1.0, "")),
        ("p99, ms", |row| with_interval(Some(row.p99_ms), 1.0, "")),
        ("p99 to no batch", |row| with_interval(row.p99_ratio, 1.0, "")),
        ("batch", batch),
        ("utilisation", |row| alone(Some(row.utilisation), 1.0, "")),
        ("with helpers", |row| alone(Some(row.utilisation_with_helpers), 1.0, "")),
        ("overlap", |row| alone(row.overlapped, 100.0, " %")),
        ("reaction, µs", reaction),
        ("runs", |row| row.runs.to_string()),
    ]
    .into_iter()
    .filter(|(name, _)| (several || *name != "program") && (helped || *name != "with helpers"))
    .collect();
    // What no run has is no column: there is no overlap without a task map.
    let is_known =
        |(_, cell): &&(&str, Cell)| measured.rows.iter().any(|row| !cell(row).is_empty());
    let columns: Vec<_> = columns.iter().filter(is_known).collect();
    let row = |row: &Row| columns.iter().map(|(_, cell)| cell(row)).collect();
    Table {
        title: "Summary".to_owned(),
        head: columns.iter().map(|(name, _)| (*name).to_owned()).collect(),
        rows: measured.rows.iter().map(row).collect(),
        note: format!("{NOTE}{}", if helped { HELPERS } else { "" }),
    }
}

type Cell = fn(&Row) -> String;

/// A part of what it does alone; where that is not known, its work a second.
fn batch(row: &Row) -> String {
    let work = match row.batch_relative.and_then(finite) {
        Some(part) => with_interval(Some(part), 100.0, " %"),
        None => with_interval(row.batch_per_second, 1.0, " a second"),
    };
    if row.batch_verified == Some(false) { format!("{work} WRONG") } else { work }
}

fn reaction(row: &Row) -> String {
    let both = row.reaction_us.and_then(finite).zip(row.reaction_p99_us.and_then(finite));
    both.map_or_else(String::new, |(median, p99)| {
        format!("{}, {}", said(median.median), said(p99.median))
    })
}

fn with_interval(figure: Option<Figure>, times: f64, unit: &str) -> String {
    let interval = figure.and_then(finite).and_then(|figure| figure.ci95);
    let interval = interval.map_or_else(String::new, |[low, high]| {
        format!(" ({}–{})", said(low * times), said(high * times))
    });
    alone(figure, times, unit) + &interval
}

fn alone(figure: Option<Figure>, times: f64, unit: &str) -> String {
    figure.and_then(finite).map_or_else(String::new, |one| short(one.median * times) + unit)
}
