//! Checks: the few instructions by which a batch thread samples its request lane, and what follows when it is busy.
//!
//! [`check!`](crate::check!) is the fast path: it tests a word of the thread's own choosing ([`Thread`]) and goes on.
//! The slow path is [`elfen_look_1`]: it finds the lane that the thread runs on, has the policy decide
//! ([`crate::borrow`]), and naps until the verdict is to run. It allocates nothing, takes no lock, keeps errno, and may be
//! entered anywhere: in any thread, in signal handlers, between fork and exec, on any stack with some room.
//!
//! A program that no `elfen run` has started finds no channels at its first check; from then on, a check is the fast
//! path alone.

mod once;
mod process;
mod thread;

use core::arch::asm;
use core::ffi::c_int;
use core::marker::PhantomData;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::clock::monotonic_ns;
use crate::nap::block::Block;
use crate::nap::line::Pause;
use crate::nap::{Nap, protocol};
use crate::policy::Verdict;
use crate::process::{errno, set_errno};
use once::Made;
use process::{Lane, Process};
pub use thread::{Thread, Words};

/// How long a thread in a critical section is left alone: others may wait for the lock that it holds. After that its nap
/// is the lesser evil.
pub const CRITICAL_BOUND_NS: u64 = 1_000_000;

/// After a look that let the thread run though the word that it tests is not 0 (it shares by a budget, it is in a critical
/// section, the word is of a service that died), the next ones say the same: 1 to 2 us at the usual 2 to 4 GHz.
const QUIET_TICKS: u64 = 4096;

/// A nap ends when the request lane idles; at the latest after this, because a policy may let the thread run for other
/// reasons.
const NAP_BOUND_NS: u64 = 50_000;
/// Blocking again costs more than a look, and other reasons to run can wait.
const BLOCK_BOUND_NS: u64 = 2_000_000;

/// After napping this long without a break, a thread makes sure that the kernel still writes the task map.
const FROZEN_AFTER_NS: u64 = 1_000_000_000;

/// Samples the request lane, and naps if the policy says so. A load, a test and a branch while there is nothing to do.
///
/// To be put where a program spends its time: function entries, loops.
#[macro_export]
macro_rules! check {
    () => {{
        $crate::check::note();
        $crate::check::check()
    }};
}

/// Leaves a note in the program, one for each of its object files, that says that it checks itself: what `elfen run` goes by.
/// No instructions.
#[inline(always)]
pub fn note() {
    // SAFETY: changes sections and puts nothing into this one.
    unsafe {
        asm!(
            ".ifndef elfen_check_noted",
            ".set elfen_check_noted, 1",
            ".pushsection .note.elfen.check,\"a\",@note",
            ".balign 4",
            // Bytes of name and contents, and the type; the name; the contents: the version of `Thread`.
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

/// The slow path for the block that a check has found wanting. The number is the version of [`Thread`].
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

/// Where a check that is written into this process finds its words; `None` if there is no run to check for. With one batch
/// lane, `moved` is not needed and is left out.
pub fn words() -> Option<Words> {
    let Made::Value(process) = Process::own() else { return None };
    let words = Words::own();
    Some(Words { moved: words.moved.filter(|_| process.lanes() > 1), ..words })
}

fn look(thread: &Thread) {
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
        let word = lane.word();
        thread.choose(word, cpu);
        let now_ns = monotonic_ns();
        if thread.is_held(now_ns) {
            return thread.keep_quiet(QUIET_TICKS);
        }
        // Armed before the look: what changes after it ends the nap at once.
        let seen = Seen::of(&lane);
        let look = lane.look(now_ns);
        if look.verdict == Verdict::Run {
            return run(thread, word, look.busy, cpu);
        }
        let since_ns = *napping_since_ns.get_or_insert(now_ns);
        if now_ns.saturating_sub(since_ns) > FROZEN_AFTER_NS {
            napping_since_ns = None;
            if is_frozen(process, cpu, thread) {
                process.freeze();
            }
        }
        nap(process.nap(), &lane, seen, now_ns);
    }
}

/// Lets the thread go on, next to a request if the lane is `busy`. Then every check takes the slow path until one has seen the
/// lane idle: a policy gives a budget to a request that comes after an idle moment, and somebody must have looked.
fn run(thread: &Thread, word: Option<&'static AtomicU64>, busy: bool, cpu: u32) {
    if busy {
        thread.choose(Some(&thread::UNKNOWN), cpu);
    }
    if busy || word.is_some_and(|word| word.load(Relaxed) != 0) {
        thread.keep_quiet(QUIET_TICKS);
    }
}

/// Whether the kernel no longer counts the switches of this CPU: its program was detached by force, or its last holder
/// died. Then a lane that was busy would stay so for ever.
fn is_frozen(process: &Process, cpu: u32, thread: &Thread) -> bool {
    let before = process.switches(cpu);
    let pause = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 };
    let no_rest = core::ptr::null_mut::<libc::timespec>();
    // Not the C library's nanosleep, which is a cancellation point.
    // SAFETY: `pause` is ours; what remained of an interrupted sleep is of no interest.
    let slept = unsafe { libc::syscall(libc::SYS_nanosleep, &raw const pause, no_rest) } == 0;
    // Asleep, this thread was switched out and in again: at least one of that on this CPU if it is still here.
    slept && before.is_some() && thread.here() == cpu && process.switches(cpu) == before
}

/// The words that a policy decides by.
#[derive(PartialEq)]
struct Seen {
    busy: bool,
    service: Option<[u64; 2]>,
}

impl Seen {
    fn of(lane: &Lane) -> Self {
        let service = lane.service();
        Self {
            busy: lane.word().is_some_and(|word| word.load(Relaxed) != 0),
            service: service.map(|s| [&s.running_request, &s.queue_len].map(|w| w.load(Relaxed))),
        }
    }
}

/// Waits until something is no longer as it was `seen` before the look that said to nap, or until the bound passes.
fn nap(how: &Nap, lane: &Lane, seen: Seen, now_ns: u64) {
    let Some(word) = lane.word() else { return };
    let same = || Seen::of(lane) == seen;
    let bound_ns = if matches!(how, Nap::Block) { BLOCK_BOUND_NS } else { NAP_BOUND_NS };
    let left_ns = || (now_ns + bound_ns).saturating_sub(monotonic_ns());
    match how {
        Nap::Umwait(has) => protocol::nap(&has.on(word), same, left_ns),
        Nap::Mwaitx(has) => protocol::nap(&has.on(word), same, left_ns),
        Nap::Block => protocol::nap(&Block::on(lane.wakes()), same, left_ns),
        Nap::Spin | Nap::Device(_) => protocol::nap(&Pause, same, left_ns),
    };
}

/// A stretch in which the thread's checks let it run, as it holds a lock that others wait for. Ends with a check.
///
/// For [`CRITICAL_BOUND_NS`] at most: then it naps all the same. What a guard does is not affected.
#[derive(Debug)]
#[must_use = "a critical section ends when this drops"]
pub struct Critical {
    /// Counted in the block of the thread that entered.
    not_send: PhantomData<*const ()>,
}

/// Enters a critical section; they nest.
pub fn critical() -> Critical {
    Thread::with_own(Thread::enter_critical);
    Critical { not_send: PhantomData }
}

/// The same for the hooks of a C program, whose own block is another: see `elfen_critical_enter` in `elfen_check.h`.
#[unsafe(no_mangle)]
pub extern "C" fn elfen_hold_1(entered: c_int) {
    Thread::with_own(|thread| match entered {
        0 => thread.exit_critical(),
        _ => thread.enter_critical(),
    });
}

impl Drop for Critical {
    fn drop(&mut self) {
        Thread::with_own(Thread::exit_critical);
        check();
    }
}
