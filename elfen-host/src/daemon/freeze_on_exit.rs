//! The thread that freezes every fence as soon as the keeper ends.
//!
//! The daemon does so too, at its next round; but a round may last for as long as a systemd that
//! does not answer is waited for, and for that long nobody would guard what runs. So this thread
//! waits for nothing but the keeper's end, and goes by what is noted, as the kill switch does.

use std::io;
use std::thread::{Builder, JoinHandle};

use nix::unistd::Pid;

use super::log::{Level, say};
use super::release::freeze;
use crate::fence::state::Folder;
use crate::pidfd::PidFd;

#[derive(Debug)]
pub(super) struct Reflex(JoinHandle<()>);

impl Reflex {
    /// `keeper` is a child that nobody has reaped yet.
    pub(super) fn at_the_end_of(keeper: Pid, folder: &Folder) -> io::Result<Self> {
        let pid = keeper.as_raw().unsigned_abs();
        let process = PidFd::open(pid, || true).ok_or_else(io::Error::last_os_error)?;
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

fn freeze_after(keeper: &PidFd, folder: &Folder) {
    keeper.await_end();
    if let Err(failure) = freeze(folder) {
        say(Level::Error, failure);
    }
}
