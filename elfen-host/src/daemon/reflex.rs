//! The thread that freezes every fence as soon as the keeper ends.
//!
//! The daemon does so too, at its next round; but a round may last for as long as a systemd that
//! does not answer is waited for, and for that long nobody would guard what runs. So this thread
//! waits for nothing but the keeper's end, and goes by what is noted, as the kill switch does.

use std::io;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::thread::{Builder, JoinHandle};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::Pid;

use super::log::{Level, say};
use super::release::freeze;
use crate::fence::state::Folder;

#[derive(Debug)]
pub(super) struct Reflex(JoinHandle<()>);

impl Reflex {
    /// `keeper` is a child that nobody has reaped yet.
    pub(super) fn at_the_end_of(keeper: Pid, folder: &Folder) -> io::Result<Self> {
        // SAFETY: pidfd_open takes numbers.
        let process = unsafe { libc::syscall(libc::SYS_pidfd_open, keeper.as_raw(), 0) };
        if process < 0 {
            return Err(io::Error::last_os_error());
        }
        let process = i32::try_from(process).map_err(io::Error::other)?;
        // SAFETY: the kernel has just given us this descriptor.
        let process = unsafe { OwnedFd::from_raw_fd(process) };
        let folder = folder.clone();
        let thread = Builder::new().name("elfend-reflex".to_owned());
        thread.spawn(move || freeze_after(&process, &folder)).map(Self)
    }

    /// Once it has frozen what is noted: the keeper has ended. What freezes or thaws fences later
    /// comes later, and a keeper that is forked off has no thread of this kind beside it.
    pub(super) fn await_end(self) {
        if self.0.join().is_err() {
            say(Level::Error, "the thread that freezes fences at once has panicked");
        }
    }
}

fn freeze_after(keeper: &OwnedFd, folder: &Folder) {
    let mut ended = [PollFd::new(keeper.as_fd(), PollFlags::POLLIN)];
    while let Err(nix::errno::Errno::EINTR) = poll(&mut ended, PollTimeout::NONE) {}
    if let Err(failure) = freeze(folder) {
        say(Level::Error, failure);
    }
}
