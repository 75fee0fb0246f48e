//! What guards and the planner pass to each other.

use std::sync::atomic::AtomicU32;

use elfen_instrument::live::{Change, Stood};
use parking_lot::Mutex;

use super::handover::State;
use super::rendezvous::Rendezvous;

/// Where a batch thread stood that did not answer a probe or ran next to a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Miss {
    pub(super) process: u32,
    pub(super) stood: Stood,
}

/// A guard must not wait for a lock that the planner holds. On a shared CPU that would last as long
/// as the guard lets the planner run, so guards only try the locks.
#[derive(Debug)]
pub(super) struct Exchange {
    pub(super) miss: Mutex<Option<Miss>>,
    pub(super) change: Mutex<State<Change>>,
    /// How often a guard found a thread inside the patch site of the change.
    pub(super) unclear: AtomicU32,
    /// How many changes guards have finished.
    pub(super) written: AtomicU32,
    /// Only with several lanes.
    pub(super) rendezvous: Option<Rendezvous>,
}

impl Exchange {
    pub(super) fn of(lanes: usize) -> Self {
        Self {
            miss: Mutex::default(),
            change: Mutex::default(),
            unclear: AtomicU32::new(0),
            written: AtomicU32::new(0),
            rendezvous: (lanes > 1).then(|| Rendezvous::of(lanes)),
        }
    }
}
