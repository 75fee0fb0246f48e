//! Signals to this command while a program runs: the program gets them.
//!
//! The terminal sends Ctrl-C to the program itself. What other processes send to this command is
//! passed on. The command ends when the program has ended.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

/// The process that signals are passed on to; 0 for none.
static PROGRAM: AtomicI32 = AtomicI32::new(0);

static IGNORES_CHILDREN: AtomicBool = AtomicBool::new(false);
static STOPS: AtomicBool = AtomicBool::new(false);
static STOPPED: AtomicBool = AtomicBool::new(false);

/// All that would end this command, and that other processes or limits may send.
const PASSED_ON: [Signal; 13] = [
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGALRM,
    Signal::SIGVTALRM,
    Signal::SIGPROF,
    Signal::SIGXCPU,
    Signal::SIGIO,
    Signal::SIGPWR,
    Signal::SIGSTKFLT,
];

/// Passes signals on from here on. A handler, unlike an ignored signal, is not inherited by the
/// program.
pub(crate) fn pass_on() -> io::Result<()> {
    let handler = SigHandler::SigAction(handle);
    let action = SigAction::new(handler, SaFlags::SA_RESTART, SigSet::empty());
    for signal in PASSED_ON {
        handle_unless_ignored(signal, &action)?;
    }
    // A limit on the size of files becomes an error of the call that exceeds it.
    let action = SigAction::new(SigHandler::Handler(nothing), SaFlags::empty(), SigSet::empty());
    handle_unless_ignored(Signal::SIGXFSZ, &action)?;
    // Children of a process that ignores it leave no status.
    let action = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
    // SAFETY: it has no handler.
    let before = unsafe { sigaction(Signal::SIGCHLD, &action) }?;
    IGNORES_CHILDREN.store(matches!(before.handler(), SigHandler::SigIgn), Ordering::Relaxed);
    Ok(())
}

/// The program inherits that a signal is ignored, as with `nohup`.
fn handle_unless_ignored(signal: Signal, action: &SigAction) -> io::Result<()> {
    // SAFETY: the handlers of this file load an atomic and make a system call, or do nothing.
    let before = unsafe { sigaction(signal, action) }?;
    if matches!(before.handler(), SigHandler::SigIgn) {
        // SAFETY: it has no handler.
        unsafe { sigaction(signal, &before) }?;
    }
    Ok(())
}

/// Makes a program ignore the signals that it would ignore without this command. Rust ignores
/// SIGPIPE itself; whether it was ignored before is not known.
pub(crate) fn pass_to(command: &mut Command) {
    if IGNORES_CHILDREN.load(Ordering::Relaxed) {
        let ignore = || {
            // SAFETY: it has no handler.
            unsafe { nix::sys::signal::signal(Signal::SIGCHLD, SigHandler::SigIgn) }?;
            Ok(())
        };
        // SAFETY: the closure makes a system call only.
        unsafe { command.pre_exec(ignore) };
    }
}

/// Makes the signals end a recording of a process that was not started here.
pub(crate) fn stop_on() -> io::Result<()> {
    STOPS.store(true, Ordering::Relaxed);
    pass_on()
}

/// Whether a signal has ended the recording.
pub(crate) fn is_stopped() -> bool {
    STOPPED.load(Ordering::Relaxed)
}

/// Names the process that gets the signals; 0 for none.
pub(crate) fn set_program(process: i32) {
    PROGRAM.store(process, Ordering::Relaxed);
}

extern "C" fn nothing(_: i32) {}

extern "C" fn handle(signal: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    if STOPS.load(Ordering::Relaxed) {
        STOPPED.store(true, Ordering::Relaxed);
        return;
    }
    // SAFETY: the kernel passes a valid pointer to a handler with SA_SIGINFO.
    let sent = unsafe { (*info).si_code } <= 0;
    let program = PROGRAM.load(Ordering::Relaxed);
    if sent && program > 0 {
        // SAFETY: takes numbers.
        unsafe { libc::kill(program, signal) };
    }
}
