//! The report of live runs: a summary, and the thesis's figures from what was measured.
//!
//! What runs say together, medians and ratios with their intervals, is `crate::live::summary`'s;
//! here it is found, drawn and put into words.

mod doubts;
mod figures;
mod machine;
mod measured;
mod table;

use super::Report;
use crate::live::summary;
use crate::record::{Line, Run};
use measured::Measured;

/// Why lines give no report.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    #[error("it is empty")]
    Empty,
    #[error("line 1 is no setup")]
    NoSetup,
    #[error("line {line} is the setup of other runs than line 1")]
    OtherSetup { line: usize },
    #[error("line {line}: {what} is {value}, which nothing measures")]
    NoMeasure { line: usize, what: &'static str, value: String },
    #[error("it has no runs, only a setup")]
    NoRuns,
}

/// The report of a results file's lines; its title and command may be changed before it is
/// rendered.
pub fn report(lines: &[Line]) -> Result<Report, Unusable> {
    let setup = match lines.first() {
        None => return Err(Unusable::Empty),
        Some(Line::Run(_)) => return Err(Unusable::NoSetup),
        Some(Line::Setup(setup)) => setup,
    };
    let mut runs = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        match line {
            Line::Run(run) => {
                check(run, index + 1)?;
                runs.push(run);
            }
            Line::Setup(other) if machine::is_same(setup, other) => {}
            Line::Setup(_) => return Err(Unusable::OtherSetup { line: index + 1 }),
        }
    }
    if runs.is_empty() {
        return Err(Unusable::NoRuns);
    }
    let measured = Measured { rows: summary::rows(lines) };
    let mut notes = vec![machine::description(setup)];
    notes.extend(machine::mechanisms(&measured.rows));
    notes.extend(machine::limits(setup));
    notes.extend(doubts::failures(&runs));
    let doubts = doubts::table(&runs);
    notes.extend(doubts.as_ref().map(doubts::pointer));
    Ok(Report {
        title: "Elfen: live runs".to_owned(),
        command: setup.command.clone(),
        notes,
        tables: vec![table::table(&measured)],
        figures: figures::all(setup, &measured),
        appendix: doubts.into_iter().collect(),
    })
}

/// Refuses what no run can have measured.
fn check(run: &Run, line: usize) -> Result<(), Unusable> {
    let numbers = [
        ("load", run.load),
        ("rps", run.rps),
        ("duration_s", run.duration_s),
        ("achieved_rps", run.achieved_rps),
        ("p50_ms", run.p50_ms),
        ("p95_ms", run.p95_ms),
        ("p99_ms", run.p99_ms),
        ("p999_ms", run.p999_ms),
        ("max_ms", run.max_ms),
        ("mean_ms", run.mean_ms),
        ("late_p99_ms", run.late_p99_ms),
        ("request_lane_utilisation", run.request_lane_utilisation),
        ("batch_lane_utilisation", run.batch_lane_utilisation),
        ("batch_per_second", run.batch_per_second.unwrap_or(0.0)),
        ("helper_utilisation", run.helper_utilisation),
    ];
    match numbers.into_iter().find(|(_, value)| !(0.0..=1e12).contains(value)) {
        Some((what, value)) => Err(Unusable::NoMeasure { line, what, value: value.to_string() }),
        None => Ok(()),
    }
}
