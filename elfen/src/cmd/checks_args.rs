//! `--checks`: chooses how a batch program gets its checks, by the option and by what the program's
//! file allows.
//!
//! Every batch has a guard. Checks in a program react before the guard's next poll.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::Arc;

use elfen_console::failure::{Failure, Status};
use elfen_console::output::warn;
use elfen_instrument::{CheckMethod, Plan, Reason, find_library, inspect};
use elfen_kernel::preempted::Notes;
use elfen_machine::pair::Pair;
use elfen_machine::placement::may_take_realtime_rank;
use elfen_run::channels::{Signals, Writer};

#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum ChecksName {
    /// The cheapest checks that the program allows
    Auto,
    /// No checks in the program: only its guard
    Guard,
    /// Checks written into its loops while it runs
    Live,
    /// Checks in its source: elfen_rt::check!(), elfen_check()
    Inline,
    /// Checks written over the space of -fpatchable-function-entry
    Patch,
    /// The hook of -pg -mfentry
    Fentry,
    /// The hook of -pg
    Mcount,
    /// The hooks of -finstrument-functions
    Cyg,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ChosenChecks {
    pub(crate) checks: CheckMethod,
    /// The library to preload, if the checks require one.
    pub(crate) library: Option<PathBuf>,
}

pub(crate) const GUARD: ChosenChecks = ChosenChecks { checks: CheckMethod::Guard, library: None };

/// Attaches the kernel's reports of preempted batches, which live checks require. `Err` says what
/// is missing.
pub(crate) fn attach_notes(signals: &Signals, pairs: &[Pair]) -> Result<Arc<Notes>, String> {
    match &signals.tasks {
        Some((_, Writer::Program(_))) => {}
        _ => return Err("it requires the task map of the eBPF program".to_owned()),
    }
    if pairs.iter().map(|pair| pair.batch.iter().count()).sum::<usize>() > 1 {
        may_take_realtime_rank().map_err(|error| {
            format!("with several batch lanes, guards must take all of them at once: {error}")
        })?;
    }
    Notes::attach().map(Arc::new).map_err(|error| error.to_string())
}

impl ChecksName {
    pub(crate) fn choose(self, program: &OsStr) -> Result<ChosenChecks, Failure> {
        let checks = match self {
            Self::Guard => return Ok(GUARD),
            Self::Auto => return choose_best(program),
            Self::Live => CheckMethod::Live,
            Self::Inline => CheckMethod::Inline,
            Self::Patch => CheckMethod::Patch,
            Self::Fentry => CheckMethod::Fentry,
            Self::Mcount => CheckMethod::Mcount,
            Self::Cyg => CheckMethod::Cyg,
        };
        let file =
            inspect(program).map_err(|reason| refuse(program, &reason, CheckMethod::Guard))?;
        let plan = file.allows(checks);
        with_library(plan.map_err(|reason| refuse(program, &reason, file.best().checks))?)
    }
}

/// The cheapest checks that the file allows. A file that cannot be inspected gets only its guard.
/// If the file cannot be executed, the kernel reports that when the program starts.
fn choose_best(program: &OsStr) -> Result<ChosenChecks, Failure> {
    let Ok(file) = inspect(program) else { return Ok(GUARD) };
    let plan = file.best();
    with_library(plan).or_else(|_| {
        warn(&format!(
            "checks by {} require the preload library, which was not found: using only the guard",
            plan.checks.name()
        ));
        Ok(GUARD)
    })
}

fn with_library(plan: Plan) -> Result<ChosenChecks, Failure> {
    let library = plan.preload.then(find_library).transpose().map_err(|error| {
        let fix = "build all of Elfen (`cargo build --release`), or name its folder in ELFEN_LIB";
        Failure::new(Status::Failed, "finding the preload library", error, fix)
    })?;
    Ok(ChosenChecks { checks: plan.checks, library })
}

fn refuse(program: &OsStr, reason: &Reason, best: CheckMethod) -> Failure {
    // Suggest only checks that work on every machine: live checks also require kernel features.
    let best = if best == CheckMethod::Live { CheckMethod::Guard } else { best };
    let fix = format!("use --checks {}, or --checks auto", best.name());
    let what = format!("program {:?}", program.to_string_lossy());
    Failure::new(Status::Unsupported, what, format!("it {reason}"), fix)
}
