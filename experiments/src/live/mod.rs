//! Live experiments: measure a service, a load generator and batch programs as real processes.
//!
//! | file | what it has |
//! | --- | --- |
//! | [`plan`] | the runs of a plan and their order |
//! | [`testbed`] | a running service, and the measurement of one run |
//! | [`experiment`] | a plan from its first run to its last, and its results file |
//! | [`calibrate`] | slowdowns of programs that share a core, for the model |
//! | [`summary`] | medians over runs, with intervals |
//! | `replay` | what a batch cost the requests of a run on an emulated core |
//! | `batches` | the batch programs next to the service |
//! | [`own_service`] | a service of the user's own |
//! | `service` | `elfen-search`: its index, its queries and its process |
//! | [`recording`] | a recording of each run by `elfen shim` |
//! | `ladder`, `lucene` | the thesis's ladder, and its service in Java |
//! | `latencies` | the latencies of all requests of a run |
//! | `process`, `os`, `usage` | child processes, their system calls, their CPU time |
//! | `scratch` | temporary files and pages, which do not outlive a run |
//!
//! Every program is started with the command line that a user would type, so the results apply to
//! users. The children of a run end with it, also if the run fails.

pub(crate) mod batches;
pub mod calibrate;
pub mod experiment;
pub(crate) mod ladder;
pub(crate) mod latencies;
pub(crate) mod lucene;
#[expect(unsafe_code, reason = "CPUs, priority and death signal of children take system calls")]
pub(crate) mod os;
pub mod own_service;
pub mod plan;
pub(crate) mod process;
pub mod recording;
mod replay;
pub(crate) mod scratch;
mod service;
pub mod summary;
pub mod testbed;
pub(crate) mod usage;

use std::io;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use elfen_console::programs::ProgramError;
use elfen_machine::pair::Pair;

use crate::record::BadLine;

/// Why a live experiment failed.
#[derive(Debug, thiserror::Error)]
pub enum LiveError {
    #[error(transparent)]
    Program(#[from] ProgramError),
    #[error("{what}: {error}")]
    Io { what: String, error: io::Error },
    /// `message` is the last line that the program printed on stderr.
    #[error("{name} ended early ({status}): {message}")]
    Failed { name: String, status: ExitStatus, message: String },
    /// A batch program of the user's own failed, and `elfen run` did not.
    #[error("{name} ended by itself ({status}): {message}")]
    OwnFailed { name: String, status: ExitStatus, message: String },
    #[error("the output of {name} is invalid: {why}")]
    Garbled { name: String, why: String },
    #[error("{name} did not end within {seconds} s after it was asked to")]
    Stuck { name: String, seconds: u64 },
    #[error("{name} was not ready within {seconds} s")]
    NotReady { name: String, seconds: u64 },
    /// The user's request cannot be measured. `fix` names what can be measured instead.
    #[error("{why}")]
    Refused { why: String, fix: &'static str },
    /// A service of the user's own has threads that may leave its lanes.
    #[error("{why}")]
    Misplaced { why: String, fix: String },
    /// The results file is invalid.
    #[error(transparent)]
    NoResults(#[from] BadLine),
    #[error("another experiment writes to this file")]
    Locked,
    #[error("interrupted by signal {0}")]
    Interrupted(i32),
}

impl LiveError {
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |error| Self::Io { what, error }
    }
}

/// The lanes to measure on, and the CPUs for the helpers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Machine {
    pub pairs: Vec<Pair>,
    /// The CPUs that this process may use, without those of the pairs.
    pub spare: Vec<u32>,
    /// Whether the lanes of every pair share a core in the kernel's topology.
    pub smt: bool,
    pub cpus: u32,
    /// The factor of an emulated core: while the other lane runs, a program takes this many times
    /// as long. `None` if no core is emulated.
    pub emulated: Option<f64>,
}

impl Machine {
    /// Returns the options of Elfen's programs for an emulated core; empty if no core is emulated.
    fn emulation_options(&self) -> Vec<String> {
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

    /// Returns a sentence on the limits of results from an emulated core.
    pub fn emulation(&self) -> Option<String> {
        let factor = self.emulated?;
        Some(format!(
            "the core is emulated: a program takes {factor} times as long while the other lane is \
             busy, by the kernel's record of the batch; napping lanes do not slow down the other \
             lane"
        ))
    }

    /// Returns the value of `--lanes` for these pairs.
    pub fn lanes(&self) -> String {
        let pair = |pair: &Pair| {
            let batch: Vec<String> = pair.batch.iter().map(|cpu| cpu.to_string()).collect();
            format!("{}:{}", pair.request, batch.join(","))
        };
        self.pairs.iter().map(pair).collect::<Vec<_>>().join(",")
    }

    /// Returns each batch lane with its request lane, as (request lane, batch lane).
    fn batch_lanes(&self) -> impl Iterator<Item = (u32, u32)> {
        self.pairs.iter().flat_map(|pair| pair.batch.iter().map(|batch| (pair.request, batch)))
    }
}

/// Makes Ctrl-C end the experiment in an orderly way. Call this once, before anything is started.
pub fn install_signal_handlers() -> Result<(), LiveError> {
    os::install_signal_handlers().map_err(LiveError::io("installing the handler of Ctrl-C"))
}

/// Returns an error once a signal has asked this process to end.
pub(crate) fn check_interrupted() -> Result<(), LiveError> {
    os::termination_signal().map_or(Ok(()), |signal| Err(LiveError::Interrupted(signal)))
}

/// The time between two tests of a wait whether it should end.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Sleeps until `then`. Ends early if `check` fails or a signal arrives.
fn sleep_until(
    then: Instant,
    mut check: impl FnMut() -> Result<(), LiveError>,
) -> Result<(), LiveError> {
    loop {
        check_interrupted()?;
        check()?;
        let left = then.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        std::thread::sleep(left.min(POLL_INTERVAL));
    }
}
