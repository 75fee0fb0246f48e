//! `elfen lab simulate --company`: what `elfen lab experiment` should find, a row for each company.

use std::io::Write;
use std::process::ExitCode;

use elfen_console::failure::{Failure, Status};
use elfen_console::output::print;
use elfen_console::table;
use serde::Serialize;

use super::batch_args::Parameters;
use crate::expected::{self, Expected};
use crate::live::plan::Spec;
use simulator::Model;

/// What `--json` prints; the table shows the same. Columns are those of `elfen lab experiment`.
#[derive(Serialize)]
struct Report {
    seed: u64,
    companies: Vec<Row>,
    parameters: Parameters,
}

#[derive(Serialize)]
struct Row {
    company: String,
    requests: u64,
    p50_ms: f64,
    p99_ms: f64,
    p99_to_none: f64,
    /// Of what it would get done on as many lanes of its own.
    batch_work: f64,
    request_lane_utilisation: f64,
    batch_lane_utilisation: f64,
    utilisation: f64,
    /// Of the time in which requests ran.
    overlapped: f64,
}

/// The same requests in each company.
pub(crate) fn run(
    service: &Model,
    companies: &[Spec],
    parameters: Parameters,
    json: bool,
    out: &mut dyn Write,
) -> Result<ExitCode, Failure> {
    let found = expected::expected(service, companies).ok_or_else(|| {
        let why = "the model has no rule for core scheduling";
        Failure::new(Status::Usage, "the companies", why, "leave core-scheduling out")
    })?;
    let companies = found.iter().map(|one| Row::new(service, one)).collect();
    let report = Report { seed: service.seed, companies, parameters };
    print(out, json, &report, || report.text())?;
    Ok(ExitCode::SUCCESS)
}

impl Row {
    fn new(service: &Model, expected: &Expected) -> Self {
        let Expected { company, outcome, p99_to_none } = expected;
        Self {
            company: company.to_string(),
            requests: outcome.requests,
            p50_ms: outcome.quantile_ms(0.5),
            p99_ms: outcome.quantile_ms(0.99),
            p99_to_none: *p99_to_none,
            batch_work: outcome.batch_work(&service.batch),
            request_lane_utilisation: outcome.request_lane_utilisation(),
            batch_lane_utilisation: expected.batch_lane(),
            utilisation: outcome.utilisation(),
            overlapped: expected.overlapped(),
        }
    }
}

type Cell = fn(&Row) -> String;

const COLUMNS: [(&str, Cell); 9] = [
    ("company", |row| row.company.clone()),
    ("p50 ms", |row| format!("{:.3}", row.p50_ms)),
    ("p99 ms", |row| format!("{:.3}", row.p99_ms)),
    ("p99 to none", |row| format!("{:.3}", row.p99_to_none)),
    ("batch work", |row| percent(row.batch_work)),
    ("request lane", |row| percent(row.request_lane_utilisation)),
    ("batch lane", |row| percent(row.batch_lane_utilisation)),
    ("utilisation", |row| format!("{:.3}", row.utilisation)),
    ("overlap", |row| format!("{:.2} %", row.overlapped * 100.0)),
];

fn percent(part: f64) -> String {
    format!("{:.1} %", part * 100.0)
}

impl Report {
    fn text(&self) -> String {
        let cells = |row: &Row| COLUMNS.map(|(_, cell)| cell(row)).to_vec();
        let rows: Vec<Vec<String>> = self.companies.iter().map(cells).collect();
        table::lines(&COLUMNS.map(|(name, _)| name), &rows) + &self.parameters.text()
    }
}
