//! Between the guards and the planner.

use std::sync::atomic::AtomicU32;

use elfen_instrument::live::{Change, StoppedAt};
use parking_lot::Mutex;

use super::handover::State;
use super::meeting::Meetings;

/// Where a batch thread stood that should have answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Miss {
    pub(super) process: u32,
    pub(super) stood: StoppedAt,
}

/// What a guard and the planner leave for each other. A guard waits for no lock that the
/// planner holds: where they share a CPU, that would be for as long as the guard lets it run.
#[derive(Debug)]
pub(super) struct Exchange {
    pub(super) miss: Mutex<Option<Miss>>,
    pub(super) change: Mutex<State<Change>>,
    /// How often a guard found a thread where the change is to be.
    pub(super) unclear: AtomicU32,
    /// How many changes were taken up.
    pub(super) written: AtomicU32,
    /// Where there are several lanes.
    pub(super) meetings: Option<Meetings>,
}

impl Exchange {
    pub(super) fn of(lanes: usize) -> Self {
        Self {
            miss: Mutex::default(),
            change: Mutex::default(),
            unclear: AtomicU32::new(0),
            written: AtomicU32::new(0),
            meetings: (lanes > 1).then(|| Meetings::of(lanes)),
        }
    }
}
