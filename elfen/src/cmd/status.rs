//! `elfen status`: lists the running batches, the time that they have borrowed, and the fences of
//! elfend.

use std::io::{ErrorKind, Write};
use std::process::ExitCode;
use std::sync::atomic::Ordering::Relaxed;

use elfen_console::failure::{Failure, Status};
use elfen_console::{duration, table};
use elfen_machine::cgroup::CgroupPath;
use elfen_machine::fence::state::RecordedFence;
use elfen_machine::fence::status::{Answer, FenceStatus, Request, Status as Fences, ask};
use elfen_rt::signal::lane::LaneSlot;
use elfen_run::batches::{self, Batch};
use elfen_run::figures::Figures;
use serde::Serialize;

use super::pause::RunDir;

const AFTER: &str = "\
Examples:
  elfen status --json | jq '.batches[].overlapped_ns'
  elfen status --healthy     for health checks: status 1 unless every fence runs";

/// List the running batches, and the fences
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    run_dir: RunDir,

    /// Exit status 1 unless elfend answers and all of its fences run
    #[arg(long)]
    healthy: bool,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct StatusReport {
    batches: Vec<BatchReport>,
    /// `None` if no elfend answers.
    elfend: Option<Fences>,
    /// The fences that an earlier elfend has left behind, if no elfend answers.
    left: Vec<LeftFence>,
    /// Whether elfend runs but does not answer.
    hangs: bool,
    /// The reason of `elfen pause`, which may be empty; `None` without a pause.
    paused: Option<String>,
}

#[derive(Serialize)]
struct LeftFence {
    name: String,
    path: CgroupPath,
    frozen: bool,
}

#[derive(Serialize)]
struct BatchReport {
    pid: u32,
    program: String,
    supervisor: u32,
    /// What confines the batch to its lanes.
    level: &'static str,
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

pub(crate) fn run(args: &StatusArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let batches = batches(&args.run_dir)?.iter().map(report).collect();
    // If elfend hangs, the report has the fences that elfend recorded, and the command fails.
    let (elfend, hangs) = match ask_elfend(&args.run_dir) {
        Ok(answer) => (answer, None),
        Err(failure) => (None, Some(failure)),
    };
    let left = if elfend.is_some() { Vec::new() } else { left_fences(&args.run_dir)? };
    let paused = args.run_dir.folder().paused().map_err(|error| {
        let fix = "name another folder with --run-dir";
        Failure::new(Status::Failed, "reading whether fences are paused", error, fix)
    })?;
    let report = StatusReport { batches, elfend, left, hangs: hangs.is_some(), paused };
    let is_absent = args.healthy && report.elfend.is_none() && !report.hangs;
    let absent_line = if is_absent { "no elfend answers\n" } else { "" };
    elfen_console::output::print(out, args.json, &report, || report.text() + absent_line)?;
    if let Some(failure) = hangs {
        return Err(failure);
    }
    let healthy = report.elfend.as_ref().is_some_and(Fences::is_healthy);
    Ok(if args.healthy && !healthy {
        ExitCode::from(Status::Failed as u8)
    } else {
        ExitCode::SUCCESS
    })
}

/// The answer of elfend; `None` if elfend does not run.
fn ask_elfend(run_dir: &RunDir) -> Result<Option<Fences>, Failure> {
    let socket = run_dir.folder().socket();
    let failed = |why: &dyn std::fmt::Display| {
        let what = format!("asking elfend at {:?}", socket.display().to_string());
        Failure::new(Status::Failed, what, why, "read the log of elfend")
    };
    match ask(&socket, &Request::Status) {
        Ok(Answer::Status(status)) => Ok(Some(status)),
        Ok(other) => Err(failed(&format!("unexpected answer {other:?}"))),
        Err(error) => match error.kind() {
            ErrorKind::NotFound | ErrorKind::ConnectionRefused => Ok(None),
            _ => Err(failed(&error)),
        },
    }
}

/// The recorded fences whose cgroups still exist.
fn left_fences(run_dir: &RunDir) -> Result<Vec<LeftFence>, Failure> {
    let folder = run_dir.folder();
    let recorded = folder.recorded_fences().map_err(|error| {
        let what = format!("finding fences in {:?}", folder.path().display().to_string());
        Failure::new(Status::Failed, what, error, "name another folder with --run-dir")
    })?;
    let existing =
        recorded.into_iter().filter_map(|RecordedFence { name, path, freezer, .. }| {
            let frozen = freezer.is_requested().ok()?;
            Some(LeftFence { name, path, frozen })
        });
    Ok(existing.collect())
}

pub(super) fn batches(run_dir: &RunDir) -> Result<Vec<Batch>, Failure> {
    batches::batches(&run_dir.folder().socket()).map_err(|error| {
        let fix = "use a kernel with System V shared memory (CONFIG_SYSVIPC)";
        Failure::new(Status::Unsupported, "finding batches", error, fix)
    })
}

fn report(batch: &Batch) -> BatchReport {
    let settings = batch.settings();
    BatchReport {
        pid: batch.pid,
        program: batch.program.clone(),
        supervisor: batch.supervisor.pid().unsigned_abs(),
        level: batch.level().name(),
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

impl StatusReport {
    fn text(&self) -> String {
        let fences = self.elfend.as_ref().map_or_else(|| self.left_text(), fences_text);
        let paused = self.paused.as_ref().map(|why| match why.as_str() {
            "" => "PAUSED: all fences are frozen until `elfen resume`\n".to_owned(),
            why => format!("PAUSED: {why}; all fences are frozen until `elfen resume`\n"),
        });
        self.batches_text() + &paused.unwrap_or_default() + &fences
    }

    fn left_text(&self) -> String {
        let line = |left: &LeftFence| {
            let state = match (self.hangs, left.frozen) {
                (true, true) => "frozen; elfend does not answer, so the reason is unknown",
                (true, false) => "runs; elfend does not answer, so its guarantees are unknown",
                (false, true) => {
                    "frozen, as no elfend answers; start elfend, or run `elfend --release`"
                }
                (false, false) => {
                    "runs, and no elfend guards it; start elfend, or run `elfend --freeze`"
                }
            };
            format!("fence {}: {state}\n", left.name)
        };
        self.left.iter().map(line).collect()
    }

    fn batches_text(&self) -> String {
        if self.batches.is_empty() {
            return "no running batches\n".to_owned();
        }
        let row = |batch: &BatchReport| {
            vec![
                batch.pid.to_string(),
                batch.program.clone(),
                batch.level.to_owned(),
                batch.policy.unwrap_or("unknown").to_owned(),
                batch.lanes.len().to_string(),
                time_or_dash(batch.figures.borrowed_ns),
                time_or_dash(batch.figures.overlapped_ns),
                batch.figures.naps.to_string(),
            ]
        };
        let rows: Vec<Vec<String>> = self.batches.iter().map(row).collect();
        let heading =
            ["pid", "program", "level", "policy", "lanes", "borrowed", "overlapped", "naps"];
        table::lines(&heading, &rows)
    }
}

/// A line for each fence, with the reason if it is frozen.
fn fences_text(status: &Fences) -> String {
    let mut text = String::new();
    for fence in &status.fences {
        let state = fence.why().map_or("runs".to_owned(), |why| format!("frozen: {why}"));
        let FenceStatus { name, lanes, processes, .. } = fence;
        let ran = fence.ran_ns().map(|(borrowed, overlapped)| {
            let [borrowed, overlapped] = [borrowed, overlapped].map(duration::show);
            format!(" borrowed {borrowed}, overlapped {overlapped},")
        });
        let ran = ran.unwrap_or_default();
        text += &format!("fence {name}: CPUs {lanes}, processes {processes},{ran} {state}\n");
    }
    for confined in &status.confined {
        text +=
            &format!("service {}: {} on CPUs {}\n", confined.service, confined.path, confined.cpus);
    }
    for line in &status.waiting {
        text += &format!("{line}\n");
    }
    text
}

/// Prints a dash for a time that the kernel does not count, to distinguish it from 0.
fn time_or_dash(ns: Option<u64>) -> String {
    ns.map_or("-".to_owned(), duration::show)
}
