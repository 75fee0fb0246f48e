//! The keeper as the daemon knows it: whether its guards stand, and another one when they do not.

use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};

use super::freeze_on_exit::Reflex;
use super::guard_process::{self, Duties, Keeper};
use super::heartbeat::Heard;
use super::log::{Level, say};
use crate::fence::status::Frozen;

/// A keeper that ends sooner than this after it started is started again only then.
const LEAST_LIFE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Guarding {
    keeper: Option<Keeper>,
    /// What freezes every fence when the keeper ends, whatever the daemon waits for then.
    reflex: Option<Reflex>,
    /// Whether its guards are known to stand.
    stands: bool,
    /// Whether it misses one of them since.
    misses: bool,
    /// Whether it has been silent for too long.
    hangs: bool,
    began: Instant,
    minded: Instant,
    /// How often it was lost.
    pub(super) lost: u64,
}

impl Guarding {
    pub(super) fn nobody() -> Self {
        let now = Instant::now();
        Self {
            keeper: None,
            reflex: None,
            stands: false,
            misses: false,
            hangs: false,
            began: now,
            minded: now,
            lost: 0,
        }
    }

    pub(super) fn pid(&self) -> Option<u32> {
        self.keeper.as_ref().map(|keeper| keeper.pid.as_raw().unsigned_abs())
    }

    /// What is readable when its guards stand.
    pub(super) fn awaited(&self) -> Option<RawFd> {
        let keeper = self.keeper.as_ref().filter(|_| !self.stands);
        keeper.map(|keeper| keeper.ready.as_raw_fd())
    }

    /// What speaks against running: that nobody guards.
    pub(super) fn against(&self) -> Option<Frozen> {
        match self {
            Self { hangs: true, .. } => Some(Frozen::Hung),
            Self { stands: false, .. } | Self { misses: true, .. } => Some(Frozen::Unguarded),
            _ => None,
        }
    }

    /// Whether there is none, and it is time for one.
    pub(super) fn may_start(&self) -> bool {
        let lived = self.began.elapsed() >= LEAST_LIFE || self.lost <= 1;
        self.keeper.is_none() && lived
    }

    pub(super) fn start(&mut self, duties: &Duties<'_>) {
        self.began = Instant::now();
        match guard_process::start(duties) {
            Ok(keeper) => {
                let reflex = Reflex::at_the_end_of(keeper.pid, duties.folder);
                let late = "when guards end, fences are frozen at the next round";
                self.reflex = reflex
                    .inspect_err(|error| say(Level::Warning, format_args!("{late}: {error}")))
                    .ok();
                self.keeper = Some(keeper);
            }
            Err(error) => say(Level::Error, format_args!("no process for guards: {error}")),
        }
    }

    /// Freezes first when nobody guards any more; asks afterwards.
    pub(super) fn mind(&mut self, mut freeze: impl FnMut(Frozen)) {
        let since = std::mem::replace(&mut self.minded, Instant::now()).elapsed();
        let Some(keeper) = &mut self.keeper else { return };
        let ended = waitpid(keeper.pid, Some(WaitPidFlag::WNOHANG));
        if !matches!(ended, Ok(WaitStatus::StillAlive)) {
            freeze(Frozen::Unguarded);
            self.reflex.take().into_iter().for_each(Reflex::await_end);
            (self.keeper, self.stands, self.misses, self.hangs) = (None, false, false, false);
            self.lost += 1;
            say(Level::Error, format_args!("the guards' process has ended: {ended:?}"));
            return;
        }
        let heard = keeper.silence.listen(keeper.beat.beats(), since);
        if heard != Heard::Lately && !self.hangs {
            freeze(Frozen::Hung);
        }
        if heard == Heard::GivenUp {
            // Nobody waits for it here: one that the kernel holds ends when it is let go.
            let _ended = kill(keeper.pid, Signal::SIGKILL);
        }
        self.hangs = heard != Heard::Lately;
        if keeper.beat.misses() && !self.misses {
            freeze(Frozen::Unguarded);
        }
        self.misses = keeper.beat.misses();
        if !self.stands {
            let mut waits = [PollFd::new(keeper.ready.as_fd(), PollFlags::POLLIN)];
            let readable = poll(&mut waits, PollTimeout::ZERO).is_ok_and(|ready| ready > 0);
            // The end of the pipe is the keeper's end, which is seen above the next time.
            self.stands = readable && keeper.ready.read(&mut [0]).is_ok_and(|bytes| bytes == 1);
        }
    }

    /// For good: what it kept is somebody else's. The caller has frozen every fence.
    pub(super) fn end(&mut self) {
        (self.stands, self.misses, self.hangs) = (false, false, false);
        let Some(keeper) = self.keeper.take() else { return };
        // Its child; both calls can fail only if it is gone already.
        let _ended = kill(keeper.pid, Signal::SIGKILL);
        let _reaped = waitpid(keeper.pid, None);
        self.reflex.take().into_iter().for_each(Reflex::await_end);
    }
}
