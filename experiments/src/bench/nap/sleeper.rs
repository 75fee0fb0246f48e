//! The thread on the batch lane. It works until it is asked to sleep, sleeps, and publishes when it
//! woke.

use std::hint::black_box;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};

use elfen_console::duration::number;
use elfen_rt::clock::monotonic_ns;
use elfen_rt::memory::MemoryError;
use elfen_rt::nap::device::Device;
use elfen_rt::nap::{Nap, Woken};
use elfen_rt::signal::page::Page;
use elfen_rt::signal::task::{Running, TaskSlot};

use crate::bench::private_page;

/// The way to sleep that is measured.
#[derive(Debug)]
pub(super) enum Way {
    Nap(Nap),
    Futex,
}

/// How long one thread waits for the other before it reports an error.
pub(super) const ANSWER_NS: u64 = 10_000_000_000;

/// The longest sleep, if the measuring thread does not end it.
const BOUND_NS: u64 = 100_000_000;

/// The task that keeps the request lane busy until the sleeper is to wake, in the format of the
/// task map.
const SOME_TASK: u64 = 1 << 32 | 1;

/// A word that is polled, so it has cache lines of its own.
#[derive(Default)]
#[repr(align(128))]
pub(super) struct Word(AtomicU64);

impl std::ops::Deref for Word {
    type Target = AtomicU64;

    fn deref(&self) -> &AtomicU64 {
        &self.0
    }
}

/// How a nap ended.
#[derive(Clone, Copy, Debug)]
pub(super) enum WakeUp {
    /// The measuring thread ended it. The second thread ran this many cycles later.
    After(f64),
    /// An idle request lane ended it. Then another task ran there, so it is unknown when.
    Overtaken,
    /// It ended for another reason.
    Otherwise,
}

/// What the two threads share.
pub(super) struct Shared {
    /// The second thread, in the format of the task map.
    pub(super) sleeper: AtomicU64,
    pub(super) asked: Word,
    pub(super) entered: Word,
    pub(super) entered_at: AtomicU64,
    pub(super) done: Word,
    woke_at: AtomicU64,
    woke_at_ns: AtomicU64,
    /// When the request lane went idle, according to the device. 0 if it did not.
    idle_at_ns: AtomicU64,
    /// The number of the request lane's switches when the measuring thread was about to leave it,
    /// which ends a device nap.
    left_at_switch: AtomicU64,
    /// A futex that keeps the measuring thread off the request lane until `done`.
    answered: AtomicU32,
    woken: AtomicBool,
    stopped: AtomicBool,
    futex: AtomicU32,
    /// One slot that looks like that of a request lane.
    lane: Page<TaskSlot>,
}

/// `Nap::open` returns no nap that blocks, so this word has no writer. The futex is the baseline.
static NOBODY_BLOCKS: AtomicU32 = AtomicU32::new(0);

impl Shared {
    pub(super) fn new() -> Result<Self, MemoryError> {
        Ok(Self {
            sleeper: AtomicU64::new(0),
            asked: Word::default(),
            entered: Word::default(),
            entered_at: AtomicU64::new(0),
            done: Word::default(),
            woke_at: AtomicU64::new(0),
            woke_at_ns: AtomicU64::new(0),
            idle_at_ns: AtomicU64::new(0),
            left_at_switch: AtomicU64::new(0),
            answered: AtomicU32::new(0),
            woken: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            futex: AtomicU32::new(0),
            lane: private_page(1)?,
        })
    }

    fn slot(&self) -> &TaskSlot {
        self.lane.slot(0).unwrap_or_else(|| unreachable!("a page of one slot"))
    }

    /// From here on, a thread that sleeps this way does not wake.
    pub(super) fn hold(&self, way: &Way) {
        self.answered.store(0, Relaxed);
        match way {
            Way::Nap(_) => self.slot().task.store(SOME_TASK, Release),
            Way::Futex => self.futex.store(1, Release),
        }
    }

    /// Wakes the thread that sleeps in a device nap: the measuring thread leaves the request lane.
    /// It stays away until the second thread has read since when the lane idles. If it came back
    /// after a fixed time, slow wake-ups would find the lane busy again. Only the fast ones would
    /// be measured.
    pub(super) fn leave_lane(&self, device: &Device, request_cpu: u32) {
        let switches = device.slot(request_cpu).map_or(0, |slot| slot.switches.load(Relaxed));
        // Relaxed: the kernel's store of the following switch publishes it.
        self.left_at_switch.store(switches, Relaxed);
        futex(&self.answered, libc::FUTEX_WAIT, 0, Some(&timespec(ANSWER_NS)));
    }

    /// Wakes the thread that sleeps this way. It does not end a device nap: see the header of
    /// `nap`.
    pub(super) fn release(&self, way: &Way) {
        match way {
            Way::Nap(_) => self.slot().task.store(0, Release),
            Way::Futex => {
                self.futex.store(0, Release);
                futex(&self.futex, libc::FUTEX_WAKE, 1, None);
            }
        }
    }

    pub(super) fn stop(&self) {
        self.stopped.store(true, Relaxed);
        self.asked.store(u64::MAX, Release);
    }

    /// The loop of the second thread. It works hard while it waits, so that the sibling is slowed
    /// down.
    pub(super) fn sleep_when_asked(&self, way: &Way, request_cpu: u32) {
        self.sleeper.store(own_task(), Relaxed);
        let mut round = 0;
        loop {
            while self.asked.load(Acquire) == round {
                work();
            }
            if self.stopped.load(Relaxed) {
                return;
            }
            round = self.asked.load(Relaxed);
            self.entered_at.store(ticks(), Relaxed);
            self.entered.store(round, Release);
            let woken = self.sleep(way, request_cpu);
            self.woke_at.store(ticks(), Relaxed);
            self.woke_at_ns.store(monotonic_ns(), Relaxed);
            self.idle_at_ns.store(self.idle_at_ns(way, request_cpu).unwrap_or(0), Relaxed);
            self.woken.store(woken == Woken::Idle, Relaxed);
            self.done.store(round, Release);
            if matches!(way, Way::Nap(Nap::Device(_))) {
                self.answered.store(1, Release);
                futex(&self.answered, libc::FUTEX_WAKE, 1, None);
            }
        }
    }

    fn sleep(&self, way: &Way, request_cpu: u32) -> Woken {
        match way {
            Way::Nap(nap) => nap.nap(request_cpu, self.slot(), &NOBODY_BLOCKS, BOUND_NS),
            Way::Futex => {
                futex(&self.futex, libc::FUTEX_WAIT, 1, Some(&timespec(BOUND_NS)));
                if self.futex.load(Acquire) == 0 { Woken::Idle } else { Woken::Bound }
            }
        }
    }

    /// Returns since when the request lane has been idle. `None` if another task has run there
    /// since the measuring thread left.
    fn idle_at_ns(&self, way: &Way, request_cpu: u32) -> Option<u64> {
        let Way::Nap(Nap::Device(device)) = way else { return None };
        let switch = device.slot(request_cpu)?.snapshot()?;
        let at_once = switch.count == self.left_at_switch.load(Relaxed) + 1;
        switch.at_ns.filter(|_| at_once && switch.running == Running::Idle)
    }

    /// Returns how the last nap ended. The wake-up started at `began`.
    pub(super) fn wake_up(&self, way: &Way, began: u64, ticks_per_ns: f64) -> WakeUp {
        if !self.woken.load(Relaxed) {
            return WakeUp::Otherwise;
        }
        if !matches!(way, Way::Nap(Nap::Device(_))) {
            return WakeUp::After(number(self.woke_at.load(Relaxed).saturating_sub(began)));
        }
        match self.idle_at_ns.load(Relaxed) {
            0 => WakeUp::Overtaken,
            idle_at_ns => {
                let woke_ns = self.woke_at_ns.load(Relaxed).saturating_sub(idle_at_ns);
                WakeUp::After(number(woke_ns) * ticks_per_ns)
            }
        }
    }
}

/// Returns the calling thread in the format of the task map. Valid only in the initial pid
/// namespace.
fn own_task() -> u64 {
    // SAFETY: gettid takes nothing and cannot fail.
    let thread = unsafe { libc::gettid() };
    u64::from(std::process::id()) << 32 | u64::from(thread.unsigned_abs())
}

/// Keeps a core's arithmetic units busy for some tens of cycles.
pub(super) fn work() {
    let mut sums = black_box([1_u64, 2, 3, 4]);
    for step in 0..16 {
        sums = sums.map(|sum| sum.wrapping_add(sum >> 7 ^ step));
    }
    black_box(sums);
}

/// Reads the time stamp counter. It is constant and synchronized across CPUs wherever Linux uses it
/// as its clock.
pub(super) fn ticks() -> u64 {
    // SAFETY: every x86-64 has a time stamp counter, and Linux lets programs read it.
    unsafe { std::arch::x86_64::_rdtsc() }
}

fn timespec(ns: u64) -> libc::timespec {
    let (whole, rest) = (ns / 1_000_000_000, ns % 1_000_000_000);
    libc::timespec { tv_sec: whole.cast_signed(), tv_nsec: rest.cast_signed() }
}

fn futex(word: &AtomicU32, operation: i32, value: u32, timeout: Option<&libc::timespec>) {
    let timeout = timeout.map_or(ptr::null(), ptr::from_ref);
    let operation = operation | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the word and the timeout outlive the call. Callers check the word, so the result of
    // the call is not needed.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, value, timeout) };
}
