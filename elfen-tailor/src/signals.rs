//! Receives Ctrl-C and SIGTERM between polls of the rings, so that a recording is written
//! completely.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::time::TimeSpec;

/// The signals that end a recording. They are blocked until this value is dropped.
#[derive(Debug)]
pub struct EndSignals {
    signals: SignalFd,
    before: SigSet,
}

impl EndSignals {
    pub fn new() -> io::Result<Self> {
        let mut ours = SigSet::empty();
        ours.extend([Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]);
        let before = SigSet::thread_get_mask()?;
        ours.thread_block()?;
        let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
        Ok(Self { signals: SignalFd::with_flags(&ours, flags)?, before })
    }

    /// Waits for a signal, at most for `at_most`. Returns the number of a signal that has arrived.
    pub fn wait(&self, at_most: Duration) -> Option<i32> {
        let mut ready = [PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
        // Another signal may end the wait early; the caller checks its clock.
        let _woken = ppoll(&mut ready, Some(TimeSpec::from_duration(at_most)), None);
        self.take()
    }

    /// The number of a signal that has arrived. Does not wait.
    pub fn take(&self) -> Option<i32> {
        let signal = self.signals.read_signal().ok().flatten()?;
        i32::try_from(signal.ssi_signo).ok()
    }
}

impl AsFd for EndSignals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.signals.as_fd()
    }
}

impl Drop for EndSignals {
    fn drop(&mut self) {
        // Restores the signal mask that this thread had before.
        let _same = self.before.thread_set_mask();
    }
}
