//! Processes of tests: waits for their actions, and ends processes that a test has started.

#![allow(dead_code, reason = "each test program uses some of these functions")]

use std::ops::{Deref, DerefMut};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Long enough for a machine that is busy with other work.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Waits for a change that other processes make.
#[track_caller]
pub(crate) fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "{what} does not happen");
        sleep(Duration::from_millis(5));
    }
}

/// A process that is killed when this value drops, also if a test fails.
pub(crate) struct KilledOnDrop(pub(crate) Child);

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        // The process may have ended already. SIGKILL also ends a stopped process.
        drop(self.0.kill());
        // A failed test may have left the process in a frozen cgroup, where it does not end.
        if !std::thread::panicking() {
            drop(self.0.wait());
        }
    }
}

impl Deref for KilledOnDrop {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for KilledOnDrop {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

/// Lets SIGINT end a command. A shell starts background jobs with this signal ignored, and their
/// descendants inherit that.
pub(crate) fn heed_sigint(command: &mut Command) -> &mut Command {
    let reset = || {
        // SAFETY: the default action needs no handler.
        unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) };
        Ok(())
    };
    // SAFETY: between fork and exec, `reset` makes one system call.
    unsafe { command.pre_exec(reset) }
}
