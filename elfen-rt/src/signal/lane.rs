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
    pub const ALL: [Self; 3] = [Self::Off, Self::Running, Self::Napping];

    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Running => "running",
            Self::Napping => "napping",
        }
    }

    /// `None` for a word that is no state: the page is another process's.
    pub fn from_word(word: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|&state| state as u64 == word)
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
    /// Instructions per 1000 cycles of the request lane in the low [`IPC_BITS`], above them when that was measured: one
    /// store, so that no reader takes an old time for a new figure. 0 while nobody measures.
    pub ipc: AtomicU64,
    /// Counts up when the request lane idles; threads that block wait for it to change.
    pub wakes: AtomicU64,
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
const _: () = assert!(offset_of!(LaneSlot, ipc) == 112);
const _: () = assert!(offset_of!(LaneSlot, wakes) == 120);
const _: () = assert!(offset_of!(LaneSlot, reaction) == 128);
const _: () = assert!(offset_of!(LaneSlot, wake) == 128 + 4864);

// SAFETY: repr(C), aligned to 128, atomics only; "ELFNLANE" is used nowhere else.
unsafe impl Slot for LaneSlot {
    const MAGIC: [u8; 8] = *b"ELFNLANE";
    const CHANNEL: &'static str = "lane";
}

/// The part of [`LaneSlot::ipc`] that is no time. What it leaves of the time counts milliseconds.
const IPC_BITS: u32 = 20;
const IPC_MAX: u64 = (1 << IPC_BITS) - 1;
/// For how long an IPC counts as that of now. Counters are read at the request lane's own timer interrupts, the rarest of which
/// come every 10 ms.
const IPC_TRUSTED_NS: u64 = 25_000_000;

impl LaneSlot {
    /// The request lane's IPC as of `now_ns`.
    pub fn publish_ipc(&self, ipc_milli: u64, now_ns: u64) {
        self.ipc.store(now_ns & !IPC_MAX | ipc_milli.min(IPC_MAX), Relaxed);
    }

    /// The request lane's IPC, unless that was long ago.
    pub fn ipc_milli(&self, now_ns: u64) -> Option<u64> {
        let word = self.ipc.load(Relaxed);
        let fresh = word != 0 && now_ns.saturating_sub(word & !IPC_MAX) < IPC_TRUSTED_NS;
        fresh.then_some(word & IPC_MAX)
    }

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Memory;
    use crate::signal::page::Page;

    #[test]
    fn an_ipc_is_believed_for_a_while() {
        let memory =
            Memory::create_segment(libc::IPC_PRIVATE, Page::<LaneSlot>::bytes(1), 0o600).unwrap();
        memory.remove_name().unwrap();
        let page: Page<LaneSlot> = Page::format(memory, 1, 0, &[0; 32]).unwrap();
        let slot = page.slot(0).unwrap();
        assert_eq!(slot.ipc_milli(0), None, "nobody measures");
        let now_ns = 5_000_000_000;
        slot.publish_ipc(850, now_ns);
        assert_eq!(slot.ipc_milli(now_ns), Some(850));
        assert_eq!(slot.ipc_milli(now_ns + 20_000_000), Some(850));
        assert_eq!(slot.ipc_milli(now_ns + IPC_TRUSTED_NS), None);
        assert_eq!(slot.ipc_milli(now_ns - 3_000_000), Some(850), "another CPU's clock");
        slot.publish_ipc(u64::MAX, now_ns);
        assert_eq!(slot.ipc_milli(now_ns), Some(IPC_MAX));
    }
}
