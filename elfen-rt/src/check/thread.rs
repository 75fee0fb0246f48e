//! What a check reads: a few words of the thread's own, which point at the
//! word that the kernel writes.
//!
//! The fast path is two comparisons: the request lane's word against 0, and the CPU that the thread
//! runs on, as the kernel keeps it for restartable sequences, against the one that the word was
//! chosen for. So a thread that was moved to another lane notices at its next check. Both words
//! start out so that the first check takes the slow path.
//!
//! The twin is `struct elfen_thread` in `elfen.h`. A program may have several such blocks in a
//! thread, one for each object that has checks: each is chosen for on its own, by whichever
//! slow path the process has.

use core::arch::{asm, global_asm};
use core::mem::{offset_of, size_of};
use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering::Relaxed};

/// How long a thread in a critical section is left alone: others may wait for the lock that it
/// holds. After that its nap is the lesser evil.
pub const CRITICAL_BOUND_NS: u64 = 1_000_000;

/// A thread's block. Its own thread writes it, and that thread's signal handlers;
/// hence atomics, all relaxed.
#[repr(C)]
#[derive(Debug)]
pub struct Thread {
    /// Not 0 while the thread must take the slow path.
    word: AtomicPtr<AtomicU64>,
    /// The CPU that the thread runs on, kept by the kernel.
    cpu: AtomicPtr<AtomicU32>,
    /// The CPU for which `word` was chosen.
    chosen_on: AtomicU32,
    /// Critical sections that the thread is in.
    held: AtomicU32,
    /// When a check first wanted to nap in this critical section; 0 before.
    held_since_ns: AtomicU64,
    /// Until then, in ticks of the time stamp counter, the slow path has said all it has to say.
    quiet_until: AtomicU64,
}

const _: () = assert!(size_of::<Thread>() == 40);
const _: () = assert!(offset_of!(Thread, cpu) == 8);
const _: () = assert!(offset_of!(Thread, chosen_on) == 16);
const _: () = assert!(offset_of!(Thread, held) == 20);
const _: () = assert!(offset_of!(Thread, held_since_ns) == 24);
const _: () = assert!(offset_of!(Thread, quiet_until) == 32);

/// A thread points here while each of its checks must take the slow path, as its first one.
pub(super) static UNKNOWN: AtomicU64 = AtomicU64::new(1);
/// A thread points here while it has no request lane to heed.
static NEVER: AtomicU64 = AtomicU64::new(0);
/// Where the kernel does not keep the CPU, it never seems to change.
static NOWHERE: AtomicU32 = AtomicU32::new(0);

// Stable Rust has no thread-locals without std, so the block is an assembler's: 40 bytes of the
// module's thread-local image, at a distance from the thread pointer that is known when the program
// is loaded (initial-exec).
global_asm!(
    ".pushsection .tdata,\"awT\",@progbits",
    ".balign 8",
    ".globl elfen_thread_block",
    ".hidden elfen_thread_block",
    ".type elfen_thread_block, @object",
    ".size elfen_thread_block, 40",
    "elfen_thread_block:",
    ".quad {unknown}",
    ".quad {nowhere}",
    ".zero 24",
    ".popsection",
    unknown = sym UNKNOWN,
    nowhere = sym NOWHERE,
);

// glibc 2.35 and newer register an area with the kernel for every thread and say how far from
// the thread pointer it is.
// Weak: other C libraries have no such symbol, and the address is 0 then.
global_asm!(".weak __rseq_offset", ".weak __rseq_size");

/// `cpu_id` in `struct rseq`, linux/rseq.h.
const RSEQ_CPU_ID: isize = 4;

/// Where the words of a thread's check lie, as distances from its thread pointer: the same in all
/// threads of a process. For code that writes checks as machine code.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Words {
    /// The pointer to the word that is tested.
    pub word: isize,
    /// The CPU that the thread runs on, and the one that the word was chosen for; `None` if
    /// the kernel does not keep it.
    pub moved: Option<[isize; 2]>,
}

impl Words {
    pub(super) fn own() -> Self {
        let distance =
            |at: usize| at.cast_signed().wrapping_sub(thread_pointer().addr().cast_signed());
        Thread::with_own(|thread| {
            let kept = kept_cpu().map(|(kept, _)| ptr::from_ref(kept).addr());
            let chosen_on = ptr::from_ref(&thread.chosen_on).addr();
            Self {
                word: distance(ptr::from_ref(&thread.word).addr()),
                moved: kept.map(|kept| [distance(kept), distance(chosen_on)]),
            }
        })
    }
}

impl Thread {
    /// Where fields lie, for fast paths in assembly.
    pub const WORD_AT: usize = offset_of!(Self, word);
    pub const CPU_AT: usize = offset_of!(Self, cpu);
    pub const CHOSEN_ON_AT: usize = offset_of!(Self, chosen_on);
    pub const QUIET_UNTIL_AT: usize = offset_of!(Self, quiet_until);

    /// The calling thread's block, for the time that it runs.
    #[inline(always)]
    pub fn with_own<R>(with: impl FnOnce(&Self) -> R) -> R {
        let own: *const Self;
        // SAFETY: reads the thread pointer, which every thread has at %fs:0, and the block's
        // distance from it, which the loader has filled in.
        unsafe {
            asm!(
                "mov {own}, qword ptr fs:[0]",
                "add {own}, qword ptr [rip + elfen_thread_block@GOTTPOFF]",
                own = out(reg) own,
                options(pure, nomem, nostack),
            );
        }
        // SAFETY: the block lives as long as its thread, which is in this function; any other
        // access to it is a signal handler's of the same thread, and every field is atomic.
        with(unsafe { &*own })
    }

    /// The fast path: whether there is a reason to take the slow one.
    #[inline(always)]
    pub fn must_look(&self) -> bool {
        let (word, cpu) = (self.word.load(Relaxed), self.cpu.load(Relaxed));
        // SAFETY: `choose` and the initial image store addresses of words that stay mapped as
        // long as the process runs.
        let word = unsafe { &*word };
        // SAFETY: see above.
        let cpu = unsafe { &*cpu };
        let moved = cpu.load(Relaxed) ^ self.chosen_on.load(Relaxed);
        (word.load(Relaxed) | u64::from(moved)) != 0
    }

    /// The CPU that the thread runs on.
    pub(super) fn here(&self) -> u32 {
        let (kept, cpu) = match kept_cpu() {
            Some((kept, cpu)) => (kept, cpu),
            // SAFETY: takes nothing.
            None => (&NOWHERE, u32::try_from(unsafe { libc::sched_getcpu() }).unwrap_or(u32::MAX)),
        };
        self.cpu.store(ptr::from_ref(kept).cast_mut(), Relaxed);
        cpu
    }

    /// From now on, on this CPU, the fast path tests `word`; without one it finds nothing
    /// until the thread is moved.
    pub(super) fn choose(&self, word: Option<&'static AtomicU64>, cpu: u32) {
        self.word.store(ptr::from_ref(word.unwrap_or(&NEVER)).cast_mut(), Relaxed);
        let kept = !ptr::eq(self.cpu.load(Relaxed), &NOWHERE);
        self.chosen_on.store(if kept { cpu } else { 0 }, Relaxed);
    }

    /// Whether the slow path was left so recently that it would only say the same.
    pub(super) fn is_quiet(&self) -> bool {
        ticks() < self.quiet_until.load(Relaxed)
    }

    /// The slow path need not be asked again for `ticks`.
    pub(super) fn keep_quiet(&self, for_ticks: u64) {
        self.quiet_until.store(ticks().wrapping_add(for_ticks), Relaxed);
    }

    /// Whether this is the outermost critical section.
    pub(super) fn enter_critical(&self) -> bool {
        let held = self.held.load(Relaxed);
        self.held.store(held.saturating_add(1), Relaxed);
        held == 0
    }

    /// Whether this was the outermost one.
    pub(super) fn exit_critical(&self) -> bool {
        let held = self.held.load(Relaxed).saturating_sub(1);
        self.held.store(held, Relaxed);
        if held == 0 {
            self.held_since_ns.store(0, Relaxed);
            self.quiet_until.store(0, Relaxed);
        }
        held == 0
    }

    /// The time stamp counter, which is another at each call.
    pub(super) fn ticks() -> u64 {
        ticks()
    }

    /// Whether the thread is in a critical section that has not delayed its nap
    /// for longer than the bound.
    pub(super) fn is_held(&self, now_ns: u64) -> bool {
        if self.held.load(Relaxed) == 0 {
            return false;
        }
        if self.held_since_ns.load(Relaxed) == 0 {
            self.held_since_ns.store(now_ns, Relaxed);
        }
        now_ns.saturating_sub(self.held_since_ns.load(Relaxed)) < CRITICAL_BOUND_NS
    }
}

/// The word in which the kernel keeps the calling thread's CPU, and what it says. `None` if the C
/// library has not registered one: then a thread that is moved goes on with the word of the lane
/// that it left until that turns busy.
fn kept_cpu() -> Option<(&'static AtomicU32, u32)> {
    let (offset, size): (*const isize, *const u32);
    // SAFETY: reads two entries of this module's global offset table, which
    // the loader has filled in.
    unsafe {
        asm!(
            "mov {offset}, qword ptr [rip + __rseq_offset@GOTPCREL]",
            "mov {size}, qword ptr [rip + __rseq_size@GOTPCREL]",
            offset = out(reg) offset,
            size = out(reg) size,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    // SAFETY: null, or the C library's constant.
    let size = unsafe { size.as_ref() }?;
    // SAFETY: see above.
    let offset = unsafe { offset.as_ref() }?;
    if *size == 0 {
        return None;
    }
    let area = thread_pointer().wrapping_offset(*offset + RSEQ_CPU_ID).cast::<AtomicU32>();
    // SAFETY: the C library has such an area in every thread, at this offset, and it is the
    // thread's as long as it runs.
    let kept = unsafe { &*area };
    let cpu = kept.load(Relaxed);
    // Negative: not registered in this thread.
    (cpu <= i32::MAX.unsigned_abs()).then_some((kept, cpu))
}

fn thread_pointer() -> *const u8 {
    let thread: *const u8;
    // SAFETY: reads the thread pointer, which every thread has at %fs:0.
    unsafe {
        asm!(
            "mov {thread}, qword ptr fs:[0]",
            thread = out(reg) thread,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    thread
}

fn ticks() -> u64 {
    // SAFETY: every x86-64 has a time stamp counter, and Linux lets programs read it.
    unsafe { core::arch::x86_64::_rdtsc() }
}
