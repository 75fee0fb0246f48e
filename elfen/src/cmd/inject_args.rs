//! `--inject`: chooses where a batch program gets its checks, from the option and from what the
//! file of the program allows.
//!
//! Every batch has a guard. A program with checks reacts earlier, before the guard polls.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::Arc;

use elfen_console::failure::{Failure, Status};
use elfen_console::output::warn;
use elfen_instrument::{Inject, Plan, Reason, find_library, inspect};
use elfen_kernel::preempted::Notes;
use elfen_machine::pair::Pair;
use elfen_machine::placement::may_take_realtime_rank;
use elfen_run::channels::{Signals, Writer};

#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum InjectName {
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
pub(crate) struct ChosenInjection {
    pub(crate) inject: Inject,
    /// The library to preload, if the injection needs it.
    pub(crate) library: Option<PathBuf>,
}

pub(crate) const GUARD: ChosenInjection = ChosenInjection { inject: Inject::Guard, library: None };

/// Attaches the kernel's notes of preempted batches, which live checks need. `Err` says what is
/// missing.
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

impl InjectName {
    pub(crate) fn choose(self, program: &OsStr) -> Result<ChosenInjection, Failure> {
        let inject = match self {
            Self::Guard => return Ok(GUARD),
            Self::Auto => return choose_best(program),
            Self::Live => Inject::Live,
            Self::Inline => Inject::Inline,
            Self::Patch => Inject::Patch,
            Self::Fentry => Inject::Fentry,
            Self::Mcount => Inject::Mcount,
            Self::Cyg => Inject::Cyg,
        };
        let file = inspect(program).map_err(|reason| refuse(program, &reason, Inject::Guard))?;
        let plan = file.allows(inject);
        with_library(plan.map_err(|reason| refuse(program, &reason, file.best().inject))?)
    }
}

/// The cheapest checks that the file allows. A file that cannot be inspected gets only its guard;
/// if it cannot run at all, the kernel reports that at its start.
fn choose_best(program: &OsStr) -> Result<ChosenInjection, Failure> {
    let Ok(file) = inspect(program) else { return Ok(GUARD) };
    let plan = file.best();
    with_library(plan).or_else(|_| {
        warn(&format!(
            "checks by {} require the preload library, which was not found: using only the guard",
            plan.inject.name()
        ));
        Ok(GUARD)
    })
}

fn with_library(plan: Plan) -> Result<ChosenInjection, Failure> {
    let library = plan.preload.then(find_library).transpose().map_err(|error| {
        let fix = "build all of Elfen (`cargo build --release`), or name its folder in ELFEN_LIB";
        Failure::new(Status::Failed, "finding the preload library", error, fix)
    })?;
    Ok(ChosenInjection { inject: plan.inject, library })
}

fn refuse(program: &OsStr, reason: &Reason, best: Inject) -> Failure {
    // Live checks also need kernel features; guards work on every machine.
    let best = if best == Inject::Live { Inject::Guard } else { best };
    let fix = format!("use --inject {}, or --inject auto", best.name());
    let what = format!("program {:?}", program.to_string_lossy());
    Failure::new(Status::Unsupported, what, format!("it {reason}"), fix)
}
