//! Runs a batch program on the batch lanes.
//!
//! A run has several processes:
//! - The *launcher* is the `elfen` command that the user started. It passes signals and the exit
//!   status through, and reports.
//! - The *supervisor* is the parent of the batch and of the processes that the batch leaves behind.
//!   It holds the guards, and goes on when the launcher is killed.
//! - The *spare*, between the two, takes over when the supervisor is killed or hangs, and the
//!   launcher when both are killed. The kernel makes each the parent of the orphans.
//! - The *batch* is the program with all its descendants.
//!
//! A guard is one thread for each batch lane. The batch runs at SCHED_IDLE, below everything else,
//! so a guard has its lane as soon as it wakes. While the policy says nap, the guard stays on the
//! lane and naps there itself. This works for any program and costs the request nothing;
//! ARCHITECTURE.md says why guards send no signals instead.

pub mod args;
pub mod batches;
pub mod channels;
mod event;
pub mod figures;
pub mod guard;
pub mod hotplug;
pub mod ipc;
pub mod latency;
pub mod launcher;
pub mod live;
pub mod liveness;
mod pacer;
mod pages;
pub mod poll_timing;
pub mod report;
pub mod report_reference;
pub mod services;
mod spare;
mod spins;
mod supervisor;
pub mod upkeep;
pub mod waker;
pub mod watches;

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use elfen_instrument::CheckMethod;
use elfen_kernel::preempted::Notes;
use elfen_kernel::sleep::Alarm;
use elfen_rt::nap::Nap;
use elfen_rt::policy::slo::Slo;
use elfen_rt::signal::control::Settings;

use self::poll_timing::PollTiming;
use elfen_machine::accounts::Account;
use elfen_machine::pair::Pair;

/// What to run, and how: all that is decided before the first process starts.
#[derive(Debug)]
pub struct Order {
    pub pairs: Vec<Pair>,
    pub settings: Settings,
    /// For slo-budget: the SLO by which the supervisor steers.
    pub slo: Option<Slo>,
    /// How the program gets checks, next to its guard, and the library to preload for that.
    pub checks: CheckMethod,
    pub library: Option<PathBuf>,
    /// For live checks: the kernel's notes of where batch threads were interrupted.
    pub notes: Option<Arc<Notes>>,
    /// How guards nap on their lanes.
    pub nap: Arc<Nap>,
    /// For naps that block: the alarm that wakes the wakers.
    pub alarm: Option<Arc<Alarm>>,
    /// How long guards sleep between two polls, which bounds every reaction.
    pub poll_timing: PollTiming,
    /// The user to run the program as; `None` for the current user.
    pub user: Option<Account>,
    pub program: OsString,
    pub arguments: Vec<OsString>,
}

/// The environment variable that names the libraries to load before all others.
pub const PRELOAD: &str = "LD_PRELOAD";

impl Order {
    /// (batch, request) of every batch lane, in the order of the lane page's slots.
    pub fn lanes(&self) -> impl Iterator<Item = (u32, u32)> {
        self.pairs.iter().flat_map(|pair| pair.batch.iter().map(|batch| (batch, pair.request)))
    }
}
