//! What batch threads say about their lane: what they do now, what they borrowed, how fast they react.
//!
//! One slot per batch lane. Its writer is whichever batch thread runs on that lane, and a thread can be switched out
//! between two stores; so counts are added in one instruction, and the state is the last one's word.

use core::mem::{offset_of, size_of};
use core::sync::atomic::{AtomicU64, Ordering::*};

use super::histogram::Histogram;
use super::page::Slot;

/// What the batch thread on a lane does. The discriminants are the ABI.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum LaneState {
    /// No batch thread is on the lane, or none has checked yet.
    Off = 0,
    Running = 1,
    Napping = 2,
}

impl LaneState {
    /// `None` for a word that is no state: the page is another process's.
    pub fn from_word(word: u64) -> Option<Self> {
        match word {
            0 => Some(Self::Off),
            1 => Some(Self::Running),
            2 => Some(Self::Napping),
            _ => None,
        }
    }
}

/// What batch threads publish for one batch lane.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct LaneSlot {
    /// A [`LaneState`], and since when.
    pub state: AtomicU64,
    pub state_since_ns: AtomicU64,
    /// This lane's CPU and that of its request lane.
    pub batch_cpu: AtomicU64,
    pub request_cpu: AtomicU64,
    pub naps: AtomicU64,
    /// Time spent running while the request lane idled, running while it did not, and napping.
    pub borrowed_ns: AtomicU64,
    pub overlapped_ns: AtomicU64,
    pub napped_ns: AtomicU64,
    /// What the policy remembers from check to check: `crate::policy::State` as words.
    pub policy_state: [AtomicU64; 4],
    /// Borrowed and overlapped time are counted up to here,
    pub counted_to_ns: AtomicU64,
    /// when the request lane had been busy for so long.
    pub counted_busy_ns: AtomicU64,
    reserved: [AtomicU64; 2],
    /// From the request lane turning busy to the batch thread off its lane, and from idle to back on it.
    pub reaction: Histogram,
    pub wake: Histogram,
}

const _: () = assert!(size_of::<LaneSlot>() == 128 + 2 * 4864);
const _: () = assert!(offset_of!(LaneSlot, state) == 0);
const _: () = assert!(offset_of!(LaneSlot, state_since_ns) == 8);
const _: () = assert!(offset_of!(LaneSlot, batch_cpu) == 16);
const _: () = assert!(offset_of!(LaneSlot, request_cpu) == 24);
const _: () = assert!(offset_of!(LaneSlot, naps) == 32);
const _: () = assert!(offset_of!(LaneSlot, borrowed_ns) == 40);
const _: () = assert!(offset_of!(LaneSlot, overlapped_ns) == 48);
const _: () = assert!(offset_of!(LaneSlot, napped_ns) == 56);
const _: () = assert!(offset_of!(LaneSlot, policy_state) == 64);
const _: () = assert!(offset_of!(LaneSlot, counted_to_ns) == 96);
const _: () = assert!(offset_of!(LaneSlot, counted_busy_ns) == 104);
const _: () = assert!(offset_of!(LaneSlot, reaction) == 128);
const _: () = assert!(offset_of!(LaneSlot, wake) == 128 + 4864);

// SAFETY: repr(C), aligned to 128, atomics only; "ELFNLANE" is used nowhere else.
unsafe impl Slot for LaneSlot {
    const MAGIC: [u8; 8] = *b"ELFNLANE";
    const CHANNEL: &'static str = "lane";
}

impl LaneSlot {
    /// Says which lanes this slot is about, before any batch thread runs.
    pub fn assign(&self, batch_cpu: u32, request_cpu: u32) {
        self.batch_cpu.store(u64::from(batch_cpu), Relaxed);
        self.request_cpu.store(u64::from(request_cpu), Relaxed);
    }

    /// The batch thread runs, naps or leaves from `now_ns` on; the time since the last change is counted by what it was.
    pub fn enter(&self, state: LaneState, now_ns: u64) {
        // Swapped, not stored: of two threads that change places here, each span is counted by one alone.
        let since_ns = self.state_since_ns.swap(now_ns, Relaxed);
        let previous = self.state.swap(state as u64, Relaxed);
        if previous == LaneState::Napping as u64 {
            self.napped_ns.fetch_add(now_ns.saturating_sub(since_ns), Relaxed);
        }
        if state == LaneState::Napping && previous != LaneState::Napping as u64 {
            self.naps.fetch_add(1, Relaxed);
        }
    }

    /// A stretch of running next to an idle request lane.
    pub fn add_borrowed(&self, ns: u64) {
        self.borrowed_ns.fetch_add(ns, Relaxed);
    }

    /// A stretch of running next to a busy request lane.
    pub fn add_overlapped(&self, ns: u64) {
        self.overlapped_ns.fetch_add(ns, Relaxed);
    }

    /// The state and since when; `None` if the page holds no state.
    pub fn state(&self) -> Option<(LaneState, u64)> {
        let state = LaneState::from_word(self.state.load(Relaxed))?;
        Some((state, self.state_since_ns.load(Relaxed)))
    }
}
