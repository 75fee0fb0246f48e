//! Arm, re-check, wait: how a thread sleeps until a word is written without missing the write.
//!
//! The sleeper looks, finds the request lane busy, and goes to sleep; the lane may idle between the
//! two. So the sleeper first arms, from when on a write ends its wait even if it comes before it,
//! and then looks once more. The writer stores what the sleeper looks at before the word that wakes
//! it. The thesis's nanonap (Figure 5.6) waits without the second look and can sleep through a
//! wake-up.
//!
//! The kernel module does the same in C (`kernel/nanonap/nap.c`). The tests below run this loop,
//! and a twin of the module's probe, through every interleaving.

use super::woken::Woken;

/// A way to wait for a write to one line of memory.
pub trait Wait {
    /// From here on, a write to the line ends the next [`Wait::wait`], even if it comes first.
    fn arm(&self);

    /// Waits for such a write. May end earlier, and must when `left_ns` have passed.
    fn wait(&self, left_ns: u64);
}

/// Waits until the lane is no longer busy, or nothing is left of the bound.
#[inline]
pub fn nap(wait: &impl Wait, busy: impl Fn() -> bool, left_ns: impl Fn() -> u64) -> Woken {
    loop {
        wait.arm();
        if !busy() {
            return Woken::Idle;
        }
        let left_ns = left_ns();
        if left_ns == 0 {
            return Woken::Bound;
        }
        wait.wait(left_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use loom::sync::atomic::{AtomicU64, Ordering::*};
    use loom::sync::{Arc, Condvar, Mutex};
    use loom::thread;

    /// A line that a CPU can monitor. The lock stands for the order in which stores and MONITOR
    /// reach the line.
    struct Line {
        word: AtomicU64,
        monitor: Mutex<Monitor>,
        changed: Condvar,
    }

    #[derive(Default)]
    struct Monitor {
        armed: bool,
        triggered: bool,
        /// No thread will write any more.
        closed: bool,
        /// A wait began or went on without a write to come: without a bound, it is for ever.
        lost: bool,
    }

    impl Line {
        fn new(value: u64) -> Self {
            let monitor = Mutex::new(Monitor::default());
            Self { word: AtomicU64::new(value), monitor, changed: Condvar::new() }
        }

        fn store(&self, value: u64) {
            self.word.store(value, Release);
            let mut monitor = self.monitor.lock().unwrap();
            if monitor.armed {
                monitor.triggered = true;
                self.changed.notify_one();
            }
        }

        fn close(&self) {
            self.monitor.lock().unwrap().closed = true;
            self.changed.notify_one();
        }

        fn assert_none_lost(&self) {
            assert!(!self.monitor.lock().unwrap().lost, "a wake-up was lost");
        }
    }

    impl Wait for &Line {
        fn arm(&self) {
            let mut monitor = self.monitor.lock().unwrap();
            (monitor.armed, monitor.triggered) = (true, false);
        }

        fn wait(&self, _: u64) {
            let mut monitor = self.monitor.lock().unwrap();
            while !monitor.triggered && !monitor.closed {
                monitor = self.changed.wait(monitor).unwrap();
            }
            monitor.lost |= !monitor.triggered;
            monitor.armed = false;
        }
    }

    const BUSY: u64 = 7 << 32 | 7;
    const NO_BOUND: fn() -> u64 = || u64::MAX;

    /// The module's words of one request lane, and the nap word of its sibling.
    struct Lane {
        task: AtomicU64,
        idle_switch: AtomicU64,
        nap_word: Line,
    }

    impl Lane {
        fn busy_since_switch_1() -> Self {
            let (task, idle_switch) = (AtomicU64::new(BUSY), AtomicU64::new(0));
            Self { task, idle_switch, nap_word: Line::new(0) }
        }

        /// `nanonap_write_slot` and `nanonap_wake_siblings` of kernel/nanonap/map.c.
        fn switch(&self, count: u64, task: u64) {
            self.task.store(task, Relaxed);
            if task == 0 {
                self.idle_switch.store(count, Relaxed);
                self.nap_word.store(count);
            }
        }

        /// `nanonap_map_idle_since`, negated.
        fn busy(&self, seen: u64) -> bool {
            self.idle_switch.load(Relaxed) <= seen && self.task.load(Relaxed) != 0
        }
    }

    /// Every interleaving of what a request lane does, once, with a batch thread that naps.
    fn explore(request: fn(&Lane), batch: fn(&Lane)) {
        loom::model(move || {
            let lane = Arc::new(Lane::busy_since_switch_1());
            let (writer, sleeper) = (lane.clone(), lane.clone());
            let writer = thread::spawn(move || request(&writer));
            let sleeper = thread::spawn(move || batch(&sleeper));
            writer.join().unwrap();
            lane.nap_word.close();
            sleeper.join().unwrap();
            lane.nap_word.assert_none_lost();
        });
    }

    fn nap_on(lane: &Lane) {
        assert_eq!(nap(&&lane.nap_word, || lane.busy(1), NO_BOUND), Woken::Idle);
    }

    #[test]
    fn the_modules_nap_word_loses_no_wake_up() {
        explore(|lane| lane.switch(2, 0), nap_on);
    }

    /// An idle moment that is over when the sleeper looks again ends its nap all the same.
    #[test]
    fn a_short_idle_moment_is_not_missed() {
        explore(
            |lane| {
                lane.switch(2, 0);
                lane.switch(3, BUSY);
            },
            nap_on,
        );
    }

    /// UMWAIT and MWAITX watch the word that they look at.
    #[test]
    fn a_slots_own_line_loses_no_wake_up() {
        explore(
            |lane| lane.nap_word.store(2),
            |lane| {
                let busy = || lane.nap_word.word.load(Relaxed) == 0;
                assert_eq!(nap(&&lane.nap_word, busy, NO_BOUND), Woken::Idle);
            },
        );
    }

    /// The model can fail: the published order, without a look after arming.
    #[test]
    #[should_panic(expected = "a wake-up was lost")]
    fn the_model_finds_the_wake_up_lost_without_the_re_check() {
        explore(
            |lane| lane.switch(2, 0),
            |lane| {
                while lane.busy(1) {
                    (&&lane.nap_word).arm();
                    (&&lane.nap_word).wait(u64::MAX);
                }
            },
        );
    }

    /// The model can fail: a probe that wakes before it says that the lane idles.
    #[test]
    #[should_panic(expected = "a wake-up was lost")]
    fn the_model_finds_the_wake_up_lost_by_a_probe_that_wakes_first() {
        explore(
            |lane| {
                lane.nap_word.store(2);
                lane.idle_switch.store(2, Relaxed);
                lane.task.store(0, Relaxed);
            },
            nap_on,
        );
    }

    /// A word that the kernel compares as it puts a thread to sleep: `nap::block`.
    #[derive(Default)]
    struct Futex {
        wakes: AtomicU64,
        closed: Mutex<bool>,
        changed: Condvar,
    }

    impl Futex {
        /// `block::wake`.
        fn wake(&self) {
            self.wakes.fetch_add(1, Release);
            drop(self.closed.lock().unwrap());
            self.changed.notify_all();
        }
    }

    struct FutexSleeper<'a> {
        futex: &'a Futex,
        armed: core::cell::Cell<u64>,
    }

    impl Wait for FutexSleeper<'_> {
        fn arm(&self) {
            self.armed.set(self.futex.wakes.load(Acquire));
        }

        fn wait(&self, _: u64) {
            let mut closed = self.futex.closed.lock().unwrap();
            while self.futex.wakes.load(Relaxed) == self.armed.get() {
                assert!(!*closed, "a wake-up was lost");
                closed = self.futex.changed.wait(closed).unwrap();
            }
        }
    }

    /// A thread that blocks, the request lane, and the waker that the lane's idling has woken.
    fn explore_block(wake_first: bool) {
        loom::model(move || {
            let shared = Arc::new((AtomicU64::new(BUSY), Futex::default()));
            let (lane, sleeper) = (shared.clone(), shared.clone());
            let lane = thread::spawn(move || {
                let (task, futex) = &*lane;
                if wake_first {
                    futex.wake();
                }
                task.store(0, Relaxed);
                if !wake_first {
                    futex.wake();
                }
            });
            let sleeper = thread::spawn(move || {
                let (task, futex) = &*sleeper;
                let sleeper = FutexSleeper { futex, armed: core::cell::Cell::new(0) };
                let busy = || task.load(Relaxed) != 0;
                assert_eq!(nap(&sleeper, busy, NO_BOUND), Woken::Idle);
            });
            lane.join().unwrap();
            *shared.1.closed.lock().unwrap() = true;
            shared.1.changed.notify_all();
            sleeper.join().unwrap();
        });
    }

    #[test]
    fn a_thread_that_blocks_loses_no_wake_up() {
        explore_block(false);
    }

    /// The model can fail.
    #[test]
    #[should_panic(expected = "a wake-up was lost")]
    fn the_model_finds_a_sleeper_that_was_woken_too_early() {
        explore_block(true);
    }

    /// The bound ends a nap that nothing wakes, even if every wait ends early.
    #[test]
    fn a_bound_ends_the_nap_of_a_lane_that_stays_busy() {
        struct Restless;
        impl Wait for Restless {
            fn arm(&self) {}
            fn wait(&self, _: u64) {}
        }
        let left = core::cell::Cell::new(5_u64);
        let left_ns = || {
            left.set(left.get() - 1);
            left.get()
        };
        assert_eq!(nap(&Restless, || true, left_ns), Woken::Bound);
        assert_eq!(left.get(), 0);
    }
}
