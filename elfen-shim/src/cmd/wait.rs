//! What the front does while the observer looks: it waits for the program, for signals, and for
//! the observer.

use std::io::Write;
use std::process::Child;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use elfen_console::failure::{Failure, Status};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};

use super::live::Picture;
use crate::observers::Observers;
use crate::program::status_of;
use crate::reach::Keeper;
use crate::recorder::Orders;
use crate::symbols::Layout;

/// The signals that this process blocks.
pub(super) fn blocked_signals() -> nix::Result<SigSet> {
    let mut blocked = SigSet::empty();
    sigprocmask(SigmaskHow::SIG_BLOCK, None, Some(&mut blocked))?;
    Ok(blocked)
}

/// Takes the signals that end a run from their default action, which ends this process: before
/// this, there is nothing to write. To be called before a process or a thread is started.
pub(super) fn take_signals() -> Result<(), Failure> {
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&ours()), None).map_err(not_waited)
}

pub(super) fn not_waited(error: nix::Error) -> Failure {
    Failure::new(Status::Failed, "waiting for signals", error, "try again")
}

fn ours() -> SigSet {
    [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGCHLD].into_iter().collect()
}

/// How it ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum End {
    /// The program, with this status.
    Program(i32),
    /// A program that we did not start.
    Gone,
    Signal(i32),
    /// The observer has enough.
    Observer,
    /// The keeper of the shared pages was killed.
    Unshared,
}

/// When the program's maps are looked at: soon, as it may be short, and then ever more seldom.
const FIRST_LOOK: Duration = Duration::from_millis(2);
const LAST_LOOK: Duration = Duration::from_secs(1);
const TURN: Duration = Duration::from_millis(50);
/// How long a program may take to end by a signal while it is observed.
const GRACE: Duration = Duration::from_millis(500);

/// Waits for the first of these.
pub(super) fn wait(
    child: &mut Option<Child>,
    process: Option<u32>,
    observer: &Observers,
    orders: &Orders,
    layout: &mut Layout,
    keeper: Option<&Keeper>,
    mut picture: Option<(&mut Picture, &mut dyn Write)>,
) -> Result<End, Failure> {
    let (began, mut look_every) = (Instant::now(), FIRST_LOOK);
    let mut next_look = began;
    let mut told_to_end = None;
    loop {
        if let Some(process) = process.filter(|_| Instant::now() >= next_look) {
            layout.look(process);
            next_look = Instant::now() + look_every;
            look_every = (look_every * 3).min(LAST_LOOK);
        }
        let within = TURN.min(look_every);
        let mut signal = None;
        if let Some((picture, out)) = &mut picture {
            signal = picture.input(within);
            if let Err(failure) = picture.turn(layout, out) {
                orders.stop.store(true, Relaxed);
                return Err(failure);
            }
        }
        let signal = signal.map_or_else(|| next_signal(within), |signal| signal.map(Told::by_key));
        if let Some(child) = child
            && let Ok(Some(status)) = child.try_wait()
        {
            orders.stop.store(true, Relaxed);
            return Ok(End::Program(status_of(status)));
        }
        if let Some(told) = signal.filter(|told| told.signal != libc::SIGCHLD) {
            let grace = child.as_ref().map_or(Duration::ZERO, |_| GRACE);
            child.iter().for_each(|child| told.pass_on(child));
            told_to_end.get_or_insert((Instant::now() + grace, told.signal));
        }
        if let Some((at, signal)) = told_to_end
            && Instant::now() >= at
        {
            orders.stop.store(true, Relaxed);
            return Ok(End::Signal(signal));
        }
        if child.is_none() && process.is_some_and(is_gone) {
            orders.stop.store(true, Relaxed);
            return Ok(End::Gone);
        }
        if keeper.is_some_and(Keeper::was_killed) {
            orders.stop.store(true, Relaxed);
            return Ok(End::Unshared);
        }
        if observer.is_done() {
            return Ok(End::Observer);
        }
    }
}

/// The program's status, however long it takes. A signal goes to it as before; if it does not end
/// by that, gives the status of the signal.
pub(super) fn outlast(child: &mut Child) -> i32 {
    let mut told_to_end = None;
    loop {
        if let Ok(Some(status)) = child.try_wait() {
            return status_of(status);
        }
        match told_to_end {
            Some((at, signal)) if Instant::now() >= at => return 128 + signal,
            _ => {}
        }
        let within = if told_to_end.is_some() { TURN } else { LAST_LOOK };
        if let Some(told) = next_signal(within).filter(|told| told.signal != libc::SIGCHLD) {
            told.pass_on(child);
            told_to_end.get_or_insert((Instant::now() + GRACE, told.signal));
        }
    }
}

fn is_gone(process: u32) -> bool {
    elfen_host::process::stat(process).is_none()
}

/// A signal that we were told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Told {
    signal: i32,
    /// By the terminal, which has told the program as well: how it ends is its own affair.
    as_is_the_program: bool,
}

impl Told {
    /// A key that a terminal gave as it is, so that nobody else heard of it.
    fn by_key(signal: i32) -> Self {
        Self { signal, as_is_the_program: false }
    }

    fn pass_on(self, child: &Child) {
        if !self.as_is_the_program {
            let pid = nix::unistd::Pid::from_raw(child.id().cast_signed());
            let _gone = nix::sys::signal::kill(pid, Signal::try_from(self.signal).ok());
        }
    }
}

fn next_signal(within: Duration) -> Option<Told> {
    let within = libc::timespec {
        tv_sec: i64::try_from(within.as_secs()).unwrap_or(0),
        tv_nsec: within.subsec_nanos().into(),
    };
    let set = ours();
    let mut info = std::mem::MaybeUninit::<libc::siginfo_t>::zeroed();
    // SAFETY: all three structures are ours.
    let signal = unsafe { libc::sigtimedwait(set.as_ref(), info.as_mut_ptr(), &within) };
    // SAFETY: all bytes of it were 0, which is a siginfo_t, and the kernel has written others.
    let code = unsafe { info.assume_init() }.si_code;
    (signal > 0).then_some(Told { signal, as_is_the_program: code == libc::SI_KERNEL })
}
