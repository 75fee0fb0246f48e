//! Checks: the few instructions by which a batch thread samples its request lane, and
//! what follows when it is busy.
//!
//! [`check!`](crate::check!) is the fast path: it tests a word of the thread's own choosing
//! ([`Thread`]) and goes on. The slow path is [`elfen_look_1`]: it finds the lane that the thread
//! runs on, has the policy decide ([`crate::lane`]), and naps until the verdict is to run. It
//! allocates nothing, takes no lock, keeps errno, and may be entered anywhere: in any thread, in
//! signal handlers, between fork and exec, on any stack with some room.
//!
//! A program that no `elfen run` has started finds no channels at its first check; from then on, a
//! check is the fast path alone.

pub(crate) mod once;
mod process;
mod thread;

use core::arch::asm;
use core::ffi::c_int;
use core::marker::PhantomData;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::clock::monotonic_ns;
use crate::lane::{Hand, Step, time_to_end_ns};
use crate::nap::{Kind, Nap, Woken};
use crate::process::{errno, set_errno};
use once::Made;
use process::{Process, word_of};
pub use thread::{CRITICAL_BOUND_NS, Thread, Words};

/// After a look that let the thread run though the word that it tests is not 0 (it shares by a
/// budget, it is in a critical section, the word is of a service that died), the next ones say the
/// same: 1 to 2 us at the usual 2 to 4 GHz.
const QUIET_TICKS: u64 = 4096;

/// How long a thread goes without a look where no service has claimed a slot
/// for its lane: 0.5 to 1 ms.
const UNCLAIMED_TICKS: u64 = 1 << 21;

/// How long a thread of a batch that was told to end naps without a look.
const TOLD_BOUND_NS: u64 = 2_000_000;

/// After napping this long without a break, a thread makes sure that the kernel
/// still writes the task map.
const FROZEN_AFTER_NS: u64 = 1_000_000_000;

/// Samples the request lane, and naps if the policy says so. A load, a test and a branch
/// while there is nothing to do.
///
/// To be put where a program spends its time: function entries, loops.
#[macro_export]
macro_rules! check {
    () => {{
        $crate::check::note();
        $crate::check::check()
    }};
}

/// Leaves a note in the program, one for each of its object files, that says that it checks itself:
/// `elfen run` goes by that note. No instructions.
#[inline(always)]
pub fn note() {
    // SAFETY: changes sections and puts nothing into this one.
    unsafe {
        asm!(
            ".ifndef elfen_check_noted",
            ".set elfen_check_noted, 1",
            ".pushsection .note.elfen.check,\"a\",@note",
            ".balign 4",
            // Bytes of name and contents, and the type; the name; the
            // contents: the version of `Thread`.
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
        if thread.must_look() {
            elfen_look_1(thread);
        }
    });
}

/// The slow path for the block that a check has found wanting. The number is
/// the version of [`Thread`].
#[cold]
#[inline(never)]
#[unsafe(no_mangle)]
pub extern "C" fn elfen_look_1(thread: &Thread) {
    if thread.is_quiet() {
        return;
    }
    let errno = errno();
    look(thread);
    set_errno(errno);
}

/// Where a check that is written into this process finds its words; `None` if there is no run to
/// check for. With one batch lane, `moved` is not needed and is left out.
pub fn words() -> Option<Words> {
    let Made::Value(process) = Process::own() else { return None };
    let words = Words::own();
    Some(Words { moved: words.moved.filter(|_| process.lanes() > 1), ..words })
}

fn look(thread: &Thread) {
    // From here on the program does nothing of its own. First, as what follows has to
    // be fetched into the caches.
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
        let word = word_of(&lane);
        // No word: no service has claimed a slot for this lane yet. One may at any time.
        thread.choose(word.or(Some(&thread::UNKNOWN)), cpu);
        if thread.is_held(now_ns) {
            return thread.keep_quiet(QUIET_TICKS);
        }
        let wait = match lane.step(Hand::Check, now_ns, now_ns) {
            Step::Run { busy, .. } => return run(thread, word, busy, cpu),
            // To die, a thread may have to leave this check.
            Step::Nap(_) if time_to_end_ns(lane.told_to_end_ns(), now_ns).is_some() => {
                return run(thread, word, true, cpu);
            }
            Step::Nap(wait) => wait,
        };
        let told_ns = lane.told_to_end_ns();
        let was_told = || lane.told_to_end_ns() != told_ns;
        let bound_ns = if told_ns == 0 { u64::MAX } else { TOLD_BOUND_NS };
        let since_ns = *napping_since_ns.get_or_insert(now_ns);
        if now_ns.saturating_sub(since_ns) > FROZEN_AFTER_NS {
            napping_since_ns = None;
            if is_frozen(process, cpu, thread) {
                process.freeze();
            }
        }
        if wait.on(process.nap(), bound_ns, was_told) == Woken::Elsewhere {
            // The module has not tied this lane, or the program has closed our
            // descriptor. Said in the lane page.
            if thread.here() == cpu {
                lane.slot.check_nap.store(Kind::Spin as u64, Relaxed);
            }
            wait.on(&Nap::Spin, bound_ns, || was_told() || thread.here() != cpu);
        }
        now_ns = monotonic_ns();
    }
}

/// Lets the thread go on, next to a request if the lane is `busy`. Then every check takes the slow
/// path until one has seen the lane idle: a policy gives a budget to a request that comes after an
/// idle moment, and a look must have seen that moment.
fn run(thread: &Thread, word: Option<&'static AtomicU64>, busy: bool, cpu: u32) {
    if busy {
        thread.choose(Some(&thread::UNKNOWN), cpu);
    }
    match word {
        Some(word) if busy || word.load(Relaxed) != 0 => thread.keep_quiet(QUIET_TICKS),
        Some(_) => {}
        None => thread.keep_quiet(UNCLAIMED_TICKS),
    }
}

/// Whether the kernel no longer counts the switches of this CPU: its program was detached by force,
/// or its last holder died. Then a lane that was busy would stay so for ever.
fn is_frozen(process: &Process, cpu: u32, thread: &Thread) -> bool {
    let before = process.switches(cpu);
    let pause = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 };
    let no_rest = core::ptr::null_mut::<libc::timespec>();
    // Not the C library's nanosleep, which is a cancellation point.
    // SAFETY: `pause` is ours; what remained of an interrupted sleep is of no interest.
    let slept = unsafe { libc::syscall(libc::SYS_nanosleep, &raw const pause, no_rest) } == 0;
    // Asleep, this thread was switched out and in again: at least one of that on
    // this CPU if it is still here.
    slept && before.is_some() && thread.here() == cpu && process.switches(cpu) == before
}

/// A stretch in which the thread's checks let it run, as it holds a lock that others
/// wait for. Ends with a check.
///
/// For [`CRITICAL_BOUND_NS`] at most: then it naps all the same. The lane's guard
/// leaves it alone for as long.
#[derive(Debug)]
#[must_use = "a critical section ends when this drops"]
pub struct Critical {
    /// Counted in the block of the thread that entered.
    not_send: PhantomData<*const ()>,
}

/// Enters a critical section; they nest.
pub fn critical() -> Critical {
    enter_critical();
    Critical { not_send: PhantomData }
}

fn enter_critical() {
    if Thread::with_own(Thread::enter_critical) {
        tell_the_guard(Thread::ticks() | 1);
    }
}

fn exit_critical() {
    if Thread::with_own(Thread::exit_critical) {
        tell_the_guard(0);
    }
}

/// Says in the lane's slot whether the thread on it is in a critical section: a guard can't see a
/// thread's own block. A thread that was moved meanwhile, or preempted by another, leaves a word
/// behind that the guard heeds once, for the bound.
fn tell_the_guard(word: u64) {
    let Made::Value(process) = Process::own() else { return };
    let lane = process.lane(Thread::with_own(Thread::here));
    lane.into_iter().for_each(|lane| lane.slot.critical.store(word, Relaxed));
}

/// The same for the hooks of a C program, whose own block is another: see
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
