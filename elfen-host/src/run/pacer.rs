//! Takes a lane back that the scheduler gave to the batch while the guard held it.
//!
//! A guard that holds its lane can lose it: when something else has run there, or its slice is
//! over, the kernel chooses anew, and is fair. Then the batch has the lane until the kernel chooses
//! again, which is a tick or a whole slice of the batch later, and the guard can do nothing, as it
//! does not run. An ordinary thread that wakes up on this CPU takes it from a batch at SCHED_IDLE
//! at once, and when that sleeps again, the guard is the one who is owed the lane. So there is such
//! a thread; its timer is put off for as long as the guard runs.
//!
//! Later in a hold nothing is taken back: no request whose tail matters lasts that long, and a
//! batch has tasks that others wait for, as the daemon of a job does that its manager asks, or
//! whoever has a lock of the kernel's. What the scheduler owes them is all that they get.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

use crate::affinity;

/// A guard that has not run for so long has lost its lane.
const LOST: Duration = Duration::from_micros(250);
/// How often it shows that it runs. Requests that are over by then cost no system call.
const SHOWN_NS: u64 = 100_000;

/// Of a hold, the time in which the lane is taken back.
const PACED_NS: u64 = 100_000_000;

/// The pacer of one lane. Its thread ends when this drops.
#[derive(Debug)]
pub(super) struct Pacer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// When this hold began.
    held_ns: AtomicU64,
    /// When the guard showed last that it holds the lane, or began to; 0 while it does not.
    shown_ns: AtomicU64,
    is_armed: AtomicBool,
}

#[derive(Debug)]
struct Shared {
    timer: TimerFd,
    stop: AtomicBool,
    fired: AtomicU64,
}

impl Pacer {
    /// The thread inherits the rank of the one that starts it, which is a guard's.
    pub(super) fn start(lane: u32) -> io::Result<Self> {
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_CLOEXEC)?;
        let shared =
            Arc::new(Shared { timer, stop: AtomicBool::new(false), fired: AtomicU64::new(0) });
        let its = shared.clone();
        let name = thread::Builder::new().name("elfen-pacer".into());
        let thread = Some(name.spawn(move || its.take_back(lane))?);
        let (held_ns, shown_ns) = (AtomicU64::new(0), AtomicU64::new(0));
        Ok(Self { shared, thread, held_ns, shown_ns, is_armed: AtomicBool::new(false) })
    }

    /// The guard holds its lane, and runs. It shows this again within `SHOWN_NS`, or where it naps
    /// and sees nothing meanwhile, after `blind` at most.
    pub(super) fn put_off(&self, now_ns: u64, blind: Duration) {
        // Relaxed: the guard's thread alone reads and writes these words.
        let shown_ns = self.shown_ns.load(Relaxed);
        if shown_ns != 0 && now_ns.saturating_sub(shown_ns) < SHOWN_NS {
            return;
        }
        self.shown_ns.store(now_ns, Relaxed);
        if shown_ns == 0 {
            self.held_ns.store(now_ns, Relaxed);
        } else if now_ns.saturating_sub(self.held_ns.load(Relaxed)) >= PACED_NS {
            self.disarm();
        } else {
            self.is_armed.store(true, Relaxed);
            self.set(Some(Expiration::IntervalDelayed((blind + LOST).into(), LOST.into())));
        }
    }

    /// The guard leaves its lane to others.
    pub(super) fn rest(&self) {
        self.shown_ns.store(0, Relaxed);
        self.disarm();
    }

    fn disarm(&self) {
        if self.is_armed.swap(false, Relaxed) {
            self.set(None);
        }
    }

    fn set(&self, to: Option<Expiration>) {
        // With valid times, a timer that exists can be set.
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
        self.set(Some(Expiration::IntervalDelayed(soon, LOST.into())));
        if let Some(thread) = self.thread.take() {
            // It does not panic.
            let _ended = thread.join();
        }
    }
}

impl Shared {
    fn take_back(&self, lane: u32) {
        while !self.stop.load(Relaxed) {
            // A lane that was offline lets it go elsewhere. Where it may not stand on its lane, it
            // takes nothing back, and neither does its guard.
            // SAFETY: takes nothing and cannot fail.
            if u32::try_from(unsafe { libc::sched_getcpu() }) != Ok(lane) {
                let _elsewhere = affinity::pin(lane);
            }
            match self.timer.wait() {
                Ok(()) => _ = self.fired.fetch_add(1, Relaxed),
                Err(Errno::EINTR) => {}
                // The timer is there for as long as this thread.
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

    /// Goal: a guard that does not run is noticed, for as long as that lasts. Method: one that
    /// shows itself twice, and then no more.
    #[test]
    fn a_guard_that_does_not_run_is_noticed() {
        let pacer = pacer();
        pacer.put_off(1, Duration::ZERO);
        pacer.put_off(1 + SHOWN_NS, Duration::ZERO);
        while fired(&pacer) < 3 {
            thread::yield_now();
        }
        // It ends although the timer fires on.
    }

    /// Goal: neither a guard that has just begun nor one that rests is paced, and a blind one is
    /// not before it has looked. Method: the timer that would be set, as the kernel has it.
    #[test]
    fn who_runs_or_rests_is_left_alone() {
        let pacer = pacer();
        let left = || pacer.shared.timer.get().unwrap();
        pacer.put_off(1, Duration::ZERO);
        pacer.put_off(SHOWN_NS, Duration::ZERO);
        assert_eq!(left(), None, "most requests are over by then");
        let hour = Duration::from_secs(3600);
        pacer.put_off(1 + SHOWN_NS, hour);
        let Some(Expiration::IntervalDelayed(first, every)) = left() else { panic!("not set") };
        assert!(Duration::from(first) > hour - Duration::from_secs(60), "{first:?}");
        assert_eq!(Duration::from(every), LOST);
        pacer.rest();
        assert_eq!(left(), None);
        pacer.put_off(9 * SHOWN_NS, hour);
        assert_eq!(left(), None, "a hold of its own");
        pacer.put_off(8 * SHOWN_NS + PACED_NS, hour);
        assert!(left().is_some());
        pacer.put_off(9 * SHOWN_NS + PACED_NS, hour);
        assert_eq!(left(), None, "held for so long that it gets what it is owed");
        pacer.put_off(99 * SHOWN_NS + PACED_NS, hour);
        assert_eq!(left(), None, "and on");
        pacer.rest();
        assert_eq!(fired(&pacer), 0);
    }
}
