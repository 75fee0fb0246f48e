//! Arm, re-check, wait: how a thread sleeps until a word is written without missing the write.
//!
//! The request lane may idle after the sleeper has found it busy and before the sleeper waits. So
//! the sleeper first arms, then checks the lane once more, then waits. After arming, a write ends
//! the wait even if it comes before the wait. The writer stores the lane's state before it writes
//! the word that wakes the sleeper. The thesis's nanonap (Figure 5.6) waits without the re-check,
//! and can sleep through a wake-up.
//!
//! The kernel module does the same in C (`kernel/nanonap/nap.c`). The tests below run this loop,
//! and a model of the module's writer, through every interleaving.

/// Why a nap ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Woken {
    /// The request lane idles, or has idled since the nap was requested.
    Idle,
    /// The kernel needs the thread: its time slice has ended, or a signal is pending.
    Wanted,
    /// The bound has passed.
    Bound,
    /// There was no nap: the thread is not on a lane that the request lane can wake.
    Elsewhere,
}

/// A way to wait for a write to one line of memory.
pub trait Wait {
    /// Arms: from here on, a write to the line ends the next [`Wait::wait`], even if the write
    /// comes before that wait.
    fn arm(&self);

    /// Waits for such a write. May return earlier, and must return when `left_ns` have passed.
    fn wait(&self, left_ns: u64);
}

/// Waits until the lane is no longer busy, or the bound has passed.
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

    /// A line that a CPU can monitor. The lock models the order in which stores and MONITOR reach
    /// the line.
    struct Line {
        word: AtomicU64,
        monitor: Mutex<Monitor>,
        changed: Condvar,
    }

    #[derive(Default)]
    struct Monitor {
        armed: bool,
        triggered: bool,
        /// No thread writes after this.
        closed: bool,
        /// A thread waited although no write comes any more. Without a bound it would wait for
        /// ever.
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
            monitor.armed = true;
            monitor.triggered = false;
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

    /// Explores every interleaving of `request` on a request lane with `batch` on a batch thread.
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

    /// An idle moment ends the nap even if it is over when the sleeper re-checks.
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

    /// UMWAIT and MWAITX monitor the word that the re-check reads.
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

    /// The model can fail: the order of Figure 5.6, without a re-check after arming.
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

    /// The model can fail: a writer that wakes the sleeper before it marks the lane idle.
    #[test]
    #[should_panic(expected = "a wake-up was lost")]
    fn the_model_finds_the_wake_up_lost_by_a_writer_that_wakes_first() {
        explore(
            |lane| {
                lane.nap_word.store(2);
                lane.idle_switch.store(2, Relaxed);
                lane.task.store(0, Relaxed);
            },
            nap_on,
        );
    }

    /// A model of `nap::block`: a word that the kernel compares when it puts a thread to sleep.
    #[derive(Default)]
    struct Futex {
        wakes: AtomicU64,
        closed: Mutex<bool>,
        changed: Condvar,
    }

    impl Futex {
        /// Models `block::wake`.
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

    /// Explores a thread that blocks and a request lane that goes idle. The lane's thread acts as
    /// the waker, too; with `wake_first` it wakes the sleeper too early.
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

    /// The model can fail: a waker that is too early.
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
