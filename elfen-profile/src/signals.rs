//! Signals to this command while a program runs: the program gets them.
//!
//! The terminal sends Ctrl-C to the program itself. What other processes send to this command is
//! passed on. The command ends when the program has ended.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

/// The process that signals are passed on to; 0 for none.
static PROGRAM: AtomicI32 = AtomicI32::new(0);

static STOPS: AtomicBool = AtomicBool::new(false);
static STOPPED: AtomicBool = AtomicBool::new(false);

const PASSED_ON: [Signal; 4] = [Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM, Signal::SIGHUP];

/// Passes signals on from here on. A handler, unlike an ignored signal, is not inherited by the
/// program.
pub(crate) fn pass_on() -> io::Result<()> {
    let handler = SigHandler::SigAction(handle);
    let action = SigAction::new(handler, SaFlags::SA_RESTART, SigSet::empty());
    for signal in PASSED_ON {
        // SAFETY: the handler loads an atomic and makes a system call.
        unsafe { sigaction(signal, &action) }?;
    }
    // A limit on the size of files becomes an error of the call that exceeds it.
    let action = SigAction::new(SigHandler::Handler(nothing), SaFlags::empty(), SigSet::empty());
    // SAFETY: the handler does nothing.
    unsafe { sigaction(Signal::SIGXFSZ, &action) }?;
    Ok(())
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
