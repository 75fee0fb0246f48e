//! How long a batch's own tasks ran on its lane, and how much of that beside a busy request
//! lane, as the kernel counts it.
//!
//! The eBPF program on sched_switch is the one writer, on the batch lane's own CPU. It knows the
//! tasks of a batch by their ancestors: a run claims the lane with the ids of its two processes
//! (`TaskMap::claim`), and the tasks that descend from either are the batch; or by their cgroup,
//! which is how fences are counted. So neither a stranger
//! on the lane nor the guard is counted, and nothing of the batch is missed: not between two looks,
//! not while the guard holds the lane and the scheduler lets the batch in all the same.

use core::mem::{offset_of, size_of};
use core::sync::atomic::{AtomicU64, Ordering::*};

use super::snapshot;

/// One run's account of one batch lane.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct Account {
    /// The [`Claim`] that is counted; 0 for none.
    pub claim: AtomicU64,
    /// Counted up before the words below are stored, and after.
    pub begun: AtomicU64,
    pub done: AtomicU64,
    /// How long tasks of the batch ran here, up to the last switch to or from one of them,
    pub ran_ns: AtomicU64,
    /// and how long of that the request lane was busy.
    pub shared_ns: AtomicU64,
    /// When the task of the batch that runs now was switched in; 0 while none does.
    pub since_ns: AtomicU64,
    /// How long the request lane had been busy then.
    pub busy_at_ns: AtomicU64,
    /// The writer's own.
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

/// How many runs can have one batch lane counted for them at the same time.
pub const ACCOUNTS: usize = 3;

/// Whose tasks are counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Claim {
    /// The descendants of two processes. Ids of the initial pid namespace.
    Processes {
        /// 0 for none.
        front: u32,
        keeper: u32,
        /// Whether those two are counted as well: `elfen run` is no part of its batch, a program
        /// that was started without it is.
        themselves: bool,
    },
    /// A cgroup that the cpu controller has, by the inode of its folder, and all below it.
    Cgroup(u64),
}

/// In the upper half of a claim's word. Linux gives out no process id of more than 22 bits.
const THEMSELVES: u32 = 1 << 31;
const CGROUP: u64 = 1 << 62;

impl Claim {
    /// The batch of an `elfen run`, whose front and keeper these are.
    pub fn of_run(front: u32, keeper: u32) -> Self {
        Self::Processes { front, keeper, themselves: false }
    }

    /// A program and all that it starts.
    pub fn of_program(process: u32) -> Self {
        Self::Processes { front: 0, keeper: process, themselves: true }
    }

    pub fn word(self) -> u64 {
        match self {
            Self::Processes { front, keeper, themselves } => {
                let front = if themselves { front | THEMSELVES } else { front };
                u64::from(front) << 32 | u64::from(keeper)
            }
            Self::Cgroup(id) => id | CGROUP,
        }
    }

    /// `None` for 0, which is no claim.
    pub fn from_word(word: u64) -> Option<Self> {
        if word & CGROUP != 0 {
            return Some(Self::Cgroup(word & !CGROUP));
        }
        #[expect(clippy::cast_possible_truncation, reason = "the two halves of the word")]
        let (front, keeper) = ((word >> 32) as u32, word as u32);
        let themselves = front & THEMSELVES != 0;
        let front = front & !THEMSELVES;
        (word != 0).then_some(Self::Processes { front, keeper, themselves })
    }
}

/// An account at one moment, all of its words from the same switch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Counted {
    ran_ns: u64,
    shared_ns: u64,
    /// Since when a task of the batch runs, and the request lane's busy time then.
    running: Option<(u64, u64)>,
}

impl Counted {
    /// How long the batch ran here in all.
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

    /// Whether a task of the batch has the lane.
    pub fn is_running(&self) -> bool {
        self.running.is_some()
    }
}

impl Account {
    /// The time counted for `claim`; `None` if the account is another claim's, or if the lane
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
    fn a_stretch_that_still_runs_counts_to_now() {
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
