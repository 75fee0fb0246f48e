//! The pacer of one lane: a thread that takes the lane back when the scheduler has given it to the
//! batch although the guard occupies it.
//!
//! After an interruption, or when the guard's slice has ended, the scheduler picks a thread again,
//! and sometimes picks the batch, for fairness. The batch then keeps the lane until the next pick,
//! which is a tick or a whole slice later. The guard does not run, so it cannot do anything. An
//! ordinary thread that wakes on this CPU preempts a batch at SCHED_IDLE at once. When that thread
//! sleeps again, the scheduler picks the guard. The pacer is such a thread: its timer fires only if
//! the guard does not postpone it, which the guard does as long as it runs.
//!
//! The pacer acts only in the first 100 ms of a hold. Requests whose tail latency matters are
//! shorter. Later the batch gets its share of the scheduler, because other processes may wait for
//! its tasks: a job manager for the job's daemon, or any process for the holder of a kernel lock.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

use elfen_machine::affinity;

/// A guard that has not run for this long has lost its lane.
const LOST_AFTER: Duration = Duration::from_micros(250);
/// How often the guard reports that it runs. Shorter requests cost no system call.
const REPORT_INTERVAL_NS: u64 = 100_000;

/// The beginning of a hold, during which the lane is taken back.
const PACED_NS: u64 = 100_000_000;

/// The pacer of one lane. Dropping this ends its thread.
#[derive(Debug)]
pub(super) struct Pacer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// When the current hold began.
    hold_began_ns: AtomicU64,
    /// When the guard last reported that it holds the lane; 0 while it does not hold it.
    reported_ns: AtomicU64,
    is_armed: AtomicBool,
}

#[derive(Debug)]
struct Shared {
    timer: TimerFd,
    stop: AtomicBool,
    fired: AtomicU64,
}

impl Pacer {
    /// Starts the thread. It inherits the rank of the calling thread, which is a guard's.
    pub(super) fn start(lane: u32) -> io::Result<Self> {
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_CLOEXEC)?;
        let shared =
            Arc::new(Shared { timer, stop: AtomicBool::new(false), fired: AtomicU64::new(0) });
        let its = shared.clone();
        let name = thread::Builder::new().name("elfen-pacer".into());
        let thread = Some(name.spawn(move || its.take_back(lane))?);
        Ok(Self {
            shared,
            thread,
            hold_began_ns: AtomicU64::new(0),
            reported_ns: AtomicU64::new(0),
            is_armed: AtomicBool::new(false),
        })
    }

    /// Postpones the timer: the guard holds its lane and runs. It reports this again within
    /// `REPORT_INTERVAL_NS`, or after `unreported` at most where its nap cannot be interrupted.
    pub(super) fn postpone(&self, now_ns: u64, unreported: Duration) {
        // Relaxed: only the guard's thread reads and writes these words.
        let reported_ns = self.reported_ns.load(Relaxed);
        if reported_ns != 0 && now_ns.saturating_sub(reported_ns) < REPORT_INTERVAL_NS {
            return;
        }
        self.reported_ns.store(now_ns, Relaxed);
        if reported_ns == 0 {
            self.hold_began_ns.store(now_ns, Relaxed);
        } else if now_ns.saturating_sub(self.hold_began_ns.load(Relaxed)) >= PACED_NS {
            self.disarm();
        } else {
            self.is_armed.store(true, Relaxed);
            self.set(Some(Expiration::IntervalDelayed(
                (unreported + LOST_AFTER).into(),
                LOST_AFTER.into(),
            )));
        }
    }

    /// Stops the timer: the guard leaves its lane to others.
    pub(super) fn stop(&self) {
        self.reported_ns.store(0, Relaxed);
        self.disarm();
    }

    fn disarm(&self) {
        if self.is_armed.swap(false, Relaxed) {
            self.set(None);
        }
    }

    fn set(&self, to: Option<Expiration>) {
        // A timer that exists can be set to any valid time.
        let _set = match to {
            Some(to) => self.shared.timer.set(to, TimerSetTimeFlags::empty()),
            None => self.shared.timer.unset(),
        };
    }
}

impl Drop for Pacer {
    fn drop(&mut self) {
        // Relaxed: the join below orders everything else.
        self.shared.stop.store(true, Relaxed);
        let soon = Duration::from_nanos(1).into();
        self.set(Some(Expiration::IntervalDelayed(soon, LOST_AFTER.into())));
        if let Some(thread) = self.thread.take() {
            // The thread does not panic.
            let _ended = thread.join();
        }
    }
}

impl Shared {
    fn take_back(&self, lane: u32) {
        while !self.stop.load(Relaxed) {
            // The kernel moves this thread while the lane is offline. If a cpuset keeps it off its
            // lane, it takes nothing back, and its guard does not occupy the lane either.
            // SAFETY: sched_getcpu takes nothing and cannot fail.
            if u32::try_from(unsafe { libc::sched_getcpu() }) != Ok(lane) {
                let _elsewhere = affinity::pin(lane);
            }
            match self.timer.wait() {
                Ok(()) => _ = self.fired.fetch_add(1, Relaxed),
                Err(Errno::EINTR) => {}
                // The timer exists as long as this thread.
                Err(_) => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pacer() -> Pacer {
        Pacer::start(affinity::allowed().unwrap().iter().next().unwrap()).unwrap()
    }

    fn fired(pacer: &Pacer) -> u64 {
        pacer.shared.fired.load(Relaxed)
    }

    /// Goal: the timer fires again and again while a guard does not run. Method: a guard that
    /// reports twice, and then no more.
    #[test]
    fn a_guard_that_does_not_run_is_noticed() {
        let pacer = pacer();
        pacer.postpone(1, Duration::ZERO);
        pacer.postpone(1 + REPORT_INTERVAL_NS, Duration::ZERO);
        while fired(&pacer) < 3 {
            thread::yield_now();
        }
        // Dropping the pacer ends its thread although the timer still fires.
    }

    /// Goal: the timer is off for a guard that has just begun a hold, or does not hold its lane;
    /// for a guard in a nap it is set to the end of that nap. Method: read the timer from the
    /// kernel.
    #[test]
    fn a_guard_that_runs_or_leaves_its_lane_is_not_paced() {
        let pacer = pacer();
        let left = || pacer.shared.timer.get().unwrap();
        pacer.postpone(1, Duration::ZERO);
        pacer.postpone(REPORT_INTERVAL_NS, Duration::ZERO);
        assert_eq!(left(), None, "most requests are over by then");
        let hour = Duration::from_secs(3600);
        pacer.postpone(1 + REPORT_INTERVAL_NS, hour);
        let Some(Expiration::IntervalDelayed(first, every)) = left() else { panic!("not set") };
        assert!(Duration::from(first) > hour - Duration::from_secs(60), "{first:?}");
        assert_eq!(Duration::from(every), LOST_AFTER);
        pacer.stop();
        assert_eq!(left(), None);
        pacer.postpone(9 * REPORT_INTERVAL_NS, hour);
        assert_eq!(left(), None, "a new hold");
        pacer.postpone(8 * REPORT_INTERVAL_NS + PACED_NS, hour);
        assert!(left().is_some());
        pacer.postpone(9 * REPORT_INTERVAL_NS + PACED_NS, hour);
        assert_eq!(left(), None, "after 100 ms the batch gets its share");
        pacer.postpone(99 * REPORT_INTERVAL_NS + PACED_NS, hour);
        assert_eq!(left(), None, "also later");
        pacer.stop();
        assert_eq!(fired(&pacer), 0);
    }
}
