//! A running thread of another process that is stopped to look at it, and to copy its process.

use super::calls::{TouchError, attach, detach, stop_in_code};
use super::tracee::Tracee;

/// A thread that is stopped in its own code, to look at it. Dropping this value resumes it. It also
/// goes on if this process is killed.
#[derive(Debug)]
pub struct Paused {
    thread: libc::pid_t,
    pub registers: libc::user_regs_struct,
}

impl Paused {
    /// Attaches to a thread and stops it.
    pub fn stop(thread: u32) -> Result<Self, TouchError> {
        let thread = thread.cast_signed();
        attach(thread, stop_in_code).map(|registers| Self { thread, registers })
    }

    pub fn tracee(&self) -> Tracee {
        Tracee(self.thread)
    }
}

impl Drop for Paused {
    fn drop(&mut self) {
        detach(self.thread, 0);
    }
}
