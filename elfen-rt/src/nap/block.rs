//! Sleeping in the kernel until the request lane idles: a futex on
//! [`crate::signal::lane::LaneSlot::wakes`].
//!
//! The lane itself idles meanwhile, as deep as the kernel lets it, and any other task that wants it
//! may have it. Waking the sleepers is slow and not free: as the request lane goes idle, an eBPF
//! program has it interrupt itself to wake the waker, a thread of `elfen run`, which wakes the
//! sleepers: tens of microseconds until they run, and some microseconds of the request lane's idle
//! moment, in which a request that has just arrived waits. `elfen lab bench overlap --nap block`
//! measures the first.

use core::cell::Cell;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

use super::protocol::Wait;

/// A sleeper on a word that [`wake`] counts up. A count that has gone round in the moment between
/// arming and waiting would have to have made 2^32 steps.
#[derive(Debug)]
pub struct Block<'a> {
    wakes: &'a AtomicU32,
    armed: Cell<u32>,
}

impl<'a> Block<'a> {
    pub fn on(wakes: &'a AtomicU32) -> Self {
        Self { wakes, armed: Cell::new(0) }
    }
}

impl Wait for Block<'_> {
    #[inline]
    fn arm(&self) {
        // Acquire: pairs with the release in `wake`. A lane that idled before it is seen
        // idle by the look after this.
        self.armed.set(self.wakes.load(Acquire));
    }

    fn wait(&self, left_ns: u64) {
        sleep_while(self.wakes.as_ptr(), self.armed.get(), left_ns);
    }
}

/// Sleeps while the lower half of a word is `value`, for as long at most.
pub fn wait(word: &AtomicU64, value: u32, left_ns: u64) {
    sleep_while(low_half(word), value, left_ns);
}

/// Where the half of a word lies that the kernel compares; nothing here reads it by that.
fn low_half(word: &AtomicU64) -> *mut u32 {
    word.as_ptr().cast()
}

fn sleep_while(word: *mut u32, value: u32, left_ns: u64) {
    const SECOND_NS: u64 = 1_000_000_000;
    let seconds = i64::try_from(left_ns / SECOND_NS).unwrap_or(i64::MAX);
    let limit = libc::timespec {
        tv_sec: seconds,
        tv_nsec: i64::try_from(left_ns % SECOND_NS).unwrap_or(0),
    };
    // Not FUTEX_PRIVATE: the waker is another process. Its result says nothing that the next look
    // does not.
    // SAFETY: `word` and `limit` live until the call returns.
    unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAIT, value, &raw const limit) };
}

/// Wakes the threads that sleep on the word, and those that are just about to.
pub fn wake(wakes: &AtomicU32) {
    // Release: pairs with the acquire in `arm`.
    wakes.fetch_add(1, Release);
    // SAFETY: the word lives until the call returns.
    unsafe { libc::syscall(libc::SYS_futex, wakes.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

/// Wakes the thread that sleeps while the word is not 0, by making it 0.
pub fn ring(bell: &AtomicU64) {
    // SeqCst: pairs with the store of the one that is about to sleep, and its look after that.
    if bell.swap(0, SeqCst) != 0 {
        // SAFETY: the word lives until the call returns.
        unsafe { libc::syscall(libc::SYS_futex, low_half(bell), libc::FUTEX_WAKE, 1) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nap::{Woken, protocol};
    use std::sync::atomic::AtomicBool;
    use std::time::{Duration, Instant};

    /// Goal: no wake-up is lost, whenever it comes. Method: a thousand naps that end by nothing
    /// else, woken by another thread as they begin; the model of the order is in `protocol`.
    #[test]
    fn sleepers_are_woken_and_bounds_end_the_rest() {
        let (wakes, busy) = (AtomicU32::new(0), AtomicBool::new(true));
        assert_eq!(protocol::nap(&Block::on(&wakes), || true, bound(1_000_000)), Woken::Bound);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..1000 {
                    while !busy.load(Relaxed) {
                        core::hint::spin_loop();
                    }
                    busy.store(false, Relaxed);
                    wake(&wakes);
                }
            });
            for _ in 0..1000 {
                let nap = protocol::nap(&Block::on(&wakes), || busy.load(Relaxed), || u64::MAX);
                assert_eq!(nap, Woken::Idle);
                busy.store(true, Relaxed);
            }
        });
    }

    fn bound(ns: u64) -> impl Fn() -> u64 {
        let end = Instant::now() + Duration::from_nanos(ns);
        move || u64::try_from((end - Instant::now()).as_nanos()).unwrap()
    }
}
