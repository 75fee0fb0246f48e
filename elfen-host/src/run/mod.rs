//! Running a batch program on the batch lanes.
//!
//! Three kinds of processes. The *front* is the `elfen` command that the user started: it passes
//! signals and the exit status through, and reports. The *keeper*, its child, is the parent of the
//! batch and of the processes that the batch leaves behind: it holds the lanes' guards and goes on
//! when the front is killed. If the keeper is killed, the front takes over, as the kernel makes it
//! the parent then. The *batch* is the program with all its descendants.
//!
//! A guard is one thread per batch lane. The batch runs there at SCHED_IDLE, below everything else,
//! so a guard that wakes up has the lane at once; while the policy says nap, it stays on the lane
//! and naps there itself. That reaches any program, needs nothing of it, and costs the request
//! nothing: see ARCHITECTURE.md for why it is not a signal.

mod accounts;
pub mod batches;
mod beside;
pub mod channels;
mod event;
pub mod figures;
pub mod guard;
pub(crate) mod hotplug;
pub mod ipc;
pub mod latency;
pub mod launch;
pub mod launcher;
pub mod level;
pub mod live;
mod pacer;
mod pages;
pub mod placement;
pub mod poll_timing;
pub mod report;
mod spare;
mod spins;
mod supervisor;
pub(crate) mod upkeep;
pub mod waker;

use std::ffi::{CString, OsString};
use std::path::PathBuf;
use std::sync::Arc;

use elfen_instrument::Inject;
use elfen_kernel::preempted::Notes;
use elfen_kernel::sleep::Alarm;
use elfen_rt::nap::Nap;
use elfen_rt::policy::slo::Slo;
use elfen_rt::signal::control::Settings;
use nix::unistd::{Gid, Uid};

use self::poll_timing::Looks;
use super::pair::Pair;

/// Everything that is decided before anything is started.
#[derive(Debug)]
pub struct Order {
    pub pairs: Vec<Pair>,
    pub settings: Settings,
    /// For slo-budget: the SLO that the keeper steers by.
    pub slo: Option<Slo>,
    /// How the program checks itself, besides its guard; and the library to preload for that.
    pub inject: Inject,
    pub library: Option<PathBuf>,
    /// For live checks: where batch threads were interrupted.
    pub notes: Option<Arc<Notes>>,
    /// How guards wait on their lanes.
    pub nap: Arc<Nap>,
    /// For naps that block: the alarm that wakes the wakers.
    pub alarm: Option<Arc<Alarm>>,
    /// How long guards sleep between two looks: the bound on every reaction.
    pub looks: Looks,
    /// The user that the program runs as, if not ours.
    pub user: Option<User>,
    pub program: OsString,
    pub arguments: Vec<OsString>,
}

/// A user to run a batch as.
#[derive(Clone, Debug)]
pub struct User {
    pub name: String,
    pub uid: Uid,
    pub gid: Gid,
    pub groups: Vec<Gid>,
    pub home: PathBuf,
}

impl User {
    /// By name or number; `None` if there is no such user.
    pub fn find(name: &str) -> std::io::Result<Option<Self>> {
        use nix::unistd::{User as Entry, getgrouplist};
        let entry = match name.parse() {
            Ok(uid) => Entry::from_uid(Uid::from_raw(uid))?,
            Err(_) => Entry::from_name(name)?,
        };
        let Some(Entry { name, uid, gid, dir: home, .. }) = entry else { return Ok(None) };
        let groups = getgrouplist(&CString::new(name.as_str())?, gid)?;
        Ok(Some(Self { name, uid, gid, groups, home }))
    }
}

impl Order {
    /// Every batch lane with its request lane, in the order of the lane page's slots.
    pub fn lanes(&self) -> impl Iterator<Item = (u32, u32)> {
        self.pairs.iter().flat_map(|pair| pair.batch.iter().map(|batch| (batch, pair.request)))
    }
}
