//! Distributions as every benchmark prints them.

use std::io::Write;
use std::process::ExitCode;

use elfen_console::failure::Failure;
use elfen_console::{output, table};
use serde::Serialize;

use crate::bench::distribution::Distribution;

/// One line of a benchmark's table.
pub(super) fn row(what: &str, unit: &str, distribution: &Distribution) -> Vec<String> {
    let Distribution { median, p99, max, n } = distribution;
    let cells = [what, unit].map(str::to_owned).into_iter();
    cells
        .chain([median, p99, max].map(|value| format!("{value:.1}")))
        .chain([n.to_string()])
        .collect()
}

fn table(rows: &[Vec<String>]) -> String {
    table::lines(&["what", "unit", "median", "p99", "max", "n"], rows)
}

/// Prints a benchmark's result: one JSON object, or the table.
pub(super) fn print(
    out: &mut dyn Write,
    json: bool,
    report: &impl Serialize,
    rows: &[Vec<String>],
) -> Result<ExitCode, Failure> {
    output::print(out, json, report, || table(rows))?;
    Ok(ExitCode::SUCCESS)
}
