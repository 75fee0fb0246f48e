//! The thread page: each thread publishes its current function and tag, a value, and its counts.
//! `elfen shim` samples them while the threads run.
//!
//! Each thread has one slot. The thread claims it and is its only writer. An observer reads only
//! the slot's first cache line, unless it samples rates. The counts lie in the second line, because
//! a thread reads a counter before it writes it, and would have to wait for a line that the
//! observer has just read.
//!
//! The function and the tag are the lower halves of addresses (of code, and of a name). So a thread
//! that enters a function stores four bytes and looks up nothing. The writing half is
//! [`crate::tag`], in C `elfen_tag.h`.

use core::ffi::c_int;
use core::mem::{offset_of, size_of};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

use super::page::{Page, Slot};

/// Slots of a page.
pub const THREADS: u32 = 1024;

/// The lines that a thread writes while it works.
#[repr(C)]
#[derive(Debug)]
pub struct ThreadWords {
    /// Lower half of a code address: the function's at its entry, and the return address after a
    /// return. 0 for none.
    pub function: AtomicU32,
    /// Lower half of the address of a name, NUL-terminated. 0 for none.
    pub tag: AtomicU32,
    pub value: AtomicU64,
    reserved: [AtomicU64; 6],
    /// How many functions the thread has entered, where that is counted.
    pub calls: AtomicU64,
    pub instructions: AtomicU64,
    pub cycles: AtomicU64,
    reserved_counts: [AtomicU64; 5],
}

impl ThreadWords {
    /// The words of a thread that has published nothing yet.
    pub const fn empty() -> Self {
        Self {
            function: AtomicU32::new(0),
            tag: AtomicU32::new(0),
            value: AtomicU64::new(0),
            reserved: [const { AtomicU64::new(0) }; 6],
            calls: AtomicU64::new(0),
            instructions: AtomicU64::new(0),
            cycles: AtomicU64::new(0),
            reserved_counts: [const { AtomicU64::new(0) }; 5],
        }
    }
}

const _: () = assert!(size_of::<ThreadWords>() == 128);
const _: () = assert!(offset_of!(ThreadWords, function) == 0);
const _: () = assert!(offset_of!(ThreadWords, tag) == 4);
const _: () = assert!(offset_of!(ThreadWords, value) == 8);
const _: () = assert!(offset_of!(ThreadWords, calls) == 64);
const _: () = assert!(offset_of!(ThreadWords, instructions) == 72);
const _: () = assert!(offset_of!(ThreadWords, cycles) == 80);

/// One thread.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct ThreadSlot {
    pub words: ThreadWords,
    /// `tgid << 32 | tid` of the thread that writes the slot; 0 for none.
    pub thread: AtomicU64,
    /// In slot 0: how often a slot of the page was claimed.
    pub claims: AtomicU64,
    /// In slot 0: how many threads found no slot. No observer reads their words.
    pub refused: AtomicU64,
    /// In slot 0: how many function entries are patched to publish their function.
    pub entries: AtomicU64,
    /// In slot 0: how many entries were not patched, because the lower half of their address
    /// already means another function.
    pub ambiguous: AtomicU64,
    /// In slot 0: how many files of the program have functions that also publish their returns.
    pub returns: AtomicU64,
    /// In slot 0: how many entries publish their thread's instructions and cycles.
    pub counting: AtomicU64,
    /// In slot 0: how many threads should count instructions and cycles, but have no counters.
    pub uncounted: AtomicU64,
    reserved: [AtomicU64; 8],
}

const _: () = assert!(size_of::<ThreadSlot>() == 256);
const _: () = assert!(offset_of!(ThreadSlot, thread) == 128);
const _: () = assert!(offset_of!(ThreadSlot, claims) == 136);
const _: () = assert!(offset_of!(ThreadSlot, refused) == 144);
const _: () = assert!(offset_of!(ThreadSlot, entries) == 152);
const _: () = assert!(offset_of!(ThreadSlot, ambiguous) == 160);
const _: () = assert!(offset_of!(ThreadSlot, returns) == 168);
const _: () = assert!(offset_of!(ThreadSlot, counting) == 176);
const _: () = assert!(offset_of!(ThreadSlot, uncounted) == 184);

// SAFETY: repr(C), aligned to 128, atomics only; "ELFNTHRD" is used nowhere else.
unsafe impl Slot for ThreadSlot {
    const MAGIC: [u8; 8] = *b"ELFNTHRD";
    const CHANNEL: &'static str = "thread";
}

/// The word by which slots name a thread, with ids of the thread's own pid namespace.
pub fn thread_word(process: u32, thread: u32) -> u64 {
    u64::from(process) << 32 | u64::from(thread)
}

/// The process and the thread of such a word.
#[expect(clippy::cast_possible_truncation, reason = "the two halves of the word")]
pub fn of_thread_word(word: u64) -> (u32, u32) {
    ((word >> 32) as u32, word as u32)
}

/// Claims a slot for a thread: its own, a free slot, or the slot of a thread that has ended. `None`
/// if there is none of these; then the page counts the thread as refused.
pub fn claim(page: &Page<ThreadSlot>, thread: u64) -> Option<&ThreadSlot> {
    claim_of(page, thread, has_ended)
}

fn claim_of(
    page: &Page<ThreadSlot>,
    thread: u64,
    has_ended: impl Fn(u64) -> bool,
) -> Option<&ThreadSlot> {
    // Relaxed throughout: each word of a slot is read on its own.
    if let Some(own) = page.slots().find(|slot| slot.thread.load(Relaxed) == thread) {
        return Some(own);
    }
    let take = |slot: &&ThreadSlot, from: u64| {
        slot.thread.compare_exchange(from, thread, Relaxed, Relaxed).is_ok()
    };
    let taken = page.slots().find(|slot| take(slot, 0)).or_else(|| {
        page.slots().find(|slot| {
            let holder = slot.thread.load(Relaxed);
            has_ended(holder) && take(slot, holder)
        })
    });
    let first = page.slot(0)?;
    let Some(slot) = taken else {
        first.refused.fetch_add(1, Relaxed);
        return None;
    };
    let words = &slot.words;
    words.function.store(0, Relaxed);
    words.tag.store(0, Relaxed);
    for word in [&words.value, &words.calls, &words.instructions, &words.cycles] {
        word.store(0, Relaxed);
    }
    first.claims.fetch_add(1, Relaxed);
    Some(slot)
}

/// Whether a thread has ended. If another thread has its id by now, the slot stays taken.
fn has_ended(thread: u64) -> bool {
    let (process, thread) = of_thread_word(thread);
    // SAFETY: signal 0 sends nothing; tgkill only looks the ids up.
    let found = unsafe { libc::syscall(libc::SYS_tgkill, process, thread, 0 as c_int) } == 0;
    !found && crate::process::errno() == libc::ESRCH
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Memory;

    fn page(slots: u32) -> Page<ThreadSlot> {
        let bytes = Page::<ThreadSlot>::bytes(slots);
        let memory = Memory::create_segment(libc::IPC_PRIVATE, bytes, 0o600).unwrap();
        memory.remove_name().unwrap();
        Page::format(memory, slots, 0, &[0; 32]).unwrap()
    }

    /// Goal: a thread gets the same slot each time, slots of ended threads are reused, and threads
    /// without a slot are counted. Method: three threads on two slots.
    #[test]
    fn slots_are_claimed_once() {
        let page = page(2);
        let at = |thread, ended: u64| {
            let slot = claim_of(&page, thread, |held| held == ended);
            slot.map(|slot| core::ptr::from_ref(slot).addr())
        };
        let (first, second) = (at(11, 0).unwrap(), at(12, 0).unwrap());
        assert!(first != second && at(11, 0) == Some(first));
        assert_eq!(at(13, 0), None);
        page.slot(1).unwrap().words.value.store(7, Relaxed);
        assert_eq!(at(13, 12), Some(second));
        let (slot, first) = (page.slot(1).unwrap(), page.slot(0).unwrap());
        assert_eq!(slot.words.value.load(Relaxed), 0, "cleared of the previous thread's value");
        assert_eq!((first.claims.load(Relaxed), first.refused.load(Relaxed)), (3, 1));
    }

    #[test]
    fn threads_that_run_have_not_ended() {
        let own = std::process::id();
        // SAFETY: takes nothing.
        let thread = unsafe { libc::gettid() };
        assert!(!has_ended(thread_word(own, thread.unsigned_abs())));
        assert!(!has_ended(thread_word(1, 1)), "perhaps a process of another user");
        let ended = std::thread::spawn(|| {
            // SAFETY: takes nothing.
            unsafe { libc::gettid() }
        });
        let ended = ended.join().unwrap().unsigned_abs();
        while !has_ended(thread_word(own, ended)) {
            std::thread::yield_now(); // The kernel drops its id a moment after the join.
        }
        assert_eq!(of_thread_word(thread_word(3, 4)), (3, 4));
    }
}
