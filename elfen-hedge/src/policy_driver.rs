//! Tells the policy the time and what is seen of the servers, and has it decide.
//!
//! tokio's timers count milliseconds and looks are half of one apart, so a timer of the kernel is
//! waited for.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use elfen_console::output::warn;
use elfen_hedge_policy::{Double, Hedge, Server};
use elfen_rt::clock::{monotonic_ns, nanos};
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use tokio::time::MissedTickBehavior;

use crate::descriptor::Readable;
use crate::hazard::Hazards;
use crate::processes::Change;
use crate::shared::Shared;
use crate::watch::{Looks, Watched};

/// How servers are seen, if the policy needs that.
#[derive(Debug)]
pub(crate) enum Sight {
    None,
    /// At times.
    Looks(Looks),
    /// As it happens.
    Hazards(Hazards),
}

#[derive(Debug)]
pub(crate) struct Steward {
    shared: Arc<Shared>,
    sight: Sight,
    timer: TimerFd,
    look_every_ns: u64,
    next_look_ns: Option<u64>,
}

/// Between two looks at which processes serve.
const CHANGES_EVERY: Duration = Duration::from_millis(200);

impl Steward {
    pub(crate) fn new(shared: Arc<Shared>, sight: Sight) -> io::Result<Self> {
        let flags = TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC;
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, flags)?;
        let look_every_ns = nanos(shared.plan.look_every);
        Ok(Self { shared, sight, timer, look_every_ns, next_look_ns: None })
    }

    /// Works for the policy until the proxy ends.
    pub(crate) async fn run(mut self) -> io::Result<()> {
        let mut changes = tokio::time::interval(CHANGES_EVERY);
        changes.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let timer = Readable::new(&self.timer)?;
        let hazards = match &self.sight {
            Sight::Hazards(hazards) => Some(Readable::new(hazards)?),
            Sight::None | Sight::Looks(_) => None,
        };
        let sees = !matches!(self.sight, Sight::None);
        let flights = Arc::clone(&self.shared.flights);
        loop {
            let due_ns = self.on_time();
            self.set_timer(due_ns)?;
            tokio::select! {
                expired = timer.next() => expired?,
                () = flights.begin.notified() => {}
                told = next(hazards.as_ref()) => {
                    told?;
                    self.take_hazards();
                }
                _ = changes.tick(), if sees => self.heed_changes(),
            }
        }
    }

    fn set_timer(&self, due_ns: Option<u64>) -> io::Result<()> {
        let Some(due_ns) = due_ns else { return Ok(self.timer.unset()?) };
        // 0 would disarm it.
        let left = Duration::from_nanos(due_ns.saturating_sub(monotonic_ns()).max(1));
        let expiration = Expiration::OneShot(TimeSpec::from_duration(left));
        Ok(self.timer.set(expiration, TimerSetTimeFlags::empty())?)
    }

    /// Decides what it is time for; when it is time again.
    fn on_time(&mut self) -> Option<u64> {
        let flights = Arc::clone(&self.shared.flights);
        flights.decide_on_time(|hedge| {
            let now_ns = monotonic_ns();
            let mut doubles = hedge.due(now_ns);
            if hedge.is_idle() {
                hedge.rests();
                self.next_look_ns = None;
            } else if let Sight::Looks(looks) = &mut self.sight {
                let next_ns = self.next_look_ns.get_or_insert(now_ns);
                if *next_ns <= now_ns {
                    *next_ns = now_ns.saturating_add(self.look_every_ns);
                    doubles.extend(look(hedge, looks, now_ns));
                }
            }
            let due_ns = [hedge.next_due_ns(), self.next_look_ns].into_iter().flatten().min();
            (doubles, due_ns)
        })
    }

    fn take_hazards(&mut self) {
        let Sight::Hazards(hazards) = &mut self.sight else { return };
        for (server, halt, is_so) in hazards.take() {
            self.shared.flights.decide(|hedge| hedge.halts(server, halt, is_so));
        }
    }

    /// Learns of processes that serve now and did not.
    fn heed_changes(&mut self) {
        let lookout = match &self.sight {
            Sight::None => return,
            Sight::Looks(looks) => &looks.lookout,
            Sight::Hazards(hazards) => &hazards.lookout,
        };
        let changed: Vec<_> = lookout.take().collect();
        for change in changed {
            let server = change.server;
            match change.change {
                Change::Hidden => warn(&format!(
                    "you may not see which process serves {}, so nothing is known of it; run this \
                     as root, or as the server's user",
                    self.shared.plan.servers[server.index()]
                )),
                Change::All => self.shared.restarted(server),
                Change::Some => {}
            }
            if let Sight::Looks(looks) = &mut self.sight {
                looks.servers[server.index()] = Watched::of(&change.processes);
            }
        }
    }
}

/// Never, without a descriptor.
async fn next(readable: Option<&Readable>) -> io::Result<()> {
    match readable {
        Some(readable) => readable.next().await,
        None => std::future::pending().await,
    }
}

fn look(hedge: &mut Hedge, looks: &mut Looks, now_ns: u64) -> Vec<Double> {
    let servers = &mut looks.servers;
    let ran = servers.each_mut().map(Watched::ran);
    hedge.look(now_ns, ran, |server: Server| servers[server.index()].is_free())
}
