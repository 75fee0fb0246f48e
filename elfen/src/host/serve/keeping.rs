//! Which threads of a service have to be moved, when, and where they go when it ends.
//!
//! No system call and no clock: it is told what a look found, and says what to do. A thread that
//! chooses its own CPUs again and again is brought back after 2, 4, 8 .. 64 looks, so that a
//! program that insists costs next to nothing, and is spoken of.

use std::collections::BTreeMap;

use crate::host::cpulist::CpuSet;

/// A thread as a look found it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Found {
    pub(super) thread: u32,
    pub(super) process: u32,
    pub(super) cpus: CpuSet,
}

/// A thread that has to go to the request lanes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Move {
    pub(super) thread: u32,
    /// What it may run on until then.
    pub(super) from: CpuSet,
    /// How often it has been brought back, with this time; 0 when it has never been on the lanes.
    pub(super) times: u32,
}

/// The wait doubles up to this many looks.
const LONGEST_WAIT: u64 = 64;

#[derive(Debug)]
struct Kept {
    /// What the thread was found with when it was last outside the lanes; `None` if it never was.
    own: Option<CpuSet>,
    brought_back: u32,
    /// The look before which it is left alone.
    rests_until: u64,
    seen_at: u64,
}

#[derive(Debug)]
pub(super) struct Keeping {
    lanes: CpuSet,
    threads: BTreeMap<u32, Kept>,
    looks: u64,
    /// Whether threads not met before were outside without having left: while an existing service
    /// is being moved.
    moving_in: bool,
}

impl Keeping {
    pub(super) fn new(lanes: CpuSet, moving_in: bool) -> Self {
        Self { lanes, threads: BTreeMap::new(), looks: 0, moving_in }
    }

    /// From now on, whoever is outside has left.
    pub(super) fn moved_in(&mut self) {
        self.moving_in = false;
    }

    pub(super) fn threads(&self) -> usize {
        self.threads.len()
    }

    /// What to do about all threads there are.
    pub(super) fn look(&mut self, found: Vec<Found>) -> Vec<Move> {
        self.looks += 1;
        let moves = found.into_iter().filter_map(|found| self.judge(found)).collect();
        self.threads.retain(|_, kept| kept.seen_at == self.looks);
        moves
    }

    fn judge(&mut self, found: Found) -> Option<Move> {
        let kept = self.threads.entry(found.thread).or_insert(Kept {
            own: None,
            brought_back: 0,
            rests_until: 0,
            seen_at: 0,
        });
        let met_before = kept.seen_at != 0;
        kept.seen_at = self.looks;
        if found.cpus.is_subset(&self.lanes) {
            return None;
        }
        kept.own = Some(found.cpus.clone());
        if self.looks < kept.rests_until {
            return None;
        }
        if met_before || !self.moving_in {
            kept.brought_back += 1;
            kept.rests_until = self.looks + (1 << kept.brought_back.min(63)).min(LONGEST_WAIT);
        }
        Some(Move { thread: found.thread, from: found.cpus, times: kept.brought_back })
    }

    /// Where threads go when the service is let go: what each had itself; if it was born on the
    /// lanes, what its process has. Who has left already is left alone.
    pub(super) fn undo(&self, found: &[Found]) -> Vec<(u32, CpuSet)> {
        let own = |thread: &u32| self.threads.get(thread).and_then(|kept| kept.own.clone());
        let first = || self.threads.keys().find_map(own);
        let home =
            |found: &Found| own(&found.thread).or_else(|| own(&found.process)).or_else(first);
        let on_lanes = found.iter().filter(|found| found.cpus.is_subset(&self.lanes));
        on_lanes.filter_map(|found| Some((found.thread, home(found)?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpus(list: &str) -> CpuSet {
        list.parse().unwrap()
    }

    fn found(thread: u32, process: u32, list: &str) -> Found {
        Found { thread, process, cpus: cpus(list) }
    }

    /// Goal: a service that is moved in goes where it belongs, once, and comes home as it was.
    /// Method: two threads with CPUs of their own and one born on the lanes.
    #[test]
    fn what_was_moved_comes_home() {
        let mut keeping = Keeping::new(cpus("0,2"), true);
        let moves = keeping.look(vec![found(10, 10, "0-3"), found(11, 10, "3")]);
        let to = |thread, from: &str| Move { thread, from: cpus(from), times: 0 };
        assert_eq!(moves, [to(10, "0-3"), to(11, "3")]);
        keeping.moved_in();
        let there = [found(10, 10, "0,2"), found(11, 10, "2"), found(12, 10, "0,2")];
        assert_eq!(keeping.look(there.to_vec()), []);
        let homes = [(10, cpus("0-3")), (11, cpus("3")), (12, cpus("0-3"))];
        assert_eq!(keeping.undo(&there), homes);
        assert_eq!(keeping.undo(&[found(10, 10, "1")]), [], "it has left by itself");
    }

    /// Goal: who leaves is brought back, and who insists, ever less often. Method: a thread that is
    /// outside at every one of a thousand looks.
    #[test]
    fn insisting_is_not_fought() {
        let mut keeping = Keeping::new(cpus("0"), false);
        let brought_back_at: Vec<u32> =
            (1..=300).filter(|_| !keeping.look(vec![found(10, 10, "1")]).is_empty()).collect();
        assert_eq!(brought_back_at, [1, 3, 7, 15, 31, 63, 127, 191, 255]);
    }

    /// Goal: one that chooses within the lanes is left alone, and keeps its choice. Method: a
    /// thread on one lane of two.
    #[test]
    fn a_choice_within_the_lanes_is_respected() {
        let mut keeping = Keeping::new(cpus("0,2"), true);
        assert_eq!(keeping.look(vec![found(10, 10, "2")]), []);
        assert_eq!(keeping.undo(&[found(10, 10, "2")]), []);
    }

    /// Goal: threads that ended are forgotten. Method: ids that come and go, as under a service
    /// with a thread a request.
    #[test]
    fn the_ended_are_forgotten() {
        let mut keeping = Keeping::new(cpus("0"), false);
        for thread in 1..1_000 {
            keeping.look(vec![found(thread, 1, "0")]);
            assert_eq!(keeping.threads(), 1);
        }
    }
}
