//! `elfen lab simulate --scenario`: what `elfen lab experiment` should find, a row for each
//! scenario.

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
    scenarios: Vec<Row>,
    parameters: Parameters,
}

#[derive(Serialize)]
struct Row {
    scenario: String,
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

/// The same requests in each scenario.
pub(crate) fn run(
    service: &Model,
    scenarios: &[Spec],
    parameters: Parameters,
    json: bool,
    out: &mut dyn Write,
) -> Result<ExitCode, Failure> {
    let found = expected::expected(service, scenarios).ok_or_else(|| {
        let why = "the model has no rule for core scheduling";
        Failure::new(Status::Usage, "the scenarios", why, "leave core-scheduling out")
    })?;
    let scenarios = found.iter().map(|one| Row::new(service, one)).collect();
    let report = Report { seed: service.seed, scenarios, parameters };
    print(out, json, &report, || report.text())?;
    Ok(ExitCode::SUCCESS)
}

impl Row {
    fn new(service: &Model, expected: &Expected) -> Self {
        let Expected { scenario, outcome, p99_to_none } = expected;
        Self {
            scenario: scenario.to_string(),
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

    fn cells(&self) -> Vec<String> {
        let percent = |part: f64| format!("{:.1} %", part * 100.0);
        vec![
            self.scenario.clone(),
            format!("{:.3}", self.p50_ms),
            format!("{:.3}", self.p99_ms),
            format!("{:.3}", self.p99_to_none),
            percent(self.batch_work),
            percent(self.request_lane_utilisation),
            percent(self.batch_lane_utilisation),
            format!("{:.3}", self.utilisation),
            format!("{:.2} %", self.overlapped * 100.0),
        ]
    }
}

impl Report {
    fn text(&self) -> String {
        let heading = [
            "scenario",
            "p50 ms",
            "p99 ms",
            "p99 to none",
            "batch work",
            "request lane",
            "batch lane",
            "utilisation",
            "overlap",
        ];
        let rows: Vec<Vec<String>> = self.scenarios.iter().map(Row::cells).collect();
        table::lines(&heading, &rows) + &self.parameters.text()
    }
}
