//! Between a guard and the planner.

use std::sync::atomic::AtomicU32;

use elfen_instrument::live::{Change, Stood};
use parking_lot::Mutex;

/// Where a batch thread stood that should have answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Miss {
    pub(super) process: u32,
    pub(super) stood: Stood,
}

pub(super) const WAITING: u32 = 0;
pub(super) const APPLIED: u32 = 1;
pub(super) const REFUSED: u32 = 2;

/// What the guard and the planner leave for each other. The guard waits for no lock that the
/// planner holds: where they share a CPU, that would be for as long as the guard lets it run.
#[derive(Debug, Default)]
pub(super) struct Exchange {
    pub(super) miss: Mutex<Option<Miss>>,
    pub(super) change: Mutex<Option<Change>>,
    /// What became of the change.
    pub(super) outcome: AtomicU32,
}
