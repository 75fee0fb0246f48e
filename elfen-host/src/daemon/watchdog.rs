//! The process that freezes every fence when the daemon has ended, whatever else has.
//!
//! Daemon and keeper each freeze fences when the other ends. If both are killed at once, as by the
//! out-of-memory killer or a container runtime, neither is left to. This process does nothing else,
//! and stands apart: in a session of its own, and on version 2 of cgroups in a cgroup of its own
//! next to the daemon's, which neither `cgroup.kill` nor a group's out-of-memory kill reaches.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use nix::sys::signal::{SigSet, SigmaskHow, sigprocmask};
use nix::unistd::{ForkResult, Pid, fork, setsid};

use super::log::{Level, say};
use super::release::freeze;
use super::respawned::Respawned;
use crate::cgroup::{CgroupPath, Group, Hierarchies, Version};
use crate::fence::state::Folder;
use crate::pidfd::PidFd;

const NAME: &std::ffi::CStr = c"elfend-watchdog";

#[derive(Debug)]
pub(super) struct Watchdog {
    folder: Folder,
    /// Its own cgroup's; `None` where there is no version 2.
    own: Option<PathBuf>,
    process: Respawned,
}

impl Watchdog {
    pub(super) fn start(folder: &Folder, hierarchies: &Hierarchies, home: &CgroupPath) -> Self {
        let mut watchdog = Self {
            folder: folder.clone(),
            own: own(hierarchies, home),
            process: Respawned::default(),
        };
        watchdog.mind();
        watchdog
    }

    /// Starts it where it does not run.
    pub(super) fn mind(&mut self) {
        let (folder, own) = (&self.folder, self.own.as_deref());
        if let Err(error) = self.process.mind("watchdog", || watch(folder, own)) {
            say(
                Level::Error,
                format_args!("no watchdog, so nothing freezes if all of elfend is killed: {error}"),
            );
        }
    }
}

fn watch(folder: &Folder, own: Option<&Path>) -> io::Result<Pid> {
    let daemon = PidFd::open(std::process::id(), || true).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: as for the keeper: the daemon's other threads make system calls alone.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => Ok(child),
        ForkResult::Child => {
            stand_apart(own);
            daemon.await_end();
            if let Err(failure) = freeze(folder) {
                say(Level::Error, failure);
            }
            own.iter().for_each(|own| leave(own));
            // SAFETY: ends the process; what else the daemon had open was the daemon's.
            unsafe { libc::_exit(0) }
        }
    }
}

/// As far as it is allowed: a process that stands among others does the same work.
fn stand_apart(own: Option<&Path>) {
    let _deaf = sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), None);
    let _session = setsid();
    // SAFETY: this prctl takes a name that ends in NUL.
    unsafe { libc::prctl(libc::PR_SET_NAME, NAME.as_ptr()) };
    let _spared = fs::write("/proc/self/oom_score_adj", "-1000");
    if let Some(own) = own {
        let _made = fs::create_dir(own);
        let _inside = fs::write(own.join("cgroup.procs"), "0");
    }
}

impl Drop for Watchdog {
    /// The daemon has frozen what has to be.
    fn drop(&mut self) {
        self.process.end();
        self.own.iter().for_each(|own| _ = fs::remove_dir(own));
    }
}

fn own(hierarchies: &Hierarchies, home: &CgroupPath) -> Option<PathBuf> {
    let beside = Group::new(hierarchies, home.parent().child("elfend-watchdog"));
    let freezer = beside.freezer();
    (freezer.version == Version::Two).then_some(freezer.folder)
}

/// Goes to the root, or whatever the namespace has as such: a cgroup that is not empty stays.
fn leave(own: &Path) {
    let mut above = own.ancestors().skip(1).filter(|folder| folder.join("cgroup.procs").exists());
    let _left = above.any(|folder| fs::write(folder.join("cgroup.procs"), "0").is_ok());
    let _removed = fs::remove_dir(own);
}
