//! `elfen status`: the batches that run now, and what they have borrowed.

use std::io::Write;
use std::process::ExitCode;
use std::sync::atomic::Ordering::Relaxed;

use elfen_console::failure::{Failure, Status};
use elfen_console::{duration, table};
use elfen_host::run::figures::Figures;
use elfen_host::run::find::{self, Batch};
use elfen_rt::signal::lane::LaneSlot;
use serde::Serialize;

/// List the batches that run now
#[derive(clap::Args, Debug)]
#[command(after_help = "Example:\n  elfen status --json | jq '.batches[].overlapped_ns'")]
pub(crate) struct Args {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    batches: Vec<BatchReport>,
}

#[derive(Serialize)]
struct BatchReport {
    pid: u32,
    program: String,
    keeper: u32,
    policy: Option<&'static str>,
    budget_ns: u64,
    lanes: Vec<LaneReport>,
    #[serde(flatten)]
    figures: Figures,
}

#[derive(Serialize)]
struct LaneReport {
    request: u64,
    batch: u64,
    state: &'static str,
    state_since_ns: u64,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let report = Report { batches: batches()?.iter().map(report).collect() };
    elfen_console::output::print(out, args.json, &report, || report.text())?;
    Ok(ExitCode::SUCCESS)
}

pub(super) fn batches() -> Result<Vec<Batch>, Failure> {
    find::batches().map_err(|error| {
        let fix = "use a kernel with System V shared memory (CONFIG_SYSVIPC)";
        Failure::new(Status::Unsupported, "looking for batches", error, fix)
    })
}

fn report(batch: &Batch) -> BatchReport {
    let settings = batch.settings();
    BatchReport {
        pid: batch.pid,
        program: batch.program.clone(),
        keeper: batch.keeper.pid().unsigned_abs(),
        policy: settings.map(|settings| settings.policy.name()),
        budget_ns: settings.map_or(0, |settings| settings.budget_ns),
        lanes: batch.lanes.slots().map(lane).collect(),
        figures: Figures::of(&batch.lanes),
    }
}

fn lane(slot: &LaneSlot) -> LaneReport {
    let state = slot.state().map(|(state, since_ns)| (state.name(), since_ns));
    let (state, since_ns) = state.unwrap_or(("unknown", 0));
    LaneReport {
        request: slot.request_cpu.load(Relaxed),
        batch: slot.batch_cpu.load(Relaxed),
        state,
        state_since_ns: since_ns,
    }
}

impl Report {
    fn text(&self) -> String {
        if self.batches.is_empty() {
            return "no batch runs\n".to_owned();
        }
        let row = |batch: &BatchReport| {
            vec![
                batch.pid.to_string(),
                batch.program.clone(),
                batch.policy.unwrap_or("unknown").to_owned(),
                batch.lanes.len().to_string(),
                time_or_dash(batch.figures.borrowed_ns),
                time_or_dash(batch.figures.overlapped_ns),
                batch.figures.naps.to_string(),
            ]
        };
        let rows: Vec<Vec<String>> = self.batches.iter().map(row).collect();
        let heading = ["pid", "program", "policy", "lanes", "borrowed", "overlapped", "naps"];
        table::lines(&heading, &rows)
    }
}

/// A time that the kernel does not count is not shown as nothing.
fn time_or_dash(ns: Option<u64>) -> String {
    ns.map_or("-".to_owned(), duration::show)
}
