//! The watchdog: a process that freezes every fence when the daemon has ended.
//!
//! Daemon and guard process each freeze the fences when the other ends. If both are killed at once,
//! as by the out-of-memory killer or a container runtime, the watchdog remains. It does nothing
//! else. It has its own session and, with cgroups version 2, its own cgroup next to the daemon's,
//! so neither `cgroup.kill` nor a group's out-of-memory kill reaches it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use nix::sys::signal::{SigSet, SigmaskHow, sigprocmask};
use nix::unistd::{ForkResult, Pid, fork, setsid};

use super::log::{Level, report};
use super::release::freeze;
use super::respawned::RespawnedChild;
use elfen_machine::cgroup::{CgroupPath, Group, Hierarchies, Version};
use elfen_machine::fence::state::Folder;
use elfen_machine::pidfd::PidFd;

const NAME: &std::ffi::CStr = c"elfend-watchdog";

#[derive(Debug)]
pub(super) struct Watchdog {
    folder: Folder,
    /// The folder of its own cgroup; `None` without cgroups version 2.
    cgroup: Option<PathBuf>,
    process: RespawnedChild,
}

impl Watchdog {
    pub(super) fn start(folder: &Folder, hierarchies: &Hierarchies, home: &CgroupPath) -> Self {
        let mut watchdog = Self {
            folder: folder.clone(),
            cgroup: cgroup_of_watchdog(hierarchies, home),
            process: RespawnedChild::default(),
        };
        watchdog.ensure_running();
        watchdog
    }

    /// Starts the process if it does not run.
    pub(super) fn ensure_running(&mut self) {
        let folder = &self.folder;
        let cgroup = self.cgroup.as_deref();
        if let Err(error) = self.process.ensure_running("watchdog", || watch(folder, cgroup)) {
            report(
                Level::Error,
                format_args!(
                    "no watchdog, so fences keep running if all processes of elfend are \
                    killed: {error}"
                ),
            );
        }
    }
}

fn watch(folder: &Folder, cgroup: Option<&Path>) -> io::Result<Pid> {
    let daemon = PidFd::open(std::process::id(), || true).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the daemon's other threads only make system calls, so the child may run any code.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => Ok(child),
        ForkResult::Child => {
            separate(cgroup);
            daemon.await_end();
            if let Err(failure) = freeze(folder) {
                report(Level::Error, failure);
            }
            if let Some(cgroup) = cgroup {
                leave_cgroup(cgroup);
            }
            // SAFETY: ends the process without dropping its copies of the daemon's values.
            unsafe { libc::_exit(0) }
        }
    }
}

/// Separates this process from the daemon as far as permitted. The work does not depend on it.
fn separate(cgroup: Option<&Path>) {
    let _deaf = sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), None);
    let _session = setsid();
    // SAFETY: this prctl takes a name that ends in NUL.
    unsafe { libc::prctl(libc::PR_SET_NAME, NAME.as_ptr()) };
    let _spared = fs::write("/proc/self/oom_score_adj", "-1000");
    if let Some(cgroup) = cgroup {
        let _made = fs::create_dir(cgroup);
        let _inside = fs::write(cgroup.join("cgroup.procs"), "0");
    }
}

impl Drop for Watchdog {
    /// The daemon has frozen the fences.
    fn drop(&mut self) {
        self.process.end();
        if let Some(cgroup) = &self.cgroup {
            let _removed = fs::remove_dir(cgroup);
        }
    }
}

fn cgroup_of_watchdog(hierarchies: &Hierarchies, home: &CgroupPath) -> Option<PathBuf> {
    let beside = Group::new(hierarchies, home.parent().child("elfend-watchdog"));
    let freezer = beside.freezer();
    (freezer.version == Version::Two).then_some(freezer.folder)
}

/// Moves this process to the root cgroup, or the root of its namespace, so that its own cgroup can
/// be removed.
fn leave_cgroup(cgroup: &Path) {
    let mut above =
        cgroup.ancestors().skip(1).filter(|folder| folder.join("cgroup.procs").exists());
    let _left = above.any(|folder| fs::write(folder.join("cgroup.procs"), "0").is_ok());
    let _removed = fs::remove_dir(cgroup);
}
