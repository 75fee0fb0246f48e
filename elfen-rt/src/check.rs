//! Checks: the few instructions by which a batch thread samples its request lane.
//!
//! [`check!`](crate::check!) is the fast path. It tests the word that the thread's block
//! ([`Thread`]) points at, and normally does nothing else. The slow path is [`elfen_look_1`]: it
//! finds the lane that the thread runs on, asks the policy ([`crate::lane`]), and naps until the
//! verdict is to run. The slow path never allocates or locks, and it preserves errno. It may run in
//! any thread, in signal handlers, between fork and exec, and on any stack with some room.
//!
//! A program that `elfen run` did not start finds no channels at its first check. After that, its
//! checks take the fast path only.

pub(crate) mod once;
mod process;
mod thread;

use core::arch::asm;
use core::ffi::c_int;
use core::marker::PhantomData;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::clock::monotonic_ns;
use crate::lane::{Actor, Step, termination_slice_ns};
use crate::nap::{Nap, NapKind, Woken};
use crate::process::{errno, set_errno};
use once::Made;
use process::{Process, tested_word};
pub use thread::{CRITICAL_BOUND_NS, Thread, Words};

/// How long the slow path returns at once after it let the thread run although the tested word is
/// not 0: 1 to 2 us at the usual 2 to 4 GHz. This happens while the thread has a budget, while it
/// is in a critical section, and if the word belongs to a service that died.
const QUIET_TICKS: u64 = 4096;

/// How long the slow path returns at once where no service has claimed a slot for the thread's
/// lane: 0.5 to 1 ms.
const UNCLAIMED_TICKS: u64 = 1 << 21;

/// Bounds each nap of a thread whose batch was asked to terminate.
const TERMINATION_BOUND_NS: u64 = 2_000_000;

/// After napping for this long without a break, a thread verifies that the kernel still writes the
/// task map.
const FROZEN_AFTER_NS: u64 = 1_000_000_000;

/// Samples the request lane, and naps if the policy says so. Costs a load, a test and a branch
/// while the request lane idles.
///
/// Belongs where a program spends its time: at function entries and in loops.
#[macro_export]
macro_rules! check {
    () => {{
        $crate::check::note();
        $crate::check::check()
    }};
}

/// Puts an ELF note into each object file that has checks. `elfen run` recognizes a program with
/// checks by this note. Emits no instructions.
#[inline(always)]
pub fn note() {
    // SAFETY: changes sections and puts nothing into this one.
    unsafe {
        asm!(
            ".ifndef elfen_check_noted",
            ".set elfen_check_noted, 1",
            ".pushsection .note.elfen.check,\"a\",@note",
            ".balign 4",
            // The sizes of name and contents, and the type; then the name; then the contents, which
            // are the version of `Thread`.
            ".long 6, 4, 1",
            ".asciz \"Elfen\"",
            ".balign 4",
            ".long 1",
            ".popsection",
            ".endif",
            options(nomem, nostack, preserves_flags),
        );
    }
}

/// The check in [`check!`](crate::check!).
#[inline(always)]
pub fn check() {
    Thread::with_own(|thread| {
        if thread.must_take_slow_path() {
            elfen_look_1(thread);
        }
    });
}

/// The slow path of a check. The number in its name is the version of [`Thread`].
#[cold]
#[inline(never)]
#[unsafe(no_mangle)]
pub extern "C" fn elfen_look_1(thread: &Thread) {
    if thread.is_quiet() {
        return;
    }
    let errno = errno();
    take_slow_path(thread);
    set_errno(errno);
}

/// Where a check that is patched into this process finds its words; `None` if the process belongs
/// to no run. With a single batch lane, `moved` is not needed and is left out.
pub fn words() -> Option<Words> {
    let Made::Value(process) = Process::own() else { return None };
    let words = Words::own();
    Some(Words { moved: words.moved.filter(|_| process.lanes() > 1), ..words })
}

fn take_slow_path(thread: &Thread) {
    // The batch stops working here. The clock is read first, because the code below has to be
    // fetched into the caches.
    let mut now_ns = monotonic_ns();
    let process = match Process::own() {
        Made::Value(process) => process,
        Made::Never => return thread.choose(None, thread.here()),
        Made::NotYet => return thread.keep_quiet(QUIET_TICKS),
    };
    let mut napping_since_ns = None;
    loop {
        let cpu = thread.here();
        let Some(lane) = process.lane(cpu) else {
            thread.choose(process.only_word(), cpu);
            return thread.keep_quiet(QUIET_TICKS);
        };
        let word = tested_word(&lane);
        // No word: no service has claimed a slot for this lane yet. A service may do so at any
        // time.
        thread.choose(word.or(Some(&thread::UNKNOWN)), cpu);
        if thread.is_in_critical(now_ns) {
            return thread.keep_quiet(QUIET_TICKS);
        }
        let wait = match lane.step(Actor::Check, now_ns, now_ns) {
            Step::Run { busy, .. } => return let_run(thread, word, busy, cpu),
            // A thread may have to leave this check in order to terminate.
            Step::Nap(_)
                if termination_slice_ns(lane.termination_requested_ns(), now_ns).is_some() =>
            {
                return let_run(thread, word, true, cpu);
            }
            Step::Nap(wait) => wait,
        };
        let requested_ns = lane.termination_requested_ns();
        let requested_again = || lane.termination_requested_ns() != requested_ns;
        let bound_ns = if requested_ns == 0 { u64::MAX } else { TERMINATION_BOUND_NS };
        let since_ns = *napping_since_ns.get_or_insert(now_ns);
        if now_ns.saturating_sub(since_ns) > FROZEN_AFTER_NS {
            napping_since_ns = None;
            if is_frozen(process, cpu, thread) {
                process.freeze();
            }
        }
        if wait.on(process.nap(), bound_ns, requested_again) == Woken::Elsewhere {
            // The module does not wake this lane, or the program has closed our descriptor. The
            // lane page records this.
            if thread.here() == cpu {
                lane.slot.check_nap.store(NapKind::Spin as u64, Relaxed);
            }
            wait.on(&Nap::Spin, bound_ns, || requested_again() || thread.here() != cpu);
        }
        now_ns = monotonic_ns();
    }
}

/// Lets the thread run, next to a request if the lane is `busy`. In that case every check takes the
/// slow path until one has seen the lane idle. A policy gives a budget to a request that comes
/// after an idle moment, and the slow path must have seen that moment.
fn let_run(thread: &Thread, word: Option<&'static AtomicU64>, busy: bool, cpu: u32) {
    if busy {
        thread.choose(Some(&thread::UNKNOWN), cpu);
    }
    match word {
        Some(word) if busy || word.load(Relaxed) != 0 => thread.keep_quiet(QUIET_TICKS),
        Some(_) => {}
        None => thread.keep_quiet(UNCLAIMED_TICKS),
    }
}

/// Whether the kernel has stopped counting the switches of this CPU: its eBPF program was detached
/// by force, or the last process that held it died. A lane that was busy then would seem busy for
/// ever.
fn is_frozen(process: &Process, cpu: u32, thread: &Thread) -> bool {
    let before = process.switches(cpu);
    let pause = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 };
    let no_rest = core::ptr::null_mut::<libc::timespec>();
    // Not the C library's nanosleep, which is a cancellation point.
    // SAFETY: `pause` is ours, and the kernel writes no remaining time to a null pointer.
    let slept = unsafe { libc::syscall(libc::SYS_nanosleep, &raw const pause, no_rest) } == 0;
    // The sleep switched this thread out and in again. If the thread is still on this CPU, at least
    // one of the two switches happened here.
    slept && before.is_some() && thread.here() == cpu && process.switches(cpu) == before
}

/// A critical section: the thread's checks let it run, because it holds a lock that other threads
/// may wait for. Ends with a check.
///
/// After [`CRITICAL_BOUND_NS`] the thread naps all the same. The lane's guard respects the section
/// for the same time.
#[derive(Debug)]
#[must_use = "a critical section ends when this drops"]
pub struct Critical {
    /// The section is counted in the block of the thread that entered it.
    not_send: PhantomData<*const ()>,
}

/// Enters a critical section. Critical sections nest.
pub fn critical() -> Critical {
    enter_critical();
    Critical { not_send: PhantomData }
}

fn enter_critical() {
    if Thread::with_own(Thread::enter_critical) {
        publish_critical(Thread::ticks() | 1);
    }
}

fn exit_critical() {
    if Thread::with_own(Thread::exit_critical) {
        publish_critical(0);
    }
}

/// Publishes in the lane's slot whether the thread on the lane is in a critical section, because a
/// guard cannot see a thread's block. A thread that is moved or preempted meanwhile leaves its word
/// behind; the guard respects such a word once, for the bound.
fn publish_critical(word: u64) {
    let Made::Value(process) = Process::own() else { return };
    if let Some(lane) = process.lane(Thread::with_own(Thread::here)) {
        lane.slot.critical.store(word, Relaxed);
    }
}

/// Enters or leaves a critical section for a C program, which has a block of its own. See
/// `elfen_critical_enter` in `elfen_check.h`.
#[unsafe(no_mangle)]
pub extern "C" fn elfen_hold_1(entered: c_int) {
    match entered {
        0 => exit_critical(),
        _ => enter_critical(),
    }
}

impl Drop for Critical {
    fn drop(&mut self) {
        exit_critical();
        check();
    }
}
