//! Ctrl-C and SIGTERM as a request to finish and report, instead of losing what was measured.
//!
//! The first one sets a flag and lets blocking system calls return; the second one ends the process
//! as usual.

use nix::errno::Errno;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

static ASKED: AtomicBool = AtomicBool::new(false);

extern "C" fn note(_signal: i32) {
    // Relaxed: a flag that is polled; nothing is published through it.
    ASKED.store(true, Relaxed);
}

/// Whether to finish early.
pub(crate) fn asked() -> bool {
    ASKED.load(Relaxed)
}

pub(crate) fn install() -> Result<(), Errno> {
    // SA_RESETHAND restores the default after the first signal. Without SA_RESTART, epoll_wait
    // returns at once.
    let action = SigAction::new(SigHandler::Handler(note), SaFlags::SA_RESETHAND, SigSet::empty());
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        // SAFETY: `note` only stores to an atomic, which is allowed in a signal handler at any
        // point.
        unsafe { sigaction(signal, &action) }?;
    }
    Ok(())
}
