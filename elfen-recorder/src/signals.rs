//! Ctrl-C and SIGTERM, taken between two looks at the rings, so that what is recorded is whole.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::time::TimeSpec;

/// The signals that end a recording, held back as long as this lives.
#[derive(Debug)]
pub struct Ending {
    signals: SignalFd,
    before: SigSet,
}

impl Ending {
    pub fn new() -> io::Result<Self> {
        let mut ours = SigSet::empty();
        ours.extend([Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]);
        let before = SigSet::thread_get_mask()?;
        ours.thread_block()?;
        let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
        Ok(Self { signals: SignalFd::with_flags(&ours, flags)?, before })
    }

    /// Waits for so long; sooner, the number of the signal that came.
    pub fn wait(&self, at_most: Duration) -> Option<i32> {
        let mut ready = [PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
        // Interrupted by another signal: the caller looks at its clock.
        let _woken = ppoll(&mut ready, Some(TimeSpec::from_duration(at_most)), None);
        self.came()
    }

    /// The number of a signal that has come, without waiting for one.
    pub fn came(&self) -> Option<i32> {
        let came = self.signals.read_signal().ok().flatten()?;
        i32::try_from(came.ssi_signo).ok()
    }
}

impl AsFd for Ending {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.signals.as_fd()
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        // The mask was this thread's a moment ago.
        let _same = self.before.thread_set_mask();
    }
}
