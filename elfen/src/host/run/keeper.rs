//! The keeper: parent of the batch, holder of its guards, reaper of whoever the batch leaves behind.
//!
//! [`Tending`] is the work; the keeper process does it, and the front does it after the keeper was killed. It ends when
//! no process of the batch is left.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use elfen_rt::clock::monotonic_ns;
use elfen_rt::policy::slo::{Controller, Slo, Window};
use elfen_rt::process::Identity;
use elfen_rt::signal::histogram::BUCKETS;
use elfen_rt::signal::task::LEASE_NS;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::SigSet;
use nix::sys::signalfd::{SfdFlags, SignalFd};

use super::Order;
use super::channels::Channels;
use super::guard::Guards;
use super::launch::launch;
use super::place::{Place, lighten_session};
use super::waker::Wakers;
use crate::host::process::{below, stat, threads_of};

/// What the front learns of the batch program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Event {
    Started {
        pid: i32,
    },
    /// It could not be started, with this errno.
    Refused {
        errno: i32,
    },
    Stopped {
        signal: i32,
    },
    /// Its status as waitpid(2) has it.
    Ended {
        status: i32,
    },
}

impl Event {
    pub(super) fn write(self, to: &mut impl Write) -> io::Result<()> {
        let (kind, value) = match self {
            Self::Started { pid } => (1, pid),
            Self::Refused { errno } => (2, errno),
            Self::Stopped { signal } => (3, signal),
            Self::Ended { status } => (4, status),
        };
        let [kind, value] = [kind, value].map(i32::to_ne_bytes);
        to.write_all(&[kind, value].concat())
    }

    /// The next event; an error when the keeper is gone.
    pub(super) fn read(from: &mut impl Read) -> io::Result<Self> {
        let mut words = [[0; 4]; 2];
        from.read_exact(words.as_flattened_mut())?;
        let [kind, value] = words.map(i32::from_ne_bytes);
        match kind {
            1 => Ok(Self::Started { pid: value }),
            2 => Ok(Self::Refused { errno: value }),
            3 => Ok(Self::Stopped { signal: value }),
            4 => Ok(Self::Ended { status: value }),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// Leases are renewed four times as often as they run out, and so is everything else that is slow.
const CHORES_EVERY_NS: u64 = LEASE_NS / 4;
const TICK_MS: u16 = 100;

/// The care of one running batch.
#[derive(Debug)]
pub(super) struct Tending {
    channels: Arc<Channels>,
    place: Place,
    root: Option<i32>,
    steering: Option<Steering>,
    chores_at_ns: u64,
    wanted: u64,
    _guards: Guards,
    _wakers: Option<Wakers>,
}

impl Tending {
    /// Starts the guards, and says in the control page who keeps this run.
    pub(super) fn start(order: &Order, channels: &Arc<Channels>) -> io::Result<Self> {
        channels.renew_leases();
        let keeper = Identity::own().map_or(0, Identity::word);
        channels.control().keeper.store(keeper, Relaxed);
        Ok(Self {
            channels: channels.clone(),
            place: Place::new(&order.lanes().map(|(batch, _)| batch).collect()),
            root: None,
            steering: order.slo.map(Steering::new),
            chores_at_ns: 0,
            wanted: channels.wanted().generation.load(Relaxed),
            _wakers: order.alarm.as_ref().map(|a| Wakers::start(channels, a)).transpose()?,
            _guards: Guards::start(channels, &order.nap, order.looks)?,
        })
    }

    pub(super) fn adopt(&mut self, root: i32) {
        self.root = Some(root);
    }

    /// What has to be done ten times a second.
    pub(super) fn tick(&mut self) {
        self.take_over_what_is_wanted();
        let now_ns = monotonic_ns();
        if now_ns < self.chores_at_ns {
            return;
        }
        self.chores_at_ns = now_ns + CHORES_EVERY_NS;
        self.channels.renew_leases();
        self.put_back();
        if let Some(steering) = &mut self.steering {
            steering.window(&self.channels, now_ns);
        }
    }

    /// Collects children that ended or stopped. `None` when there is none left.
    pub(super) fn reap(&mut self) -> Option<Vec<Event>> {
        let mut events = Vec::new();
        loop {
            let mut status = 0;
            // SAFETY: `status` is ours.
            let child = unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG | libc::WUNTRACED) };
            match child {
                0 => return Some(events),
                -1 => return if events.is_empty() { None } else { Some(events) },
                child if Some(child) == self.root => events.push(if libc::WIFSTOPPED(status) {
                    Event::Stopped { signal: libc::WSTOPSIG(status) }
                } else {
                    self.root = None;
                    Event::Ended { status }
                }),
                _ => {}
            }
        }
    }

    /// `elfen set` writes what it wants beside what holds, and whoever tends takes it over.
    fn take_over_what_is_wanted(&mut self) {
        let Some((generation, settings)) = self.channels.wanted().settings() else { return };
        if generation == self.wanted {
            return;
        }
        self.wanted = generation;
        let slo = Slo {
            per_million: u32::try_from(settings.slo_per_million).unwrap_or(u32::MAX),
            latency_ns: settings.slo_latency_ns,
        };
        self.steering = (settings.slo_latency_ns != 0).then(|| Steering::new(slo));
        self.channels.control().publish(&settings);
    }

    /// Brings back what left the batch lanes or its low priority. Who dies may hurry: it runs nothing of its program any more, and
    /// on a lane that is always busy it would keep its memory for long.
    fn put_back(&self) {
        for process in below(std::process::id()) {
            lighten_session(process);
            let dying = stat(process).is_some_and(|stat| stat.dying);
            for thread in threads_of(process) {
                if dying {
                    let _raised = Place::raise(thread);
                } else if self.place.is_left_by(thread) == Some(true) {
                    // A thread that ends meanwhile, or a program of another user, stays where it is.
                    let _put_back = self.place.take(thread);
                }
            }
        }
    }
}

/// slo-budget: from the latencies of each window to the budget of the next.
#[derive(Debug)]
struct Steering {
    controller: Box<Controller>,
    before: Box<Window>,
}

impl Steering {
    fn new(slo: Slo) -> Self {
        Self { controller: Box::new(Controller::new(slo)), before: Box::new([0; BUCKETS]) }
    }

    fn window(&mut self, channels: &Channels, now_ns: u64) {
        let Some(mut settings) = channels.settings() else { return };
        let counts = latencies(channels);
        let window = counts.as_ref().map(|counts| {
            let mut window = [0; BUCKETS];
            for (at, (count, before)) in counts.iter().zip(self.before.iter()).enumerate() {
                window[at] = count.saturating_sub(*before);
            }
            window
        });
        if let Some(counts) = counts {
            *self.before = counts;
        }
        settings.budget_ns = self.controller.window(window.as_ref());
        // A keeper that is killed leaves no budget behind for longer than this.
        settings.budget_until_ns = now_ns + 2 * CHORES_EVERY_NS;
        channels.control().publish(&settings);
    }
}

/// Finished requests by latency, over the slots of our request lanes; `None` if nobody publishes.
fn latencies(channels: &Channels) -> Option<Window> {
    let mut all = [0; BUCKETS];
    let mut published = false;
    for request in channels.requests() {
        let Some((reader, lane)) = channels.sources(request).service else { continue };
        let Some(slot) = reader.slot(lane) else { continue };
        published |= slot.writer.load(Relaxed) != 0;
        for (sum, count) in all.iter_mut().zip(slot.latency.counts()) {
            *sum += count;
        }
    }
    published.then_some(all)
}

/// The keeper process, from fork to exit.
pub(super) fn keep(
    order: &Order,
    channels: &Arc<Channels>,
    inheritance: &str,
    signals: SigSet,
    mut front: File,
) -> io::Result<()> {
    let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
    let children = SignalFd::with_flags(&SigSet::all(), flags)?;
    let mut tending = Tending::start(order, channels)?;
    match launch(order, channels, inheritance, signals) {
        Ok(root) => {
            let pid = i32::try_from(root.id()).unwrap_or(i32::MAX);
            tending.adopt(pid);
            tell(&mut front, Event::Started { pid });
        }
        Err(error) => {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            tell(&mut front, Event::Refused { errno });
            return Ok(());
        }
    }
    let_go_of_the_terminal();
    while let Some(events) = tending.reap() {
        events.into_iter().for_each(|event| tell(&mut front, event));
        tending.tick();
        let mut wait = [PollFd::new(children.as_fd(), PollFlags::POLLIN)];
        poll(&mut wait, PollTimeout::from(TICK_MS))?;
        while let Ok(Some(_)) = children.read_signal() {}
    }
    Ok(())
}

/// A front that was killed hears nothing; the batch goes on.
fn tell(front: &mut File, event: Event) {
    let _heard = event.write(front);
}

/// Whoever reads what the batch prints waits for the last process that could print: that must not be us.
fn let_go_of_the_terminal() {
    let Ok(null) = File::options().read(true).write(true).open("/dev/null") else { return };
    for standard in 0..3 {
        use std::os::fd::AsRawFd;
        // SAFETY: dup2 takes numbers; nothing in this process uses the three but by their numbers.
        unsafe { libc::dup2(null.as_raw_fd(), standard) };
    }
}
