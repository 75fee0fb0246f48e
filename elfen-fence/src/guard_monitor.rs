//! The daemon's view of the guard process: whether its guards are ready, and when to start another.

use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::wait::waitpid;
use nix::unistd::Pid;

use super::guard_process::{self, GuardInputs, GuardProcess};
use super::log::{Level, report};
use super::release::freeze;
use elfen_machine::fence::state::Folder;
use elfen_machine::fence::status::Frozen;
use elfen_machine::pidfd::PidFd;
use elfen_run::liveness::Pulse;

/// The shortest time between two starts of guard processes.
const LEAST_LIFE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct GuardMonitor {
    process: Option<GuardProcess>,
    /// Freezes every fence when the guard process ends, even while the daemon waits for systemd.
    freeze_on_exit: Option<FreezeOnExit>,
    /// Whether its guards have started.
    is_ready: bool,
    /// Whether one of its guards is missing.
    lacks_guard: bool,
    /// Whether it has been silent for too long.
    is_hung: bool,
    started_at: Instant,
    /// How many guard processes have ended.
    pub(super) lost: u64,
}

impl GuardMonitor {
    pub(super) fn new() -> Self {
        Self {
            process: None,
            freeze_on_exit: None,
            is_ready: false,
            lacks_guard: false,
            is_hung: false,
            started_at: Instant::now(),
            lost: 0,
        }
    }

    pub(super) fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(|process| process.child.pid.as_raw().unsigned_abs())
    }

    /// A descriptor that becomes readable when the guards have started.
    pub(super) fn ready_fd(&self) -> Option<RawFd> {
        let process = self.process.as_ref().filter(|_| !self.is_ready);
        process.map(|process| process.ready.as_raw_fd())
    }

    /// The reason to keep fences frozen: no guards, or guards that may enforce nothing.
    pub(super) fn reason_to_freeze(&self) -> Option<Frozen> {
        match self {
            Self { is_hung: true, .. } => Some(Frozen::Hung),
            Self { is_ready: false, .. } | Self { lacks_guard: true, .. } => {
                Some(Frozen::Unguarded)
            }
            _ => None,
        }
    }

    /// Whether the guard process is missing, and it is time to start one.
    pub(super) fn may_start(&self) -> bool {
        let lived = self.started_at.elapsed() >= LEAST_LIFE || self.lost <= 1;
        self.process.is_none() && lived
    }

    pub(super) fn start(&mut self, inputs: &GuardInputs<'_>) {
        self.started_at = Instant::now();
        match guard_process::start(inputs) {
            Ok(process) => {
                let freeze_on_exit = FreezeOnExit::start(process.child.pid, inputs.folder);
                let late = "when guards end, fences are frozen only in the next round";
                self.freeze_on_exit = freeze_on_exit
                    .inspect_err(|error| report(Level::Warning, format_args!("{late}: {error}")))
                    .ok();
                self.process = Some(process);
            }
            Err(error) => {
                report(Level::Error, format_args!("starting the guards' process: {error}"))
            }
        }
    }

    /// Checks the guard process. Freezes the fences first when the guards no longer enforce
    /// anything.
    pub(super) fn check(&mut self, mut freeze: impl FnMut(Frozen)) {
        let Some(process) = &mut self.process else { return };
        let pulse = process.child.observe();
        if pulse == Pulse::Ended {
            freeze(Frozen::Unguarded);
            let ended = waitpid(process.child.pid, None);
            if let Some(freeze_on_exit) = self.freeze_on_exit.take() {
                freeze_on_exit.join();
            }
            self.process = None;
            self.is_ready = false;
            self.lacks_guard = false;
            self.is_hung = false;
            self.lost += 1;
            report(Level::Error, format_args!("the guards' process has ended: {ended:?}"));
            return;
        }
        if pulse != Pulse::Alive && !self.is_hung {
            freeze(Frozen::Hung);
        }
        if pulse == Pulse::Lost {
            // Not waited for: the process may be stuck in the kernel for some time.
            process.child.kill();
        }
        self.is_hung = pulse != Pulse::Alive;
        if process.child.lacks_guard() && !self.lacks_guard {
            freeze(Frozen::Unguarded);
        }
        self.lacks_guard = process.child.lacks_guard();
        if !self.is_ready {
            let mut waits = [PollFd::new(process.ready.as_fd(), PollFlags::POLLIN)];
            let readable = poll(&mut waits, PollTimeout::ZERO).is_ok_and(|ready| ready > 0);
            // End of file means that the process has ended, which the next round notices.
            self.is_ready = readable && process.ready.read(&mut [0]).is_ok_and(|bytes| bytes == 1);
        }
    }

    /// Ends the guard process, to start another or none. The caller has frozen every fence.
    pub(super) fn stop(&mut self) {
        self.is_ready = false;
        self.lacks_guard = false;
        self.is_hung = false;
        let Some(process) = self.process.take() else { return };
        process.child.kill();
        // Fails only if it has ended and was reaped.
        let _reaped = waitpid(process.child.pid, None);
        if let Some(freeze_on_exit) = self.freeze_on_exit.take() {
            freeze_on_exit.join();
        }
    }
}

/// A thread that freezes every fence as soon as the guard process ends.
///
/// The daemon does this too, but only in its next round, and a round may wait for systemd for some
/// seconds, during which the fences would run unguarded. This thread waits only for the end of the
/// guard process. Like `elfen pause`, it finds the fences in the run folder.
#[derive(Debug)]
struct FreezeOnExit(JoinHandle<()>);

impl FreezeOnExit {
    /// `process` is a child that has not been reaped.
    fn start(process: Pid, folder: &Folder) -> io::Result<Self> {
        let pid = process.as_raw().unsigned_abs();
        let process = PidFd::open(pid, || true).ok_or_else(io::Error::last_os_error)?;
        let folder = folder.clone();
        let thread = Builder::new().name("elfend-freezer".to_owned());
        thread.spawn(move || freeze_after(&process, &folder)).map(Self)
    }

    /// Waits for the thread, after the guard process has ended. So later thaws come after this
    /// freeze, and no such thread exists while the next guard process is forked.
    fn join(self) {
        if self.0.join().is_err() {
            report(Level::Error, "the thread that freezes fences at once has panicked");
        }
    }
}

fn freeze_after(process: &PidFd, folder: &Folder) {
    process.await_end();
    if let Err(failure) = freeze(folder) {
        report(Level::Error, failure);
    }
}
