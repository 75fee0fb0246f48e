//! Running a batch program on the batch lanes.
//!
//! Three kinds of processes. The *front* is the `elfen` command that the user started: it passes signals and the exit
//! status through, and reports. The *keeper*, its child, is the parent of the batch and of whoever the batch leaves
//! behind: it holds the lanes' guards and goes on when the front is killed. If the keeper is killed, the front takes over,
//! as the kernel makes it the parent then. The *batch* is the program with all its descendants.
//!
//! A guard is one thread per batch lane. The batch runs there at SCHED_IDLE, below everything else, so a guard that wakes
//! up has the lane at once; while the policy says nap, it stays on the lane and naps there itself. That reaches any
//! program, needs nothing of it, and costs the request nothing: see ARCHITECTURE.md for why it is not a signal.

pub(crate) mod channels;
pub(crate) mod figures;
pub(crate) mod find;
pub(crate) mod front;
pub(crate) mod guard;
pub(crate) mod ipc;
mod keeper;
mod launch;
pub(crate) mod looks;
pub(crate) mod place;
pub(crate) mod waker;

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use elfen_instrument::Inject;
use elfen_kernel::sleep::Alarm;
use elfen_rt::nap::Nap;
use elfen_rt::policy::slo::Slo;
use elfen_rt::signal::control::Settings;

use self::looks::Looks;
use super::pair::Pair;

/// Everything that is decided before anything is started.
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) pairs: Vec<Pair>,
    pub(crate) settings: Settings,
    /// For slo-budget: what the keeper steers by.
    pub(crate) slo: Option<Slo>,
    /// How the program checks itself, besides its guard; and the library to preload for that.
    pub(crate) inject: Inject,
    pub(crate) library: Option<PathBuf>,
    /// How guards wait on their lanes.
    pub(crate) nap: Arc<Nap>,
    /// For naps that block: what wakes the wakers.
    pub(crate) alarm: Option<Arc<Alarm>>,
    /// How long guards sleep between two looks: the bound on every reaction.
    pub(crate) looks: Looks,
    pub(crate) program: OsString,
    pub(crate) arguments: Vec<OsString>,
}

impl Order {
    /// Every batch lane with its request lane, in the order of the lane page's slots.
    pub(crate) fn lanes(&self) -> impl Iterator<Item = (u32, u32)> {
        self.pairs.iter().flat_map(|pair| pair.batch.iter().map(|batch| (batch, pair.request)))
    }
}
