//! A process by a descriptor that stays its own: its id may be another process's at any time.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::process::descends;

#[derive(Debug)]
pub(crate) struct PidFd {
    process: OwnedFd,
    pid: u32,
}

impl PidFd {
    /// The process that has this id, if `is_it` says so once the descriptor is open. `None` also if
    /// there is none.
    pub(crate) fn open(pid: u32, is_it: impl Fn() -> bool) -> Option<Self> {
        let id = libc::pid_t::try_from(pid).ok()?;
        // SAFETY: pidfd_open takes numbers.
        let process = unsafe { libc::syscall(libc::SYS_pidfd_open, id, 0) };
        let process = i32::try_from(process).ok().filter(|&fd| fd >= 0)?;
        // SAFETY: the kernel has just given us this descriptor.
        let process = unsafe { OwnedFd::from_raw_fd(process) };
        let opened = Self { process, pid };
        // Asked after it was opened: the descriptor is of the process that has the id now. If that
        // one still runs afterwards, the answer was about it.
        (is_it() && !opened.has_ended()).then_some(opened)
    }

    /// The process that has this id, if it descends from the calling one.
    pub(crate) fn descendant(pid: u32) -> Option<Self> {
        Self::open(pid, || descends(pid, std::process::id()))
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// A process that has ended hears nothing.
    pub(crate) fn send(&self, signal: i32) {
        let none = std::ptr::null::<libc::siginfo_t>();
        let process = self.process.as_raw_fd();
        // SAFETY: takes numbers, and no information besides.
        unsafe { libc::syscall(libc::SYS_pidfd_send_signal, process, signal, none, 0) };
    }

    pub(crate) fn await_end(&self) {
        let mut ended = [PollFd::new(self.process.as_fd(), PollFlags::POLLIN)];
        while let Err(Errno::EINTR) = poll(&mut ended, PollTimeout::NONE) {}
    }

    pub(crate) fn has_ended(&self) -> bool {
        has_ended(&self.process)
    }

    /// Whether a thread is one of this process, as it runs now.
    pub(crate) fn has_thread(&self, thread: u32) -> bool {
        Path::new(&format!("/proc/{}/task/{thread}", self.pid)).exists() && !self.has_ended()
    }
}

/// Whether the process behind a descriptor has ended.
pub(crate) fn has_ended(process: &OwnedFd) -> bool {
    let mut waits = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
    poll(&mut waits, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    fn sleeper() -> Child {
        Command::new("sleep").arg("600").spawn().unwrap()
    }

    #[test]
    fn only_the_process_that_was_meant_is_opened() {
        let mut child = sleeper();
        assert!(PidFd::open(child.id(), || false).is_none());
        assert!(PidFd::descendant(std::os::unix::process::parent_id()).is_none());
        let opened = PidFd::descendant(child.id()).unwrap();
        assert!(opened.has_thread(child.id()) && !opened.has_thread(std::process::id()));
        opened.send(libc::SIGKILL);
        child.wait().unwrap();
        assert!(opened.has_ended() && !opened.has_thread(child.id()));
        assert!(PidFd::descendant(child.id()).is_none(), "it has ended");
    }
}
