//! What a batch lane's guard and batch threads publish about it: its state, what was borrowed, how
//! fast they react.
//!
//! One slot for each batch lane. Guard and batch threads take turns in writing it, and a thread can
//! be switched out between two stores. So counts are added in one instruction, and the last writer
//! sets the state.
//!
//! Every process of the batch can write the slot, so a guard reads nothing from it that decides
//! whether the batch runs. [`LaneInputs`] exist twice: in the slot for threads with checks, and in
//! memory of the guard's process, which the guard decides by.

use core::mem::{offset_of, size_of};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::*, fence};

use super::histogram::Histogram;
use super::page::Slot;
use crate::policy::State;

/// What the batch thread on a lane does. The discriminants are the ABI.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum LaneState {
    /// No batch thread is on the lane, or none has checked yet.
    Off = 0,
    Running = 1,
    /// A batch thread naps, by itself.
    Napping = 2,
    /// The guard has the lane, and naps there in the batch's stead.
    Held = 3,
}

impl LaneState {
    pub const ALL: [Self; 4] = [Self::Off, Self::Running, Self::Napping, Self::Held];

    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Running => "running",
            Self::Napping => "napping",
            Self::Held => "held",
        }
    }

    fn naps(word: u64) -> bool {
        matches!(Self::from_word(word), Some(Self::Napping | Self::Held))
    }

    /// `None` for a word that is no state: the page is another process's.
    pub fn from_word(word: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|&state| state as u64 == word)
    }
}

/// What a verdict depends on besides the request lane's own signals.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct LaneInputs {
    /// What the policy remembers from check to check: [`State`] as words.
    pub policy_state: [AtomicU64; 4],
    /// Which of the two CPUs are offline: [`REQUEST_OFFLINE`], [`BATCH_OFFLINE`].
    pub hotplug: AtomicU64,
    /// Instructions per 1000 cycles of the request lane, as the guard last measured them, over a
    /// window that began and ended at these times; `ipc_since_ns` is 0 while the others change, and
    /// where no guard measures.
    pub ipc_milli: AtomicU64,
    pub ipc_since_ns: AtomicU64,
    pub ipc_until_ns: AtomicU64,
}

const _: () = assert!(size_of::<LaneInputs>() == 64);

/// What is published of one batch lane.
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
    /// What threads with checks decide by.
    pub inputs: LaneInputs,
    /// How far the kernel's account of this lane has gone into borrowed and overlapped time.
    pub counted_ran_ns: AtomicU64,
    pub counted_shared_ns: AtomicU64,
    /// Counts up when the request lane idles; threads that block wait for it to change. A futex.
    pub wakes: AtomicU32,
    reserved_wakes: AtomicU32,
    /// Not 0 while a batch thread on this lane is in a critical section; another value for each.
    pub critical: AtomicU64,
    /// The kernel's account of this lane for this run: its claim, and its index; 0
    /// where the kernel keeps none.
    pub account_claim: AtomicU64,
    pub account_index: AtomicU64,
    /// How batch threads that check nap here: a [`crate::nap::Kind`]; 0 if none has.
    pub check_nap: AtomicU64,
    /// How the guard naps here; 0 before it has begun.
    pub guard_nap: AtomicU64,
    /// For checks that the guard has written into the program: [`AWAKE`], [`ASLEEP`] or [`HOLDS`].
    /// A check that finds the request lane busy makes it 0, and does what it finds. The lower half
    /// is a futex.
    pub bell: AtomicU64,
    /// 1 while the guard asks who checks; a check notes the time and its place, and makes that 0.
    pub drill: AtomicU64,
    pub answer_tsc: AtomicU64,
    pub answer_place: AtomicU64,
    reserved: [AtomicU64; 4],

    /// From the request lane turning busy to the batch thread off its lane,
    /// and from idle to back on it.
    pub reaction: Histogram,
    pub wake: Histogram,
}

const _: () = assert!(size_of::<LaneSlot>() == 256 + 2 * 4864);
const _: () = assert!(offset_of!(LaneSlot, state) == 0);
const _: () = assert!(offset_of!(LaneSlot, state_since_ns) == 8);
const _: () = assert!(offset_of!(LaneSlot, batch_cpu) == 16);
const _: () = assert!(offset_of!(LaneSlot, request_cpu) == 24);
const _: () = assert!(offset_of!(LaneSlot, naps) == 32);
const _: () = assert!(offset_of!(LaneSlot, borrowed_ns) == 40);
const _: () = assert!(offset_of!(LaneSlot, overlapped_ns) == 48);
const _: () = assert!(offset_of!(LaneSlot, napped_ns) == 56);
const _: () = assert!(offset_of!(LaneSlot, inputs.policy_state) == 64);
const _: () = assert!(offset_of!(LaneSlot, inputs.hotplug) == 96);
const _: () = assert!(offset_of!(LaneSlot, inputs.ipc_milli) == 104);
const _: () = assert!(offset_of!(LaneSlot, inputs.ipc_since_ns) == 112);
const _: () = assert!(offset_of!(LaneSlot, inputs.ipc_until_ns) == 120);
const _: () = assert!(offset_of!(LaneSlot, counted_ran_ns) == 128);
const _: () = assert!(offset_of!(LaneSlot, counted_shared_ns) == 136);
const _: () = assert!(offset_of!(LaneSlot, wakes) == 144);
const _: () = assert!(offset_of!(LaneSlot, critical) == 152);
const _: () = assert!(offset_of!(LaneSlot, account_claim) == 160);
const _: () = assert!(offset_of!(LaneSlot, account_index) == 168);
const _: () = assert!(offset_of!(LaneSlot, check_nap) == 176);
const _: () = assert!(offset_of!(LaneSlot, guard_nap) == 184);
const _: () = assert!(offset_of!(LaneSlot, bell) == 192);
const _: () = assert!(offset_of!(LaneSlot, drill) == 200);
const _: () = assert!(offset_of!(LaneSlot, answer_tsc) == 208);
const _: () = assert!(offset_of!(LaneSlot, answer_place) == 216);
const _: () = assert!(offset_of!(LaneSlot, reaction) == 256);
const _: () = assert!(offset_of!(LaneSlot, wake) == 256 + 4864);

// SAFETY: repr(C), aligned to 128, atomics only; "ELFNLANE" is used nowhere else.
unsafe impl Slot for LaneSlot {
    const MAGIC: [u8; 8] = *b"ELFNLANE";
    const CHANNEL: &'static str = "lane";
}

/// Bits of [`LaneInputs::hotplug`]: a request lane that is gone serves nobody, and a batch lane
/// that is gone lends nothing.
pub const REQUEST_OFFLINE: u64 = 1;
pub const BATCH_OFFLINE: u64 = 2;

/// Of [`LaneSlot::bell`]: the guard will look by itself, or there is none.
pub const AWAKE: u64 = 0;
/// The guard sleeps, and may be woken.
pub const ASLEEP: u64 = 1;
/// The guard has the lane. Who comes to a check there was let in by the scheduler, and may ask it
/// to choose anew.
pub const HOLDS: u64 = 2;

/// For how long an IPC counts as that of now. Counters are read at the request lane's own timer
/// interrupts, the rarest of which come every 10 ms.
const IPC_TRUSTED_NS: u64 = 25_000_000;

impl LaneInputs {
    /// The state that the policy left.
    pub fn state(&self) -> State {
        self.policy_state.each_ref().map(|word| word.load(Relaxed)).into()
    }

    /// Word by word: a thread that is switched out between two leaves a mix, and any words are a
    /// state.
    pub fn remember(&self, state: State) {
        let words: [u64; 4] = state.into();
        for (place, word) in self.policy_state.iter().zip(words) {
            place.store(word, Relaxed);
        }
    }

    /// The request lane's IPC over a window. One writer: the lane's guard.
    pub fn publish_ipc(&self, ipc_milli: u64, since_ns: u64, until_ns: u64) {
        self.ipc_since_ns.store(0, Relaxed);
        // Release fence: orders the 0 before the words; pairs with the
        // acquire fence in `ipc_milli`.
        fence(Release);
        self.ipc_milli.store(ipc_milli, Relaxed);
        self.ipc_until_ns.store(until_ns, Relaxed);
        // Release: orders the words before this; pairs with the acquire load in `ipc_milli`.
        self.ipc_since_ns.store(since_ns, Release);
    }

    /// The IPC of the request that started at `started_ns`, as it was lately: none that was
    /// measured, in part or whole, in the requests before it.
    pub fn ipc_milli(&self, started_ns: u64, now_ns: u64) -> Option<u64> {
        let since_ns = self.ipc_since_ns.load(Acquire);
        let (ipc_milli, until_ns) = (self.ipc_milli.load(Relaxed), self.ipc_until_ns.load(Relaxed));
        // Acquire fence: orders the words before the second look.
        fence(Acquire);
        let whole = since_ns != 0 && self.ipc_since_ns.load(Relaxed) == since_ns;
        let own = started_ns != 0 && since_ns >= started_ns;
        let fresh = now_ns.saturating_sub(until_ns) < IPC_TRUSTED_NS;
        (whole && own && fresh).then_some(ipc_milli)
    }
}

impl LaneSlot {
    /// Says which lanes this slot is about, before any batch thread runs.
    pub fn assign(&self, batch_cpu: u32, request_cpu: u32) {
        self.batch_cpu.store(u64::from(batch_cpu), Relaxed);
        self.request_cpu.store(u64::from(request_cpu), Relaxed);
    }

    /// The lane is run on, napped on or left from `now_ns` on; the time since the last change
    /// counts for the state that ends.
    pub fn enter(&self, state: LaneState, now_ns: u64) {
        // Swapped, not stored: of two threads that change places here, each
        // span is counted by one alone.
        let since_ns = self.state_since_ns.swap(now_ns, Relaxed);
        let previous = self.state.swap(state as u64, Relaxed);
        if LaneState::naps(previous) {
            self.napped_ns.fetch_add(now_ns.saturating_sub(since_ns), Relaxed);
        }
        if LaneState::naps(state as u64) && !LaneState::naps(previous) {
            self.naps.fetch_add(1, Relaxed);
        }
    }

    /// Whether the kernel counts what the batch runs here: else it is unknown what it borrowed and
    /// overlapped.
    pub fn is_counted(&self) -> bool {
        self.account_claim.load(Relaxed) != 0
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

    fn page() -> Page<LaneSlot> {
        let memory =
            Memory::create_segment(libc::IPC_PRIVATE, Page::<LaneSlot>::bytes(1), 0o600).unwrap();
        memory.remove_name().unwrap();
        Page::format(memory, 1, 0, &[0; 32]).unwrap()
    }

    #[test]
    fn an_ipc_is_that_of_the_request_it_was_measured_in_and_believed_for_a_while() {
        const MS: u64 = 1_000_000;
        let slot = LaneInputs::default();
        assert_eq!(slot.ipc_milli(1, 1), None, "nobody measures");
        slot.publish_ipc(850, 100 * MS, 110 * MS);
        assert_eq!(slot.ipc_milli(99 * MS, 110 * MS), Some(850));
        assert_eq!(slot.ipc_milli(99 * MS, 130 * MS), Some(850));
        assert_eq!(slot.ipc_milli(99 * MS, 135 * MS), None, "too old");
        assert_eq!(slot.ipc_milli(100 * MS + 1, 110 * MS), None, "it began in the request before");
        assert_eq!(slot.ipc_milli(0, 110 * MS), None, "nobody says when the request started");
        assert_eq!(slot.ipc_milli(99 * MS, 107 * MS), Some(850), "another CPU's clock");
    }

    #[test]
    fn a_nap_that_changes_hands_is_one_nap() {
        let page = page();
        let slot = page.slot(0).unwrap();
        slot.enter(LaneState::Running, 10);
        slot.enter(LaneState::Napping, 20);
        slot.enter(LaneState::Held, 30);
        slot.enter(LaneState::Running, 50);
        assert_eq!((slot.naps.load(Relaxed), slot.napped_ns.load(Relaxed)), (1, 30));
    }
}
