//! Sleeping in the kernel until the request lane idles: a futex on
//! [`crate::signal::lane::LaneSlot::wakes`].
//!
//! Meanwhile the batch lane idles, as deeply as the kernel allows, and other tasks can run on it.
//!
//! Waking the sleepers is slow and has a cost. When the request lane goes idle, an eBPF program
//! makes it interrupt itself to wake the waker, a thread of `elfen run`. The waker wakes the
//! sleepers. They run after tens of microseconds (`elfen lab bench overlap --nap block` measures
//! this). The interrupt takes some microseconds of the request lane's idle time, in which a request
//! that has just arrived has to wait.

use core::cell::Cell;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

use super::protocol::Wait;

/// Sleeps on a word that [`wake`] counts up. To miss a wake-up, 2^32 of them would have to fall
/// between arming and waiting.
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
        // Acquire: pairs with the release in `wake`. If the armed count includes a wake-up, the
        // re-check sees the idle lane that caused it.
        self.armed.set(self.wakes.load(Acquire));
    }

    fn wait(&self, left_ns: u64) {
        sleep_while(self.wakes.as_ptr(), self.armed.get(), left_ns);
    }
}

/// Sleeps while the lower half of a word is `value`, for at most `left_ns`.
pub fn wait(word: &AtomicU64, value: u32, left_ns: u64) {
    sleep_while(low_half(word), value, left_ns);
}

/// The address of the half of the word that the kernel compares. This process never accesses the
/// word through it.
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
    // Not FUTEX_PRIVATE, because the waker is another process. The result is ignored, because the
    // caller checks the lane again anyway.
    // SAFETY: `word` and `limit` live until the call returns.
    unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAIT, value, &raw const limit) };
}

/// Wakes the threads that sleep on the word, or that have armed and do not sleep yet.
pub fn wake(wakes: &AtomicU32) {
    // Release: pairs with the acquire in `Block::arm`.
    wakes.fetch_add(1, Release);
    // SAFETY: the word lives until the call returns.
    unsafe { libc::syscall(libc::SYS_futex, wakes.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

/// Rings a doorbell: sets the word to 0 and wakes the thread that sleeps while it is not 0.
pub fn ring_doorbell(doorbell: &AtomicU64) {
    // SeqCst: pairs with the sleeper's store to the word, and the check that the sleeper makes
    // after that store.
    if doorbell.swap(0, SeqCst) != 0 {
        // SAFETY: the word lives until the call returns.
        unsafe { libc::syscall(libc::SYS_futex, low_half(doorbell), libc::FUTEX_WAKE, 1) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nap::{Woken, protocol};
    use std::sync::atomic::AtomicBool;
    use std::time::{Duration, Instant};

    /// Goal: no wake-up is lost, whenever it comes. Method: a thousand naps without a bound, each
    /// woken by another thread as it begins. The model of the order is in `protocol`.
    #[test]
    fn naps_end_by_a_wake_up_or_by_their_bound() {
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
