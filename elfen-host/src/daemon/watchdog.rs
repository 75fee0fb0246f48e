//! The process that freezes every fence when the daemon has ended, whatever else has.
//!
//! Daemon and keeper each freeze fences when the other ends. If both are killed at once, as by the
//! out-of-memory killer or a container runtime, neither is left to. This process does nothing else,
//! and stands apart: in a session of its own, and on version 2 of cgroups in a cgroup of its own
//! next to the daemon's, which neither `cgroup.kill` nor a group's out-of-memory kill reaches.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill, sigprocmask};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork, setsid};

use super::log::{Level, say};
use super::release::freeze;
use crate::cgroup::{CgroupPath, Group, Hierarchies, Version};
use crate::fence::state::Folder;
use crate::pidfd::PidFd;

const NAME: &std::ffi::CStr = c"elfend-watchdog";
/// One that ends again and again is started this often.
const LEAST_LIFE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Watchdog {
    folder: Folder,
    /// Its own cgroup's; `None` where there is no version 2.
    own: Option<PathBuf>,
    process: Option<Pid>,
    began: Option<Instant>,
}

impl Watchdog {
    pub(super) fn start(folder: &Folder, hierarchies: &Hierarchies, home: &CgroupPath) -> Self {
        let mut watchdog = Self {
            folder: folder.clone(),
            own: own(hierarchies, home),
            process: None,
            began: None,
        };
        watchdog.mind();
        watchdog
    }

    /// Starts it where it does not run.
    pub(super) fn mind(&mut self) {
        if let Some(process) = self.process {
            let ended = waitpid(process, Some(WaitPidFlag::WNOHANG));
            if ended == Ok(WaitStatus::StillAlive) {
                return;
            }
            say(Level::Warning, format_args!("the watchdog has ended: {ended:?}"));
            self.process = None;
        }
        if self.began.is_some_and(|began| began.elapsed() < LEAST_LIFE) {
            return;
        }
        self.began = Some(Instant::now());
        match self.fork() {
            Ok(process) => self.process = Some(process),
            Err(error) => say(
                Level::Error,
                format_args!("no watchdog, so nothing freezes if all of elfend is killed: {error}"),
            ),
        }
    }

    fn fork(&self) -> io::Result<Pid> {
        let daemon =
            PidFd::open(std::process::id(), || true).ok_or_else(io::Error::last_os_error)?;
        // SAFETY: as for the keeper: the daemon's other threads make system calls alone.
        match unsafe { fork() }? {
            ForkResult::Parent { child } => Ok(child),
            ForkResult::Child => {
                self.stand_apart();
                daemon.await_end();
                if let Err(failure) = freeze(&self.folder) {
                    say(Level::Error, failure);
                }
                self.own.iter().for_each(|own| leave(own));
                // SAFETY: ends the process; what else the daemon had open was the daemon's.
                unsafe { libc::_exit(0) }
            }
        }
    }

    /// As far as it is allowed: a process that stands among others does the same work.
    fn stand_apart(&self) {
        let _deaf = sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), None);
        let _session = setsid();
        // SAFETY: this prctl takes a name that ends in NUL.
        unsafe { libc::prctl(libc::PR_SET_NAME, NAME.as_ptr()) };
        let _spared = fs::write("/proc/self/oom_score_adj", "-1000");
        if let Some(own) = &self.own {
            let _made = fs::create_dir(own);
            let _inside = fs::write(own.join("cgroup.procs"), "0");
        }
    }
}

impl Drop for Watchdog {
    /// The daemon has frozen what has to be.
    fn drop(&mut self) {
        if let Some(process) = self.process.take() {
            // The daemon's child; both can fail only if it is gone already.
            let _ended = kill(process, Signal::SIGKILL);
            let _reaped = waitpid(process, None);
        }
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
