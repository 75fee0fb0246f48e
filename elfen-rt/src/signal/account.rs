//! The kernel's account of a batch lane: how long the batch's tasks ran there, and how long of that
//! next to a busy request lane.
//!
//! The eBPF program on sched_switch is the only writer, on the batch lane's own CPU. It recognizes
//! the tasks of a batch in one of two ways:
//! - by their ancestors: a run claims the lane with the ids of its two processes
//!   (`TaskMap::claim`), and all descendants of either are the batch;
//! - by their cgroup, for fences.
//!
//! So the guard and unrelated tasks on the lane are not counted. All time of the batch is counted:
//! also between two polls, and while the guard occupies the lane and the scheduler lets the batch
//! run all the same.

use core::mem::{offset_of, size_of};
use core::sync::atomic::{AtomicU64, Ordering::*};

use super::snapshot;

/// One run's account of one batch lane.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct Account {
    /// The [`Claim`] that is counted; 0 for none.
    pub claim: AtomicU64,
    /// Counts up before the words below are stored.
    pub begun: AtomicU64,
    /// Counts up after the words below are stored.
    pub done: AtomicU64,
    /// How long tasks of the batch ran here, up to the last switch to or from one of them.
    pub ran_ns: AtomicU64,
    /// How long of `ran_ns` the request lane was busy.
    pub shared_ns: AtomicU64,
    /// When the batch task that runs now was switched in; 0 while none runs.
    pub since_ns: AtomicU64,
    /// The request lane's busy time in total, at `since_ns`.
    pub busy_at_ns: AtomicU64,
    /// For the writer only.
    pub claimed: AtomicU64,
    reserved: [AtomicU64; 8],
}

const _: () = assert!(size_of::<Account>() == 128);
const _: () = assert!(offset_of!(Account, begun) == 8);
const _: () = assert!(offset_of!(Account, done) == 16);
const _: () = assert!(offset_of!(Account, ran_ns) == 24);
const _: () = assert!(offset_of!(Account, shared_ns) == 32);
const _: () = assert!(offset_of!(Account, since_ns) == 40);
const _: () = assert!(offset_of!(Account, busy_at_ns) == 48);

/// How many runs can have an account of one batch lane at the same time.
pub const ACCOUNTS: usize = 3;

/// Which tasks are counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Claim {
    /// The descendants of two processes. Ids of the initial pid namespace.
    Processes {
        /// 0 for none.
        launcher: u32,
        supervisor: u32,
        /// Whether those two processes are counted as well. `elfen run` does not belong to its
        /// batch; a program that runs without `elfen run` is.
        themselves: bool,
    },
    /// A cgroup of the cpu controller, by the inode of its folder, and all cgroups below it.
    Cgroup(u64),
}

/// A bit in the upper half of a claim's word. Linux process ids have at most 22 bits.
const THEMSELVES: u32 = 1 << 31;
const CGROUP: u64 = 1 << 62;

impl Claim {
    /// The batch of an `elfen run` with these two processes.
    pub fn of_run(launcher: u32, supervisor: u32) -> Self {
        Self::Processes { launcher, supervisor, themselves: false }
    }

    /// A program and all its descendants.
    pub fn of_program(process: u32) -> Self {
        Self::Processes { launcher: 0, supervisor: process, themselves: true }
    }

    pub fn word(self) -> u64 {
        match self {
            Self::Processes { launcher, supervisor, themselves } => {
                let launcher = if themselves { launcher | THEMSELVES } else { launcher };
                u64::from(launcher) << 32 | u64::from(supervisor)
            }
            Self::Cgroup(id) => id | CGROUP,
        }
    }

    /// `None` for 0, which claims nothing.
    pub fn from_word(word: u64) -> Option<Self> {
        if word & CGROUP != 0 {
            return Some(Self::Cgroup(word & !CGROUP));
        }
        #[expect(clippy::cast_possible_truncation, reason = "the two halves of the word")]
        let (launcher, supervisor) = ((word >> 32) as u32, word as u32);
        let themselves = launcher & THEMSELVES != 0;
        let launcher = launcher & !THEMSELVES;
        (word != 0).then_some(Self::Processes { launcher, supervisor, themselves })
    }
}

/// An account at one moment, all of its words from the same switch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Counted {
    ran_ns: u64,
    shared_ns: u64,
    /// Since when a task of the batch runs, and the request lane's busy time at that moment.
    running: Option<(u64, u64)>,
}

impl Counted {
    /// How long the batch ran here in total, up to `now_ns`.
    pub fn ran_until_ns(&self, now_ns: u64) -> u64 {
        let running_ns = self.running.map_or(0, |(since_ns, _)| now_ns.saturating_sub(since_ns));
        self.ran_ns.saturating_add(running_ns)
    }

    /// How long of that the request lane was busy, which had been busy for
    /// `busy_ns` in all by `now_ns`.
    pub fn shared_until_ns(&self, now_ns: u64, busy_ns: u64) -> u64 {
        let running_ns = self.running.map_or(0, |(since_ns, busy_at_ns)| {
            busy_ns.saturating_sub(busy_at_ns).min(now_ns.saturating_sub(since_ns))
        });
        self.shared_ns.saturating_add(running_ns)
    }

    /// Whether a task of the batch runs on the lane.
    pub fn is_running(&self) -> bool {
        self.running.is_some()
    }
}

impl Account {
    /// The time counted for `claim`; `None` if the account belongs to another claim, or if the lane
    /// switched during every try.
    pub fn counted(&self, claim: u64) -> Option<Counted> {
        let words = snapshot::read(&self.begun, &self.done, || {
            // Relaxed: `read` orders these between the two counters.
            let since_ns = self.since_ns.load(Relaxed);
            let counted = Counted {
                ran_ns: self.ran_ns.load(Relaxed),
                shared_ns: self.shared_ns.load(Relaxed),
                running: (since_ns != 0).then(|| (since_ns, self.busy_at_ns.load(Relaxed))),
            };
            (self.claim.load(Relaxed), counted)
        });
        words.and_then(|(found, counted)| (found == claim).then_some(counted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_that_still_runs_is_counted_up_to_now() {
        let counted = Counted { ran_ns: 100, shared_ns: 40, running: Some((1_000, 500)) };
        assert_eq!(counted.ran_until_ns(1_030), 130);
        assert_eq!(counted.shared_until_ns(1_030, 510), 50);
        assert_eq!(counted.shared_until_ns(1_030, 900), 70, "no more than it ran");
        assert_eq!(counted.shared_until_ns(900, 400), 40, "another CPU's clock");
        let resting = Counted { running: None, ..counted };
        assert_eq!((resting.ran_until_ns(9_999), resting.shared_until_ns(9_999, 9_999)), (100, 40));
    }

    #[test]
    fn a_claim_is_two_processes_or_a_cgroup() {
        let cgroup = Claim::Cgroup(3 << 32 | 7);
        for claim in [Claim::of_run(7, 4_194_303), Claim::of_program(8), cgroup] {
            assert_eq!(Claim::from_word(claim.word()), Some(claim));
        }
        assert_eq!(Claim::from_word(0), None);
    }
}
