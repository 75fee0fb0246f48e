//! The service that is measured: `elfen-search`, which we start and end, or one of the user's own,
//! which we ask and watch and leave alone.

use std::path::PathBuf;
use std::process::Command;

use super::own::Own;
use super::scratch::Scratch;
use super::service::{Corpus, Helpers, Serving};
use super::standing::Standing;
use super::watched::Shim;
use super::{LiveError, Machine, Programs};

/// What a testbed is set up for.
#[derive(Clone, Debug)]
pub struct Order {
    pub machine: Machine,
    /// Of the index that is built, unless `index` names one that stands there.
    pub documents: u64,
    pub index: Option<PathBuf>,
    pub signal: String,
    /// A batch program of the user's own.
    pub own: Own,
    /// A service of the user's own, instead of `elfen-search`.
    pub standing: Option<Standing>,
    /// Where to write how long requests ran in the runs without company.
    pub service_times: Option<PathBuf>,
    /// What is recorded of each run.
    pub shim: Option<Shim>,
}

#[derive(Debug)]
pub(super) enum Tested {
    Search { serving: Serving, corpus: Corpus },
    Standing(Standing),
}

impl Tested {
    /// Builds what there is to build and starts the service, or asks the one that stands.
    pub(super) fn start(
        order: &Order,
        programs: &Programs,
        scratch: &Scratch,
        helpers: &Helpers,
    ) -> Result<Self, LiveError> {
        let machine = &order.machine;
        if let Some(standing) = &order.standing {
            standing.begin(programs, scratch, machine, helpers)?;
            return Ok(Self::Standing(standing.clone()));
        }
        let corpus = Corpus::open(programs, scratch, order.index.as_deref(), order.documents)?;
        let serving = Serving::start(programs, scratch, machine, helpers, &corpus)?;
        Ok(Self::Search { serving, corpus })
    }

    /// None of a service that is not ours.
    pub(super) fn documents(&self) -> u64 {
        match self {
            Self::Search { corpus, .. } => corpus.documents,
            Self::Standing(_) => 0,
        }
    }

    pub(super) fn capacity_rps(
        &self,
        programs: &Programs,
        scratch: &Scratch,
        machine: &Machine,
        helpers: &Helpers,
    ) -> Result<f64, LiveError> {
        match self {
            Self::Search { corpus, .. } => corpus.capacity_rps(programs, scratch, machine, helpers),
            Self::Standing(_) => unreachable!("of such a service the user says it"),
        }
    }

    /// Tells the generator which service to ask, and for what.
    pub(super) fn ask(&self, command: &mut Command) {
        match self {
            Self::Search { serving, corpus } => {
                command.arg("--queries").arg(&corpus.queries).arg("--tasks");
                command.args(["--template", "/search?q={}"]);
                command.arg(format!("http://{}", serving.address));
            }
            Self::Standing(standing) => standing.ask(command),
        }
    }

    /// The name under which it publishes its requests, if it does.
    pub(super) fn page<'a>(&'a self, scratch: &'a Scratch) -> Option<&'a str> {
        match self {
            Self::Search { .. } => Some(scratch.service()),
            Self::Standing(standing) => standing.service.name.as_deref(),
        }
    }

    pub(super) fn lives(&mut self) -> Result<(), LiveError> {
        match self {
            Self::Search { serving, .. } => serving.lives(),
            Self::Standing(standing) => standing.lives(),
        }
    }

    /// CPU time of its coordinator, outside the request lanes, and on them, in nanoseconds.
    pub(super) fn used_ns(&self) -> (u64, u64) {
        match self {
            Self::Search { serving, .. } => serving.used_ns(),
            Self::Standing(standing) => (0, standing.used_ns()),
        }
    }
}
