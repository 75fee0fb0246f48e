//! Live runs: a service, a generator and batch programs as real processes, measured.
//!
//! | file | what it does |
//! | --- | --- |
//! | [`plan`] | which runs there are, and in which order |
//! | [`testbed`] | a service that stands ready, and one measurement with it |
//! | [`experiment`] | a plan from its beginning to its end, or on from where it was |
//! | [`calibrate`] | slowdowns of programs that share a core, for the model |
//! | [`summary`] | medians over invocations, and how far they can be trusted |
//! | [`programs`] | where `elfen-search`, `elfen-load` and `elfen-batch` are |
//! | `company` | the batch programs beside the service, and what restrains them |
//! | [`own`] | a batch program of the user's own: started again, and its CPU time |
//! | `ladder` | the thesis's ladder: a service whose causes are taken away one by one |
//! | `lucene` | that service, `workloads/lucene` |
//! | `latencies` | every request of a run, those that failed as well |
//! | `service` | the index, the queries and the running service |
//! | [`standing`] | a service of the user's own, which stands already |
//! | `tested` | either of them |
//! | [`watched`] | a recording by Shim of each run |
//! | `process` | a child and its end; `os`: what that takes of the kernel; `usage`: its CPU time |
//! | `reported` | what `elfen run` reports |
//! | `scratch` | files and pages that must not stay behind |
//!
//! Everything is called as a user would call it: what is measured is what users get. Whatever ends
//! a run, the children end with it.

pub mod calibrate;
mod company;
pub mod experiment;
pub(crate) mod ladder;
mod latencies;
pub(crate) mod lucene;
#[expect(unsafe_code, reason = "places, ranks and last words of children are set by system calls")]
pub(crate) mod os;
pub mod own;
pub mod plan;
pub(crate) mod process;
pub(crate) mod reported;
pub(crate) mod rungs;
pub(crate) mod scratch;
mod service;
pub mod standing;
pub mod summary;
pub mod testbed;
mod tested;
pub(crate) mod usage;
pub mod watched;

use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use elfen_console::programs::{ProgramError, find_program};

use crate::record::BadLine;

/// Why a live run did not come to its end.
#[derive(Debug, thiserror::Error)]
pub enum LiveError {
    #[error(transparent)]
    Program(#[from] ProgramError),
    #[error("{what}: {error}")]
    Io { what: String, error: io::Error },
    /// In the words of the program that failed.
    #[error("{name} ended early ({status}): {said}")]
    Failed { name: String, status: ExitStatus, said: String },
    /// A batch program of the user's own, not `elfen run`.
    #[error("{name} ended by itself ({status}): {said}")]
    OwnFailed { name: String, status: ExitStatus, said: String },
    #[error("{name} printed what cannot be read: {why}")]
    Garbled { name: String, why: String },
    #[error("{name} did not end within {seconds} s of being asked to")]
    Stuck { name: String, seconds: u64 },
    #[error("{name} did not get ready within {seconds} s")]
    NotReady { name: String, seconds: u64 },
    /// Neither a program nor the machine failed: what was asked for cannot be measured, and what
    /// can.
    #[error("{why}")]
    Refused { why: String, fix: &'static str },
    /// A service of the user's own does not keep to its lanes.
    #[error("{why}")]
    Misplaced { why: String, fix: String },
    /// Of the file that the results go to.
    #[error(transparent)]
    NoResults(#[from] BadLine),
    #[error("another experiment writes it")]
    Locked,
    #[error("interrupted by signal {0}")]
    Interrupted(i32),
}

/// The programs that a live run starts.
#[derive(Clone, Debug)]
pub struct Programs {
    pub elfen: PathBuf,
    pub search: PathBuf,
    pub load: PathBuf,
    pub batch: PathBuf,
}

impl Programs {
    pub fn find() -> Result<Self, LiveError> {
        Ok(Self {
            elfen: find_program("elfen")?,
            search: find_program("elfen-search")?,
            load: find_program("elfen-load")?,
            batch: find_program("elfen-batch")?,
        })
    }
}

impl LiveError {
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |error| Self::Io { what, error }
    }
}

/// The lanes to measure on, and the CPUs that the helpers may run on instead.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Machine {
    pub pairs: Vec<Pair>,
    /// CPUs that this process may use and that are in no pair.
    pub spare: Vec<u32>,
    /// Whether the lanes of every pair share a core, as far as the kernel says.
    pub smt: bool,
    pub cpus: u32,
    /// The shared core that the programs are told to emulate: how many times as long as alone
    /// anything takes that runs beside something. `None` leaves that to the machine.
    pub emulated: Option<f64>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Pair {
    pub request: u32,
    pub batch: Vec<u32>,
}

impl Machine {
    /// The options of our own programs for an emulated core; none without one.
    fn beside(&self) -> Vec<String> {
        let options = |factor: f64| {
            [
                "--beside-slowdown".to_owned(),
                factor.to_string(),
                "--beside".to_owned(),
                self.lanes(),
            ]
        };
        self.emulated.map(options).into_iter().flatten().collect()
    }

    /// One sentence for the results, where a core is emulated.
    pub fn emulation(&self) -> Option<String> {
        let factor = self.emulated?;
        Some(format!(
            "the core is emulated: what runs beside something else takes {factor} times as long, \
             by the kernel's account of the batch; how the batch naps costs nothing"
        ))
    }

    /// As `--lanes` takes them.
    pub fn lanes(&self) -> String {
        let pair = |pair: &Pair| {
            let batch: Vec<String> = pair.batch.iter().map(u32::to_string).collect();
            format!("{}:{}", pair.request, batch.join(","))
        };
        self.pairs.iter().map(pair).collect::<Vec<_>>().join(",")
    }

    /// Every batch lane with its request lane.
    fn batch_lanes(&self) -> impl Iterator<Item = (u32, u32)> {
        self.pairs.iter().flat_map(|pair| pair.batch.iter().map(|&batch| (pair.request, batch)))
    }
}

/// Has Ctrl-C end what runs instead of us; call it once, before anything is started.
pub fn heed_signals() -> Result<(), LiveError> {
    os::heed_signals().map_err(LiveError::io("installing the handler of Ctrl-C"))
}

/// Fails once we have been asked to end.
pub(crate) fn go_on() -> Result<(), LiveError> {
    os::asked_to_end().map_or(Ok(()), |signal| Err(LiveError::Interrupted(signal)))
}

/// How often a wait looks whether it should end.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Sleeps until then, unless `broken` says that there is nothing left to wait for.
fn sleep_until(
    then: Instant,
    mut broken: impl FnMut() -> Result<(), LiveError>,
) -> Result<(), LiveError> {
    loop {
        go_on()?;
        broken()?;
        let left = then.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        std::thread::sleep(left.min(LOOK_EVERY));
    }
}
