//! A thread that freezes every fence as soon as the guard process ends.
//!
//! The daemon does this too, but only in its next round, and a round may wait for systemd for some
//! seconds, during which the fences would run unguarded. This thread waits only for the end of the
//! guard process. Like `elfen pause`, it finds the fences in the run folder.

use std::io;
use std::thread::{Builder, JoinHandle};

use nix::unistd::Pid;

use super::log::{Level, report};
use super::release::freeze;
use crate::fence::state::Folder;
use crate::pidfd::PidFd;

#[derive(Debug)]
pub(super) struct FreezeOnExit(JoinHandle<()>);

impl FreezeOnExit {
    /// `keeper` is a child that has not been reaped.
    pub(super) fn start(keeper: Pid, folder: &Folder) -> io::Result<Self> {
        let pid = keeper.as_raw().unsigned_abs();
        let process = PidFd::open(pid, || true).ok_or_else(io::Error::last_os_error)?;
        let folder = folder.clone();
        let thread = Builder::new().name("elfend-freezer".to_owned());
        thread.spawn(move || freeze_after(&process, &folder)).map(Self)
    }

    /// Waits for the thread, after the guard process has ended. So later thaws come after this
    /// freeze, and no such thread exists while the next guard process is forked.
    pub(super) fn join(self) {
        if self.0.join().is_err() {
            report(Level::Error, "the thread that freezes fences at once has panicked");
        }
    }
}

fn freeze_after(keeper: &PidFd, folder: &Folder) {
    keeper.await_end();
    if let Err(failure) = freeze(folder) {
        report(Level::Error, failure);
    }
}
