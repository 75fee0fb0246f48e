//! How a batch program is checked: what the user asks for, held against what its file allows.
//!
//! A guard is always there. A program with checks of its own reacts before the guard looks.

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
    /// The cheapest check that the program allows
    Auto,
    /// None in the program: its guard alone
    Guard,
    /// Checks written into its loops while it runs
    Live,
    /// Checks in its source: elfen_rt::check!(), elfen_check()
    Inline,
    /// Checks written over the room of -fpatchable-function-entry
    Patch,
    /// The hook of -pg -mfentry
    Fentry,
    /// The hook of -pg
    Mcount,
    /// The hooks of -finstrument-functions
    Cyg,
}

/// The injection that was chosen.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Chosen {
    pub(crate) inject: Inject,
    /// The library to preload, if it takes one.
    pub(crate) library: Option<PathBuf>,
}

pub(crate) const GUARD: Chosen = Chosen { inject: Inject::Guard, library: None };

/// What live checks need besides the program: the kernel's notes. `Err` says what is missing.
pub(crate) fn notes(signals: &Signals, pairs: &[Pair]) -> Result<Arc<Notes>, String> {
    match &signals.tasks {
        Some((_, Writer::Program(_))) => {}
        _ => return Err("checks look at the task map by eBPF, which this run has not".to_owned()),
    }
    if pairs.iter().map(|pair| pair.batch.iter().count()).sum::<usize>() > 1 {
        may_take_realtime_rank().map_err(|error| {
            format!("with several batch lanes, guards take all of them at once: {error}")
        })?;
    }
    Notes::attach().map(Arc::new).map_err(|error| error.to_string())
}

impl InjectName {
    pub(crate) fn choose(self, program: &OsStr) -> Result<Chosen, Failure> {
        let inject = match self {
            Self::Guard => return Ok(GUARD),
            Self::Auto => return best(program),
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

/// A file that says nothing of itself is started under its guard; whether it can be
/// started, the kernel says.
fn best(program: &OsStr) -> Result<Chosen, Failure> {
    let Ok(file) = inspect(program) else { return Ok(GUARD) };
    let plan = file.best();
    with_library(plan).or_else(|_| {
        warn(&format!(
            "checks by {} take the preload library, which is not found: the guard alone",
            plan.inject.name()
        ));
        Ok(GUARD)
    })
}

fn with_library(plan: Plan) -> Result<Chosen, Failure> {
    let library = plan.preload.then(find_library).transpose().map_err(|error| {
        let fix = "build all of Elfen (`cargo build --release`), or name its folder in ELFEN_LIB";
        Failure::new(Status::Failed, "finding the preload library", error, fix)
    })?;
    Ok(Chosen { inject: plan.inject, library })
}

fn refuse(program: &OsStr, reason: &Reason, best: Inject) -> Failure {
    // What any machine can do, where the best takes more than the program.
    let best = if best == Inject::Live { Inject::Guard } else { best };
    let fix = format!("use --inject {}, or --inject auto", best.name());
    let what = format!("program {:?}", program.to_string_lossy());
    Failure::new(Status::Unsupported, what, format!("it {reason}"), fix)
}
