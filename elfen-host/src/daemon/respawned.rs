//! A child of the daemon that is started again where it has ended.

use std::io;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::log::{Level, say};

/// One that ends again and again is started this often.
const LEAST_LIFE: Duration = Duration::from_secs(1);

/// Ends with the daemon.
#[derive(Debug, Default)]
pub(super) struct Respawned {
    process: Option<Pid>,
    began: Option<Instant>,
}

impl Respawned {
    /// Starts it where it does not run.
    pub(super) fn mind(
        &mut self,
        name: &str,
        start: impl FnOnce() -> io::Result<Pid>,
    ) -> io::Result<()> {
        if let Some(process) = self.process {
            let ended = waitpid(process, Some(WaitPidFlag::WNOHANG));
            if ended == Ok(WaitStatus::StillAlive) {
                return Ok(());
            }
            say(Level::Warning, format_args!("the {name} has ended: {ended:?}"));
            self.process = None;
        }
        if self.began.is_none_or(|began| began.elapsed() >= LEAST_LIFE) {
            self.began = Some(Instant::now());
            self.process = Some(start()?);
        }
        Ok(())
    }

    pub(super) fn end(&mut self) {
        if let Some(process) = self.process.take() {
            // The daemon's child; both can fail only if it is gone already.
            let _ended = kill(process, Signal::SIGKILL);
            let _reaped = waitpid(process, None);
        }
    }
}

impl Drop for Respawned {
    fn drop(&mut self) {
        self.end();
    }
}
