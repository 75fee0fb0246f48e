//! Identifies a process by a pidfd, which stays correct when the process id is reused.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::process::descends;

#[derive(Debug)]
pub struct PidFd {
    process: OwnedFd,
    pid: u32,
}

impl PidFd {
    /// Opens the process with this id, if `is_it` accepts it once the pidfd is open. `None` also if
    /// the process does not exist.
    pub fn open(pid: u32, is_it: impl Fn() -> bool) -> Option<Self> {
        let id = libc::pid_t::try_from(pid).ok()?;
        // SAFETY: pidfd_open takes numbers.
        let process = unsafe { libc::syscall(libc::SYS_pidfd_open, id, 0) };
        let process = i32::try_from(process).ok().filter(|&fd| fd >= 0)?;
        // SAFETY: the kernel has just created this descriptor for us.
        let process = unsafe { OwnedFd::from_raw_fd(process) };
        let opened = Self { process, pid };
        // `is_it` runs after the pidfd was opened. If the process of the pidfd still runs after
        // that, the id belonged to it all the time, so `is_it` examined the same process.
        (is_it() && !opened.has_ended()).then_some(opened)
    }

    /// Opens the process with this id, if it descends from the calling process.
    pub fn descendant(pid: u32) -> Option<Self> {
        Self::open(pid, || descends(pid, std::process::id()))
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Sends a signal. Has no effect if the process has ended.
    pub fn send(&self, signal: i32) {
        let none = std::ptr::null::<libc::siginfo_t>();
        let process = self.process.as_raw_fd();
        // SAFETY: pidfd_send_signal takes numbers, and may have no siginfo.
        unsafe { libc::syscall(libc::SYS_pidfd_send_signal, process, signal, none, 0) };
    }

    pub fn await_end(&self) {
        let mut ended = [PollFd::new(self.process.as_fd(), PollFlags::POLLIN)];
        while let Err(Errno::EINTR) = poll(&mut ended, PollTimeout::NONE) {}
    }

    /// Waits until the process has ended, at most for `time`.
    pub fn await_end_for(&self, time: Duration) {
        let mut ended = [PollFd::new(self.process.as_fd(), PollFlags::POLLIN)];
        let time = PollTimeout::try_from(time).unwrap_or(PollTimeout::MAX);
        // A signal may interrupt the wait and make it shorter.
        let _ended = poll(&mut ended, time);
    }

    pub fn has_ended(&self) -> bool {
        has_ended(&self.process)
    }

    /// Whether the process has this thread now.
    pub fn has_thread(&self, thread: u32) -> bool {
        Path::new(&format!("/proc/{}/task/{thread}", self.pid)).exists() && !self.has_ended()
    }
}

/// Whether the process of a pidfd has ended.
pub fn has_ended(process: &OwnedFd) -> bool {
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
    fn only_the_intended_process_is_opened() {
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
