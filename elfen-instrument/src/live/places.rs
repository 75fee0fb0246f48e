//! How many checks there are, and what they rest on.

use std::ops::AddAssign;

/// How many places a process has, for reports.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Places {
    /// Processes that have any.
    pub processes: u64,
    pub on: u64,
    /// Of those that are on, such that run too often, where there is no other way.
    pub dense: u64,
    pub too_dense: u64,
    pub refused: u64,
    /// Of those that are on, by tactic: T1, T2, T3, T4.
    pub by_tactic: [u64; 4],
    /// Of those that are on, behind which are rounds of their loop.
    pub rounds: u64,
    /// Of those that are on, in compiled Java methods.
    pub compiled: u64,
    pub arenas: u64,
}

impl AddAssign for Places {
    fn add_assign(&mut self, other: Self) {
        self.processes += other.processes;
        self.on += other.on;
        self.dense += other.dense;
        self.too_dense += other.too_dense;
        self.refused += other.refused;
        self.arenas += other.arenas;
        self.compiled += other.compiled;
        self.rounds += other.rounds;
        self.by_tactic.iter_mut().zip(other.by_tactic).for_each(|(sum, one)| *sum += one);
    }
}
