//! The lane page: a batch lane's state, its borrowed time and its reactions, as its guard and its
//! batch threads publish them.
//!
//! Each batch lane has one slot. The guard and batch threads write it alternately, and a thread can
//! be switched out between two stores. So counts are added in one instruction, and the last writer
//! sets the state.
//!
//! Every process of the batch can write the slot, so a guard's decisions never depend on it.
//! [`LaneInputs`] exist twice: in the slot for threads with checks, and in memory of the guard's
//! process for the guard.

use core::mem::{offset_of, size_of};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::*, fence};

use super::histogram::Histogram;
use super::page::Slot;
use crate::policy::State;

/// The state of a batch lane. The discriminants are part of the ABI.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum LaneState {
    /// No batch thread is on the lane, or none has checked yet.
    Off = 0,
    Running = 1,
    /// A batch thread naps in a check.
    Napping = 2,
    /// The guard occupies the lane and naps there.
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

    /// `None` for an invalid word: other processes write the page.
    pub fn from_word(word: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|&state| state as u64 == word)
    }
}

/// The inputs of a verdict apart from the request lane's own signals.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct LaneInputs {
    /// The policy's state between checks: [`State`] as words.
    pub policy_state: [AtomicU64; 4],
    /// Which of the two CPUs are offline: [`REQUEST_OFFLINE`], [`BATCH_OFFLINE`].
    pub hotplug: AtomicU64,
    /// The request lane's instructions per 1000 cycles, as the guard last measured them over the
    /// window from `ipc_since_ns` to `ipc_until_ns`. `ipc_since_ns` is 0 while the other two words
    /// change, and where no guard measures.
    pub ipc_milli: AtomicU64,
    pub ipc_since_ns: AtomicU64,
    pub ipc_until_ns: AtomicU64,
}

const _: () = assert!(size_of::<LaneInputs>() == 64);

/// One batch lane.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct LaneSlot {
    /// A [`LaneState`].
    pub state: AtomicU64,
    /// When the lane entered that state.
    pub state_since_ns: AtomicU64,
    pub batch_cpu: AtomicU64,
    pub request_cpu: AtomicU64,
    pub naps: AtomicU64,
    /// How long the batch ran while the request lane idled.
    pub borrowed_ns: AtomicU64,
    /// How long the batch ran while the request lane was busy.
    pub overlapped_ns: AtomicU64,
    pub napped_ns: AtomicU64,
    /// The inputs for threads with checks.
    pub inputs: LaneInputs,
    /// How much of the kernel's account is already in `borrowed_ns` and `overlapped_ns`.
    pub counted_ran_ns: AtomicU64,
    pub counted_shared_ns: AtomicU64,
    /// A futex that counts up when the request lane idles. Threads that block wait for a change.
    pub wakes: AtomicU32,
    reserved_wakes: AtomicU32,
    /// Not 0 while a batch thread on this lane is in a critical section. Each section has another
    /// value.
    pub critical: AtomicU64,
    /// The claim of the kernel's account of this lane for this run; 0 where the kernel keeps none.
    pub account_claim: AtomicU64,
    /// The index of that account.
    pub account_index: AtomicU64,
    /// How batch threads with checks nap here: a [`crate::nap::NapKind`]; 0 without such threads.
    pub check_nap: AtomicU64,
    /// How the guard naps here; 0 before it has begun.
    pub guard_nap: AtomicU64,
    /// The guard's doorbell for checks that are patched into the program: [`AWAKE`], [`ASLEEP`] or
    /// [`HOLDS`]. A check that finds the request lane busy sets it to 0 and acts on the value that
    /// it replaced. The lower half is a futex.
    pub doorbell: AtomicU64,
    /// 1 while the guard probes which site checks. A patched check stores the time and its address
    /// below, and sets this to 0.
    pub probe: AtomicU64,
    pub answer_tsc: AtomicU64,
    pub answer_address: AtomicU64,
    reserved: [AtomicU64; 4],

    /// The time from the request lane turning busy to the batch thread leaving its lane.
    pub reaction: Histogram,
    /// The time from the request lane turning idle to the batch thread running again.
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
const _: () = assert!(offset_of!(LaneSlot, doorbell) == 192);
const _: () = assert!(offset_of!(LaneSlot, probe) == 200);
const _: () = assert!(offset_of!(LaneSlot, answer_tsc) == 208);
const _: () = assert!(offset_of!(LaneSlot, answer_address) == 216);
const _: () = assert!(offset_of!(LaneSlot, reaction) == 256);
const _: () = assert!(offset_of!(LaneSlot, wake) == 256 + 4864);

// SAFETY: repr(C), aligned to 128, atomics only; "ELFNLANE" is used nowhere else.
unsafe impl Slot for LaneSlot {
    const MAGIC: [u8; 8] = *b"ELFNLANE";
    const CHANNEL: &'static str = "lane";
}

/// A bit of [`LaneInputs::hotplug`]: the request lane's CPU is offline, so it serves no requests.
pub const REQUEST_OFFLINE: u64 = 1;
/// A bit of [`LaneInputs::hotplug`]: the batch lane's CPU is offline, so no batch runs there.
pub const BATCH_OFFLINE: u64 = 2;

/// A value of [`LaneSlot::doorbell`]: the guard polls by itself, or is missing.
pub const AWAKE: u64 = 0;
/// A value of [`LaneSlot::doorbell`]: the guard sleeps, and a check may wake it.
pub const ASLEEP: u64 = 1;
/// A value of [`LaneSlot::doorbell`]: the guard occupies the lane. A thread that reaches a check
/// there was let in by the scheduler, and may yield so that the scheduler chooses again.
pub const HOLDS: u64 = 2;

/// How long an IPC is considered current. Counters are read at the request lane's timer interrupts,
/// which come every 10 ms or more often.
const IPC_TRUSTED_NS: u64 = 25_000_000;

impl LaneInputs {
    /// The policy's state after the last check.
    pub fn state(&self) -> State {
        self.policy_state.each_ref().map(|word| word.load(Relaxed)).into()
    }

    /// Stores the policy's state word by word. A thread that is switched out between two stores
    /// leaves a mixture, which is a valid state too.
    pub fn store_state(&self, state: State) {
        let words: [u64; 4] = state.into();
        for (stored, word) in self.policy_state.iter().zip(words) {
            stored.store(word, Relaxed);
        }
    }

    /// Publishes the request lane's IPC over a window. The lane's guard is the only writer.
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

    /// The recent IPC of the request that started at `started_ns`. `None` if the window began
    /// before that request.
    pub fn ipc_milli(&self, started_ns: u64, now_ns: u64) -> Option<u64> {
        let since_ns = self.ipc_since_ns.load(Acquire);
        let (ipc_milli, until_ns) = (self.ipc_milli.load(Relaxed), self.ipc_until_ns.load(Relaxed));
        // Acquire fence: orders the words before the second load of `ipc_since_ns`; pairs with the
        // release fence in `publish_ipc`.
        fence(Acquire);
        let whole = since_ns != 0 && self.ipc_since_ns.load(Relaxed) == since_ns;
        let own = started_ns != 0 && since_ns >= started_ns;
        let fresh = now_ns.saturating_sub(until_ns) < IPC_TRUSTED_NS;
        (whole && own && fresh).then_some(ipc_milli)
    }
}

impl LaneSlot {
    /// Sets the slot's two CPUs, before any batch thread runs.
    pub fn assign(&self, batch_cpu: u32, request_cpu: u32) {
        self.batch_cpu.store(u64::from(batch_cpu), Relaxed);
        self.request_cpu.store(u64::from(request_cpu), Relaxed);
    }

    /// Sets the lane's state from `now_ns` on. The time since the last change counts for the state
    /// that ends.
    pub fn enter(&self, state: LaneState, now_ns: u64) {
        // Swapped and not stored, so that two threads that alternate here count each interval once.
        let since_ns = self.state_since_ns.swap(now_ns, Relaxed);
        let previous = self.state.swap(state as u64, Relaxed);
        if LaneState::naps(previous) {
            self.napped_ns.fetch_add(now_ns.saturating_sub(since_ns), Relaxed);
        }
        if LaneState::naps(state as u64) && !LaneState::naps(previous) {
            self.naps.fetch_add(1, Relaxed);
        }
    }

    /// Whether the kernel counts the batch's time here. Otherwise borrowed and overlapped time are
    /// unknown.
    pub fn is_counted(&self) -> bool {
        self.account_claim.load(Relaxed) != 0
    }

    /// Adds time in which the batch ran next to an idle request lane.
    pub fn add_borrowed(&self, ns: u64) {
        self.borrowed_ns.fetch_add(ns, Relaxed);
    }

    /// Adds time in which the batch ran next to a busy request lane.
    pub fn add_overlapped(&self, ns: u64) {
        self.overlapped_ns.fetch_add(ns, Relaxed);
    }

    /// The state and when it was entered; `None` if the word is invalid.
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
    fn an_ipc_counts_for_a_while_and_only_for_the_request_it_was_measured_in() {
        const MS: u64 = 1_000_000;
        let slot = LaneInputs::default();
        assert_eq!(slot.ipc_milli(1, 1), None, "not measured");
        slot.publish_ipc(850, 100 * MS, 110 * MS);
        assert_eq!(slot.ipc_milli(99 * MS, 110 * MS), Some(850));
        assert_eq!(slot.ipc_milli(99 * MS, 130 * MS), Some(850));
        assert_eq!(slot.ipc_milli(99 * MS, 135 * MS), None, "too old");
        assert_eq!(
            slot.ipc_milli(100 * MS + 1, 110 * MS),
            None,
            "the window began in the previous request"
        );
        assert_eq!(slot.ipc_milli(0, 110 * MS), None, "the request's start is unknown");
        assert_eq!(slot.ipc_milli(99 * MS, 107 * MS), Some(850), "another CPU's clock");
    }

    #[test]
    fn a_nap_that_the_guard_takes_over_is_counted_once() {
        let page = page();
        let slot = page.slot(0).unwrap();
        slot.enter(LaneState::Running, 10);
        slot.enter(LaneState::Napping, 20);
        slot.enter(LaneState::Held, 30);
        slot.enter(LaneState::Running, 50);
        assert_eq!((slot.naps.load(Relaxed), slot.napped_ns.load(Relaxed)), (1, 30));
    }
}
