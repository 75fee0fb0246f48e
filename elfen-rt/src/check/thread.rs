//! The thread's block: a few words of each thread, which point at the word that the kernel writes.
//!
//! The fast path of a check makes two comparisons. It compares the request lane's word with 0, and
//! the CPU that the thread runs on with the CPU that the word was chosen for. The kernel maintains
//! the thread's CPU for restartable sequences. So a thread that was moved to another lane notices
//! it at its next check. The initial words make the first check take the slow path.
//!
//! `struct elfen_thread` in `elfen.h` is the C version of this block. A thread may have several
//! blocks, one for each object file with checks. Each block has its own choice of words; all use
//! the one slow path of the process.

use core::arch::{asm, global_asm};
use core::mem::{offset_of, size_of};
use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering::Relaxed};

/// How long a thread in a critical section is not asked to nap, because other threads may wait for
/// its lock. After that, delaying the request longer would be worse.
pub const CRITICAL_BOUND_NS: u64 = 1_000_000;

/// A thread's block. Only its thread and the thread's signal handlers access it, so its words are
/// atomics, and all accesses are relaxed.
#[repr(C)]
#[derive(Debug)]
pub struct Thread {
    /// Points at a word that is not 0 while the thread must take the slow path.
    word: AtomicPtr<AtomicU64>,
    /// Points at the CPU that the thread runs on, which the kernel maintains.
    cpu: AtomicPtr<AtomicU32>,
    /// The CPU for which `word` was chosen.
    chosen_on: AtomicU32,
    /// How many nested critical sections the thread is in.
    critical_depth: AtomicU32,
    /// When a check first wanted to nap in this critical section; 0 before.
    critical_since_ns: AtomicU64,
    /// Until this tick of the time stamp counter, the slow path returns at once.
    quiet_until: AtomicU64,
}

const _: () = assert!(size_of::<Thread>() == 40);
const _: () = assert!(offset_of!(Thread, cpu) == 8);
const _: () = assert!(offset_of!(Thread, chosen_on) == 16);
const _: () = assert!(offset_of!(Thread, critical_depth) == 20);
const _: () = assert!(offset_of!(Thread, critical_since_ns) == 24);
const _: () = assert!(offset_of!(Thread, quiet_until) == 32);

/// A thread points here while each of its checks must take the slow path, such as its first check.
pub(super) static UNKNOWN: AtomicU64 = AtomicU64::new(1);
/// A thread points here while it has no request lane.
static NEVER: AtomicU64 = AtomicU64::new(0);
/// A thread points here where the kernel does not maintain its CPU: the CPU never seems to change.
static NOWHERE: AtomicU32 = AtomicU32::new(0);

// Stable Rust has no thread-locals without std, so the assembler defines the block: 40 bytes of the
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

// glibc 2.35 and newer register an rseq area with the kernel for every thread, and export the
// area's distance from the thread pointer. The symbols are weak: other C libraries lack them, and
// then their addresses are 0.
global_asm!(".weak __rseq_offset", ".weak __rseq_size");

/// `cpu_id` in `struct rseq`, linux/rseq.h.
const RSEQ_CPU_ID: isize = 4;

/// Where the words of a thread's check lie, as distances from its thread pointer. The distances are
/// the same in all threads of a process. For code that generates checks as machine code.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Words {
    /// The pointer to the word that is tested.
    pub word: isize,
    /// The CPU that the thread runs on, and the CPU that the word was chosen for; `None` if the
    /// kernel does not maintain the thread's CPU.
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
    /// Offsets of fields, for fast paths in assembly.
    pub const WORD_AT: usize = offset_of!(Self, word);
    pub const CPU_AT: usize = offset_of!(Self, cpu);
    pub const CHOSEN_ON_AT: usize = offset_of!(Self, chosen_on);
    pub const QUIET_UNTIL_AT: usize = offset_of!(Self, quiet_until);

    /// Calls `with` with the calling thread's block.
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
        // SAFETY: the block lives as long as its thread, which is in this function. Only signal
        // handlers of the same thread access it as well, and every field is atomic.
        with(unsafe { &*own })
    }

    /// The fast path: whether the check must take the slow path.
    #[inline(always)]
    pub fn must_take_slow_path(&self) -> bool {
        let (word, cpu) = (self.word.load(Relaxed), self.cpu.load(Relaxed));
        // SAFETY: `choose` and the initial image store only addresses of words that stay mapped
        // until the process ends.
        let word = unsafe { &*word };
        // SAFETY: `here` and the initial image store only such addresses, too.
        let cpu = unsafe { &*cpu };
        let moved = cpu.load(Relaxed) ^ self.chosen_on.load(Relaxed);
        (word.load(Relaxed) | u64::from(moved)) != 0
    }

    /// Returns the CPU that the thread runs on, and lets the fast path see it.
    pub(super) fn here(&self) -> u32 {
        let (kept, cpu) = match kept_cpu() {
            Some((kept, cpu)) => (kept, cpu),
            // SAFETY: takes nothing.
            None => (&NOWHERE, u32::try_from(unsafe { libc::sched_getcpu() }).unwrap_or(u32::MAX)),
        };
        self.cpu.store(ptr::from_ref(kept).cast_mut(), Relaxed);
        cpu
    }

    /// Makes the fast path test `word` while the thread is on this CPU. Without a word, the fast
    /// path goes on until the thread is moved.
    pub(super) fn choose(&self, word: Option<&'static AtomicU64>, cpu: u32) {
        self.word.store(ptr::from_ref(word.unwrap_or(&NEVER)).cast_mut(), Relaxed);
        let kept = !ptr::eq(self.cpu.load(Relaxed), &NOWHERE);
        self.chosen_on.store(if kept { cpu } else { 0 }, Relaxed);
    }

    /// Whether the slow path ran so recently that it would decide the same.
    pub(super) fn is_quiet(&self) -> bool {
        ticks() < self.quiet_until.load(Relaxed)
    }

    /// Makes the slow path return at once for `for_ticks`.
    pub(super) fn keep_quiet(&self, for_ticks: u64) {
        self.quiet_until.store(ticks().wrapping_add(for_ticks), Relaxed);
    }

    /// Enters a critical section. Returns whether it is the outermost one.
    pub(super) fn enter_critical(&self) -> bool {
        let depth = self.critical_depth.load(Relaxed);
        self.critical_depth.store(depth.saturating_add(1), Relaxed);
        depth == 0
    }

    /// Leaves a critical section. Returns whether it was the outermost one.
    pub(super) fn exit_critical(&self) -> bool {
        let depth = self.critical_depth.load(Relaxed).saturating_sub(1);
        self.critical_depth.store(depth, Relaxed);
        if depth == 0 {
            self.critical_since_ns.store(0, Relaxed);
            self.quiet_until.store(0, Relaxed);
        }
        depth == 0
    }

    /// The time stamp counter. Each call returns another value.
    pub(super) fn ticks() -> u64 {
        ticks()
    }

    /// Whether the thread is in a critical section that has not delayed its nap
    /// for longer than the bound.
    pub(super) fn is_in_critical(&self, now_ns: u64) -> bool {
        if self.critical_depth.load(Relaxed) == 0 {
            return false;
        }
        if self.critical_since_ns.load(Relaxed) == 0 {
            self.critical_since_ns.store(now_ns, Relaxed);
        }
        now_ns.saturating_sub(self.critical_since_ns.load(Relaxed)) < CRITICAL_BOUND_NS
    }
}

/// The word in which the kernel maintains the calling thread's CPU, and that CPU. `None` if the C
/// library has not registered such a word. Then a thread that is moved tests the word of the lane
/// that it left, until that lane turns busy.
fn kept_cpu() -> Option<(&'static AtomicU32, u32)> {
    let (offset, size): (*const isize, *const u32);
    // SAFETY: reads two entries of this module's global offset table, which the loader has filled
    // in.
    unsafe {
        asm!(
            "mov {offset}, qword ptr [rip + __rseq_offset@GOTPCREL]",
            "mov {size}, qword ptr [rip + __rseq_size@GOTPCREL]",
            offset = out(reg) offset,
            size = out(reg) size,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    // SAFETY: the pointer is null, or the address of the C library's constant.
    let size = unsafe { size.as_ref() }?;
    // SAFETY: the same holds for this pointer.
    let offset = unsafe { offset.as_ref() }?;
    if *size == 0 {
        return None;
    }
    let area = thread_pointer().wrapping_offset(*offset + RSEQ_CPU_ID).cast::<AtomicU32>();
    // SAFETY: the C library has such an area in every thread, at this offset, and keeps it as long
    // as the thread runs.
    let kept = unsafe { &*area };
    let cpu = kept.load(Relaxed);
    // A negative value says that the area is not registered in this thread.
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
