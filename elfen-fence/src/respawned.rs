//! A child process of the daemon that is started again when it has ended.

use std::io;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::log::{Level, report};

/// The shortest time between two starts.
const LEAST_LIFE: Duration = Duration::from_secs(1);

/// Dropping this ends the process.
#[derive(Debug, Default)]
pub(super) struct RespawnedChild {
    process: Option<Pid>,
    started_at: Option<Instant>,
}

impl RespawnedChild {
    /// Starts the process if it does not run.
    pub(super) fn ensure_running(
        &mut self,
        name: &str,
        start: impl FnOnce() -> io::Result<Pid>,
    ) -> io::Result<()> {
        if let Some(process) = self.process {
            let ended = waitpid(process, Some(WaitPidFlag::WNOHANG));
            if ended == Ok(WaitStatus::StillAlive) {
                return Ok(());
            }
            report(Level::Warning, format_args!("the {name} has ended: {ended:?}"));
            self.process = None;
        }
        if self.started_at.is_none_or(|started_at| started_at.elapsed() >= LEAST_LIFE) {
            self.started_at = Some(Instant::now());
            self.process = Some(start()?);
        }
        Ok(())
    }

    pub(super) fn end(&mut self) {
        if let Some(process) = self.process.take() {
            // The process is our child. Both calls fail only if it has ended and was reaped.
            let _ended = kill(process, Signal::SIGKILL);
            let _reaped = waitpid(process, None);
        }
    }
}

impl Drop for RespawnedChild {
    fn drop(&mut self) {
        self.end();
    }
}
