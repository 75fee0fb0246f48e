//! What the front does while the observer looks: it waits for the program, for signals, and for
//! the observer.

use std::io::Write;
use std::process::Child;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use elfen_console::failure::Failure;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};

use super::live::Picture;
use crate::observers::Observers;
use crate::program::status_of;
use crate::record::Orders;
use crate::symbols::Layout;

/// The signals that end a run, taken from their handlers; gives what was blocked before.
pub(super) fn take_signals() -> nix::Result<SigSet> {
    let mut before = SigSet::empty();
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&ours()), Some(&mut before))?;
    Ok(before)
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
}

/// When the program's maps are looked at: soon, as it may be short, and then ever more seldom.
const FIRST_LOOK: Duration = Duration::from_millis(2);
const LAST_LOOK: Duration = Duration::from_secs(1);
const TURN: Duration = Duration::from_millis(50);

/// Waits for the first of these.
pub(super) fn wait(
    child: &mut Option<Child>,
    process: Option<u32>,
    observer: &Observers,
    orders: &Orders,
    layout: &mut Layout,
    mut picture: Option<(&mut Picture, &mut dyn Write)>,
) -> Result<End, Failure> {
    let (began, mut look_every) = (Instant::now(), FIRST_LOOK);
    let mut next_look = began;
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
        let from_terminal = signal.is_some();
        let signal = signal.unwrap_or_else(|| next_signal(within));
        if let Some(child) = child
            && let Ok(Some(status)) = child.try_wait()
        {
            orders.stop.store(true, Relaxed);
            return Ok(End::Program(status_of(status)));
        }
        if let Some(signal) = signal.filter(|&signal| signal != libc::SIGCHLD) {
            // The terminal has told the program as well; how it ends is its own affair.
            match child {
                Some(child) if signal != libc::SIGINT || from_terminal => {
                    let pid = nix::unistd::Pid::from_raw(child.id().cast_signed());
                    let _gone = nix::sys::signal::kill(pid, Signal::try_from(signal).ok());
                }
                Some(_) => {}
                None => {
                    orders.stop.store(true, Relaxed);
                    return Ok(End::Signal(signal));
                }
            }
        }
        if child.is_none() && process.is_some_and(is_gone) {
            orders.stop.store(true, Relaxed);
            return Ok(End::Gone);
        }
        if observer.is_done() {
            return Ok(End::Observer);
        }
    }
}

/// The program's status, however long it takes. Signals go to it as before.
pub(super) fn outlast(child: &mut Child) -> i32 {
    loop {
        if let Ok(Some(status)) = child.try_wait() {
            return status_of(status);
        }
        let signal = next_signal(LAST_LOOK);
        if let Some(signal @ (libc::SIGTERM | libc::SIGHUP)) = signal {
            let pid = nix::unistd::Pid::from_raw(child.id().cast_signed());
            let _gone = nix::sys::signal::kill(pid, Signal::try_from(signal).ok());
        }
    }
}

fn is_gone(process: u32) -> bool {
    elfen_host::process::stat(process).is_none()
}

fn next_signal(within: Duration) -> Option<i32> {
    let within = libc::timespec {
        tv_sec: i64::try_from(within.as_secs()).unwrap_or(0),
        tv_nsec: within.subsec_nanos().into(),
    };
    let set = ours();
    // SAFETY: both structures are ours; nothing is asked about the signal but its number.
    let signal = unsafe { libc::sigtimedwait(set.as_ref(), std::ptr::null_mut(), &within) };
    (signal > 0).then_some(signal)
}
