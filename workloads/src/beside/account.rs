//! Neighbours as the kernel counts them: how long batches ran on a batch lane, and how long of that
//! beside a busy request lane.
//!
//! Neither a stranger on the lane nor a guard that holds it is in those accounts. A batch
//! thread that naps at a check of its own is, unless it blocks, as to the kernel it runs: so
//! its run has to say that it naps.

use super::lanes::Lanes;
use super::{Neighbour, Reading};
use crate::units::Nanos;
use elfen_rt::clock::monotonic_ns;
use nix::sched::sched_getcpu;
use nix::time::{ClockId, clock_gettime};
use std::rc::Rc;
use std::sync::Arc;

/// The kernel's accounts of all batches on a lane, together. No system calls, but to refresh.
pub trait Accounts {
    /// How long batches have run on this batch lane by now.
    fn ran_ns(&self, batch: u32, now_ns: Nanos) -> Nanos;

    /// Since when the batch thread that runs there naps instead, at a check of its own.
    fn napping_since_ns(&self, batch: u32) -> Option<Nanos>;

    /// How long the calling thread's batch has run on this lane while its request lane was busy.
    fn shared_ns(&self, batch: u32, request: u32, now_ns: Nanos) -> Nanos;

    /// Looks which runs there are.
    fn refresh(&self);
}

/// A count of several accounts, which only grows.
///
/// An account that another run takes over begins anew, and one that cannot be read, because the
/// kernel is in the midst of writing it, is missing from the sum.
#[derive(Clone, Copy, Debug, Default)]
struct Grown {
    last_ns: Nanos,
}

/// A writer is done in nanoseconds; a hypervisor may stop it for longer.
const TRIES: u32 = 100;

impl Grown {
    /// By how much, since the last time.
    fn by(&mut self, mut sum: impl FnMut() -> Nanos) -> Nanos {
        let mut sum_ns = sum();
        for _ in 0..TRIES {
            if sum_ns >= self.last_ns {
                break;
            }
            sum_ns = sum();
        }
        sum_ns.saturating_sub(std::mem::replace(&mut self.last_ns, sum_ns))
    }
}

/// What a worker has beside it: the batches on the batch lanes of its request lane. A look makes no
/// system call.
#[derive(Debug)]
pub struct Batches<A: ?Sized> {
    lanes: Vec<(u32, Grown)>,
    last: Reading,
    refreshed_ns: Nanos,
    accounts: Arc<A>,
}

/// How late a run that begins or ends may be noticed.
const REFRESH_EVERY_NS: Nanos = 100_000_000;

impl<A: Accounts + ?Sized> Batches<A> {
    pub fn new(accounts: Arc<A>, lanes: &[u32]) -> Self {
        accounts.refresh();
        let lanes = lanes.iter().map(|lane| (*lane, Grown::default())).collect();
        Self { lanes, last: Reading::default(), refreshed_ns: monotonic_ns(), accounts }
    }
}

impl<A: Accounts + ?Sized> Neighbour for Batches<A> {
    fn look(&mut self) -> Reading {
        let at_ns = monotonic_ns();
        let Self { accounts, lanes, last, .. } = self;
        let beside_ns = lanes.iter_mut().map(|(lane, grown)| {
            let ran_ns = grown.by(|| accounts.ran_ns(*lane, at_ns));
            let napped_ns = accounts
                .napping_since_ns(*lane)
                .map_or(0, |since_ns| at_ns.saturating_sub(since_ns.max(last.at_ns)));
            ran_ns.saturating_sub(napped_ns)
        });
        *last = Reading { at_ns, beside_ns: last.beside_ns + beside_ns.sum::<Nanos>() };
        *last
    }

    fn refresh(&mut self) {
        if monotonic_ns().saturating_sub(self.refreshed_ns) >= REFRESH_EVERY_NS {
            self.accounts.refresh();
            self.refreshed_ns = monotonic_ns();
        }
    }
}

/// What a batch program has beside it: the requests on the request lane of the batch lane that it
/// runs on. Its clock is its own CPU time, so that it pays for nothing while it is off its lane.
#[derive(Debug)]
pub struct Requests<A> {
    accounts: Rc<A>,
    lanes: Lanes,
    cpu: Option<u32>,
    shared: Grown,
    beside_ns: Nanos,
}

impl<A: Accounts> Requests<A> {
    pub fn new(accounts: Rc<A>, lanes: Lanes) -> Self {
        Self { accounts, lanes, cpu: None, shared: Grown::default(), beside_ns: 0 }
    }
}

impl<A: Accounts> Neighbour for Requests<A> {
    fn look(&mut self) -> Reading {
        let cpu = sched_getcpu().ok().and_then(|cpu| u32::try_from(cpu).ok());
        let at_ns = cpu_time_ns();
        let now_ns = monotonic_ns();
        let lane = cpu.and_then(|cpu| Some((cpu, self.lanes.request_of(cpu)?)));
        let sum = || lane.map_or(0, |(cpu, request)| self.accounts.shared_ns(cpu, request, now_ns));
        if self.cpu != cpu {
            // Another lane's accounts: what they have grown by meanwhile was not this thread.
            (self.cpu, self.shared.last_ns) = (cpu, sum());
        }
        self.beside_ns += self.shared.by(sum);
        Reading { at_ns, beside_ns: self.beside_ns }
    }
}

/// What this thread has run so far.
fn cpu_time_ns() -> Nanos {
    let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("Linux has this clock");
    Nanos::try_from(std::time::Duration::from(time).as_nanos()).unwrap_or(Nanos::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::beside::kernel::Kernel;
    use elfen_rt::memory::Memory;
    use elfen_rt::signal::account::Claim;
    use elfen_rt::signal::lane::{LaneSlot, LaneState};
    use elfen_rt::signal::page::Page;
    use nix::libc::IPC_PRIVATE;
    use std::sync::atomic::Ordering::Relaxed;

    /// As the kernel leaves an account after a switch on its lane.
    fn counted(kernel: &Kernel, batch: u32, index: usize, words: [u64; 5]) {
        let account = kernel.map().account_for_tests(batch, index);
        let places = [
            &account.claim,
            &account.ran_ns,
            &account.shared_ns,
            &account.since_ns,
            &account.busy_at_ns,
        ];
        places.into_iter().zip(words).for_each(|(place, word)| place.store(word, Relaxed));
    }

    fn claim(keeper: u32) -> u64 {
        Claim::of_program(keeper).word()
    }

    /// Goal: what ran on a lane is the sum over its accounts, up to now where one still runs, and
    /// what it shared is bounded by the request lane's busy time. Method: two runs on lane 1, one
    /// of which runs, beside a request lane that turned busy meanwhile.
    #[test]
    fn accounts_of_a_lane_add_up() {
        let kernel = Kernel::for_tests(4);
        counted(&kernel, 1, 0, [claim(7), 500, 100, 10_000, 2_000]);
        counted(&kernel, 1, 2, [claim(8), 40, 30, 0, 0]);
        counted(&kernel, 2, 0, [claim(7), 9_000, 9_000, 0, 0]);
        let request = kernel.map().slot(0).expect("it has four");
        request.busy_ns.store(2_000, Relaxed);
        request.busy_since_ns.store(10_400, Relaxed);
        assert_eq!(kernel.ran_ns(1, 11_000), 500 + 1_000 + 40);
        assert_eq!(kernel.shared_ns(1, 0, 11_000), 100 + 600 + 30);
        assert_eq!((kernel.ran_ns(3, 11_000), kernel.shared_ns(3, 0, 11_000)), (0, 0));
    }

    /// Goal: a worker sees all lanes beside it; an account that begins anew for another run, or
    /// that cannot be read, never makes the count run backwards or leap. Method: each, between
    /// looks.
    #[test]
    fn a_worker_sees_all_its_lanes() {
        let kernel = Arc::new(Kernel::for_tests(4));
        counted(&kernel, 1, 0, [claim(7), 500, 0, 0, 0]);
        let mut batches = Batches::new(kernel.clone(), &[1, 2]);
        let first_ns = batches.look().beside_ns;
        counted(&kernel, 1, 0, [claim(7), 600, 0, 0, 0]);
        counted(&kernel, 2, 1, [claim(8), 50, 0, 0, 0]);
        assert_eq!(batches.look().beside_ns - first_ns, 150);
        counted(&kernel, 1, 0, [claim(9), 5, 0, 0, 0]);
        assert_eq!(batches.look().beside_ns - first_ns, 150, "another run's, from the beginning");
        counted(&kernel, 1, 0, [claim(9), 25, 0, 0, 0]);
        assert_eq!(batches.look().beside_ns - first_ns, 170);
    }

    /// Goal: what a batch thread naps away at a check of its own does not count as
    /// running beside the request. Method: an account that runs all the time, and a run's
    /// page that says when it naps.
    #[test]
    fn own_naps_do_not_count() {
        let kernel = Arc::new(Kernel::for_tests(2));
        counted(&kernel, 1, 0, [claim(7), 0, 0, 1, 0]);
        let bytes = Page::<LaneSlot>::bytes(1);
        let memory = Memory::create_segment(IPC_PRIVATE, bytes, 0o600).expect("a segment");
        memory.remove_name().expect("it is ours");
        let run: Page<LaneSlot> = Page::format(memory, 1, 0, &[0; 32]).expect("a page");
        let slot = run.slot(0).expect("it has one");
        slot.assign(1, 0);
        slot.account_claim.store(claim(7), Relaxed);
        slot.enter(LaneState::Running, monotonic_ns());
        let mut batches = Batches::new(kernel, &[1]);
        let mut grew = || {
            let (before, after) = (batches.look(), batches.look());
            (after.at_ns - before.at_ns, after.beside_ns - before.beside_ns)
        };
        let (long_ns, beside_ns) = grew();
        assert_eq!(beside_ns, long_ns);
        slot.enter(LaneState::Napping, monotonic_ns());
        assert_eq!(grew().1, 0);
        slot.enter(LaneState::Running, monotonic_ns());
        let (long_ns, beside_ns) = grew();
        assert_eq!(beside_ns, long_ns);
    }

    /// Goal: a batch thread counts what its own lane shared with its request lane, and nothing
    /// where it has none. Method: on whatever CPU the test runs, as a batch lane, and as none.
    #[test]
    fn a_batch_sees_its_own_lane() {
        let cpus = u32::try_from(nix::sched::CpuSet::count()).expect("a few");
        let kernel = Rc::new(Kernel::for_tests(cpus));
        let pinned = crate::process::affinity::allowed().expect("Linux says")[0];
        crate::process::affinity::pin(pinned).expect("it is allowed");
        let own = u32::try_from(pinned).expect("a CPU");
        let lanes: Lanes = format!("{}:{own}", own + 1).parse().expect("a pair");
        let strangers: Lanes = format!("{}:{}", own + 1, own + 2).parse().expect("a pair");
        let mut inside = Requests::new(kernel.clone(), lanes);
        let mut outside = Requests::new(kernel.clone(), strangers);
        let before = [inside.look(), outside.look()];
        for lane in [own, own + 2] {
            counted(&kernel, lane, 0, [claim(7), 900, 400, 0, 0]);
        }
        let after = [inside.look(), outside.look()];
        assert_eq!(after[0].beside_ns - before[0].beside_ns, 400);
        assert_eq!(after[1].beside_ns - before[1].beside_ns, 0);
        assert!(after[0].at_ns > before[0].at_ns, "its own CPU time goes on");
    }
}
