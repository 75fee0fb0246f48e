//! Calls the policy when it is due, with the time and the state of the servers.
//!
//! The interval of polls is half a millisecond by default, but tokio's timers count milliseconds.
//! So this module uses a timer of the kernel.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use elfen_console::output::warn;
use elfen_rt::clock::{monotonic_ns, nanos};
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::MissedTickBehavior;

use crate::observation::{Observation, Source};
use crate::policy::{Duplicate, Hedge, Server};
use crate::processes::{Change, ProcessChange};
use crate::shared::Shared;
use crate::watch::WatchedServer;

#[derive(Debug)]
pub(crate) struct PolicyDriver {
    shared: Arc<Shared>,
    observation: Option<Observation>,
    timer: TimerFd,
    poll_interval_ns: u64,
    next_poll_ns: Option<u64>,
}

/// The interval at which changes of processes are taken.
const CHANGES_EVERY: Duration = Duration::from_millis(200);

impl PolicyDriver {
    pub(crate) fn new(shared: Arc<Shared>, observation: Option<Observation>) -> io::Result<Self> {
        let flags = TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC;
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, flags)?;
        let poll_interval_ns = nanos(shared.settings.poll_interval);
        Ok(Self { shared, observation, timer, poll_interval_ns, next_poll_ns: None })
    }

    /// Drives the policy until the proxy ends.
    pub(crate) async fn run(mut self) -> io::Result<()> {
        let mut changes = tokio::time::interval(CHANGES_EVERY);
        changes.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let timer = Readable::new(&self.timer)?;
        let halts = match self.observation.as_ref().map(|observation| &observation.source) {
            Some(Source::Events(hazards)) => Some(Readable::new(hazards)?),
            _ => None,
        };
        let observes = self.observation.is_some();
        let flights = Arc::clone(&self.shared.flights);
        loop {
            let due_ns = self.on_time();
            self.set_timer(due_ns)?;
            tokio::select! {
                expired = timer.next() => expired?,
                () = flights.begin.notified() => {}
                changed = next(halts.as_ref()) => {
                    changed?;
                    let halts = self.observation.iter_mut().flat_map(Observation::take_halts);
                    for (server, halt, is_halted) in halts {
                        flights.decide(|hedge| hedge.set_halted(server, halt, is_halted));
                    }
                }
                _ = changes.tick(), if observes => self.handle_process_changes(),
            }
        }
    }

    fn set_timer(&self, due_ns: Option<u64>) -> io::Result<()> {
        let Some(due_ns) = due_ns else { return Ok(self.timer.unset()?) };
        // 0 would disarm the timer.
        let left = Duration::from_nanos(due_ns.saturating_sub(monotonic_ns()).max(1));
        let expiration = Expiration::OneShot(TimeSpec::from_duration(left));
        Ok(self.timer.set(expiration, TimerSetTimeFlags::empty())?)
    }

    /// Makes the decisions that are due. Returns when the next one is due.
    fn on_time(&mut self) -> Option<u64> {
        let flights = Arc::clone(&self.shared.flights);
        flights.decide_on_time(|hedge| {
            let now_ns = monotonic_ns();
            let mut duplicates = hedge.take_due(now_ns);
            if hedge.is_idle() {
                hedge.forget_sample();
                self.next_poll_ns = None;
            } else if let Some(Source::Clocks(servers)) =
                self.observation.as_mut().map(|observation| &mut observation.source)
            {
                let next_ns = self.next_poll_ns.get_or_insert(now_ns);
                if *next_ns <= now_ns {
                    *next_ns = now_ns.saturating_add(self.poll_interval_ns);
                    duplicates.extend(sample(hedge, servers, now_ns));
                }
            }
            let due_ns = [hedge.next_due_ns(), self.next_poll_ns].into_iter().flatten().min();
            (duplicates, due_ns)
        })
    }

    /// Handles changes of the servers' processes.
    fn handle_process_changes(&mut self) {
        let Some(Observation { process_watcher, source }) = &mut self.observation else { return };
        for ProcessChange { server, change, processes } in process_watcher.take() {
            match change {
                Change::Hidden => warn(&format!(
                    "you may not see which process serves {}, so its state is unknown; run this \
                     as root, or as the server's user",
                    self.shared.address(server)
                )),
                Change::Replaced => self.shared.restarted(server),
                Change::Partial => {}
            }
            if let Source::Clocks(servers) = source {
                servers[server.index()] = WatchedServer::of(&processes);
            }
        }
    }
}

/// Wakes a task when a descriptor becomes readable.
#[derive(Debug)]
pub(crate) struct Readable(AsyncFd<OwnedFd>);

impl Readable {
    pub(crate) fn new(descriptor: &impl AsFd) -> io::Result<Self> {
        let copy = descriptor.as_fd().try_clone_to_owned()?;
        // SAFETY: an OwnedFd stays the same open descriptor until it drops.
        let registered = unsafe { AsyncFd::register_with_interest(copy, Interest::READABLE) };
        Ok(Self(registered?))
    }

    /// Waits until the descriptor is readable again.
    pub(crate) async fn next(&self) -> io::Result<()> {
        self.0.readable().await?.clear_ready();
        Ok(())
    }
}

/// Waits for the descriptor. Without a descriptor, waits forever.
async fn next(readable: Option<&Readable>) -> io::Result<()> {
    match readable {
        Some(readable) => readable.next().await,
        None => std::future::pending().await,
    }
}

fn sample(hedge: &mut Hedge, servers: &mut [WatchedServer; 2], now_ns: u64) -> Vec<Duplicate> {
    let ran = servers.each_mut().map(WatchedServer::ran);
    hedge.sample(now_ns, ran, |server: Server| servers[server.index()].is_free())
}
