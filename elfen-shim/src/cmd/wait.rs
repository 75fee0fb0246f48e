//! The main thread of the command during a run: it waits for the program, for signals, and for the
//! observers.

use std::io::Write;
use std::process::Child;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use elfen_console::failure::{Failure, Status};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};

use super::live::LiveView;
use crate::observers::Observers;
use crate::program::status_of;
use crate::reach::PageSupervisor;
use crate::session::ObserverControl;
use crate::symbols::Layout;

/// Returns the signal mask of this process.
pub(super) fn blocked_signals() -> nix::Result<SigSet> {
    let mut blocked = SigSet::empty();
    sigprocmask(SigmaskHow::SIG_BLOCK, None, Some(&mut blocked))?;
    Ok(blocked)
}

/// Blocks the signals that end a run. Their default action would end this process, and the
/// recording would be lost. Call it before starting a process or a thread, which inherit the mask.
pub(super) fn block_signals() -> Result<(), Failure> {
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&handled_signals()), None).map_err(signal_failure)
}

pub(super) fn signal_failure(error: nix::Error) -> Failure {
    Failure::new(Status::Failed, "waiting for signals", error, "try again")
}

fn handled_signals() -> SigSet {
    [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGCHLD].into_iter().collect()
}

/// Why the wait ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum End {
    /// The started program ended, with this status.
    Program(i32),
    /// The process named with -p ended.
    Gone,
    Signal(i32),
    /// An observer ended.
    Observer,
    /// The supervisor of the shared pages was killed.
    Unshared,
}

/// The interval between readings of the program's maps. It is short at first, because the program
/// may end soon, and then grows.
const FIRST_UPDATE: Duration = Duration::from_millis(2);
const MAX_UPDATE: Duration = Duration::from_secs(1);
/// The longest time between two checks of everything.
const CHECK_EVERY: Duration = Duration::from_millis(50);
/// How long a program may run on after a signal while it is observed.
const GRACE: Duration = Duration::from_millis(500);

/// Waits until one of the events of [`End`] happens.
pub(super) fn wait(
    child: &mut Option<Child>,
    process: Option<u32>,
    observer: &Observers,
    control: &ObserverControl,
    layout: &mut Layout,
    supervisor: Option<&PageSupervisor>,
    mut view: Option<(&mut LiveView, &mut dyn Write)>,
) -> Result<End, Failure> {
    let mut update_every = FIRST_UPDATE;
    let mut next_update = Instant::now();
    // The time at which to stop waiting after a signal, and the signal.
    let mut end_at: Option<(Instant, i32)> = None;
    loop {
        if let Some(process) = process.filter(|_| Instant::now() >= next_update) {
            layout.update(process);
            next_update = Instant::now() + update_every;
            update_every = (update_every * 3).min(MAX_UPDATE);
        }
        let within = CHECK_EVERY.min(update_every);
        let mut signal = None;
        if let Some((view, out)) = &mut view {
            signal = view.input(within);
            if let Err(failure) = view.refresh(layout, out) {
                control.stop.store(true, Relaxed);
                return Err(failure);
            }
        }
        let signal =
            signal.map_or_else(|| next_signal(within), |signal| signal.map(Received::by_key));
        if let Some(child) = child
            && let Ok(Some(status)) = child.try_wait()
        {
            control.stop.store(true, Relaxed);
            return Ok(End::Program(status_of(status)));
        }
        if let Some(received) = signal.filter(|received| received.signal != libc::SIGCHLD) {
            let grace = child.as_ref().map_or(Duration::ZERO, |_| GRACE);
            if let Some(child) = child {
                received.pass_on(child);
            }
            end_at.get_or_insert((Instant::now() + grace, received.signal));
        }
        if let Some((at, signal)) = end_at
            && Instant::now() >= at
        {
            control.stop.store(true, Relaxed);
            return Ok(End::Signal(signal));
        }
        if child.is_none() && process.is_some_and(is_gone) {
            control.stop.store(true, Relaxed);
            return Ok(End::Gone);
        }
        if supervisor.is_some_and(PageSupervisor::was_killed) {
            control.stop.store(true, Relaxed);
            return Ok(End::Unshared);
        }
        if observer.is_done() {
            return Ok(End::Observer);
        }
    }
}

/// Waits for the program's end after the run, and returns its status. Passes signals on to the
/// program. If the program does not end soon after a signal, returns the status of that signal.
pub(super) fn wait_for_exit(child: &mut Child) -> i32 {
    let mut end_at: Option<(Instant, i32)> = None;
    loop {
        if let Ok(Some(status)) = child.try_wait() {
            return status_of(status);
        }
        if let Some((at, signal)) = end_at
            && Instant::now() >= at
        {
            return 128 + signal;
        }
        let within = if end_at.is_some() { CHECK_EVERY } else { MAX_UPDATE };
        let signal = next_signal(within);
        if let Some(received) = signal.filter(|received| received.signal != libc::SIGCHLD) {
            received.pass_on(child);
            end_at.get_or_insert((Instant::now() + GRACE, received.signal));
        }
    }
}

fn is_gone(process: u32) -> bool {
    elfen_machine::process::stat(process).is_none()
}

/// A signal that this process received.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Received {
    signal: i32,
    /// Whether the terminal sent the signal. Then the program received it too, and it is not passed
    /// on.
    is_from_terminal: bool,
}

impl Received {
    /// A signal for a key at the terminal. No process has received this signal.
    fn by_key(signal: i32) -> Self {
        Self { signal, is_from_terminal: false }
    }

    fn pass_on(self, child: &Child) {
        if !self.is_from_terminal {
            let pid = nix::unistd::Pid::from_raw(child.id().cast_signed());
            let _gone = nix::sys::signal::kill(pid, Signal::try_from(self.signal).ok());
        }
    }
}

fn next_signal(within: Duration) -> Option<Received> {
    let within = libc::timespec {
        tv_sec: i64::try_from(within.as_secs()).unwrap_or(0),
        tv_nsec: within.subsec_nanos().into(),
    };
    let set = handled_signals();
    let mut info = std::mem::MaybeUninit::<libc::siginfo_t>::zeroed();
    // SAFETY: all three pointers are to local values that live until the call returns.
    let signal = unsafe { libc::sigtimedwait(set.as_ref(), info.as_mut_ptr(), &within) };
    // SAFETY: it was initialized with zero bytes, which are a valid siginfo_t.
    let code = unsafe { info.assume_init() }.si_code;
    (signal > 0).then_some(Received { signal, is_from_terminal: code == libc::SI_KERNEL })
}
