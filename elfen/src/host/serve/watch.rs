//! Watching a service: a look at all its threads, again and again, until it ends or we are told to.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use elfen_rt::clock::monotonic_ns;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use serde::Serialize;

use super::idle::{self, CpuTime, IdleWatch};
use super::keeping::{Found, Keeping, Move};
use super::{Notice, Order, Refused, Service};
use crate::host::affinity;
use crate::host::process::{stat, thread_name, threads_of};

/// Threads start others while we move them: until a look finds none outside, but no more than this.
const ROUNDS: u32 = 20;

/// How much of the time since the start a request lane has idled.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct LaneIdle {
    pub(crate) cpu: u32,
    pub(crate) idle_percent: f64,
}

/// What a report says.
#[derive(Clone, Default, Debug, Serialize)]
pub(crate) struct Figures {
    pub(crate) processes: usize,
    pub(crate) threads: usize,
    /// Threads of a service that ran already, put on the request lanes at the start.
    pub(crate) moved: u64,
    /// Times that a thread had chosen other CPUs.
    pub(crate) brought_back: u64,
    /// Times that the kernel refused to move one.
    pub(crate) refused: u64,
    /// Threads given back what they had before.
    pub(crate) undone: u64,
    pub(crate) wall_ns: u64,
    pub(crate) idle: Vec<LaneIdle>,
    pub(crate) ended: bool,
}

pub(super) struct Watch<'a> {
    order: &'a Order,
    service: Service,
    keeping: Keeping,
    idle: IdleWatch,
    start: (u64, Vec<CpuTime>),
    figures: Figures,
    /// Threads that were spoken of as immovable.
    immovable: BTreeSet<u32>,
    gone: bool,
    tell: &'a mut dyn FnMut(Notice<'_>),
}

/// Moves a running service to the request lanes, keeps it there until SIGINT, SIGTERM or SIGHUP,
/// and gives every thread back what it had.
pub(crate) fn keep_existing(
    order: &Order,
    service: Service,
    tell: &mut dyn FnMut(Notice<'_>),
) -> Result<(), Refused> {
    let stop = stop_signals().map_err(Refused::Unwatchable)?;
    leave_the_lanes(order).map_err(Refused::Unwatchable)?;
    let mut watch = Watch::new(order, service, true, tell).map_err(Refused::Unwatchable)?;
    let kept = watch.move_in().and_then(|()| {
        (watch.tell)(Notice::Moved(&watch.figures));
        watch.until(stop.as_fd(), None).map_err(Refused::Unwatchable)
    });
    // Whatever ended it: what was moved goes home.
    let undone = watch.undo().map_err(Refused::Unwatchable);
    kept.and(undone)?;
    watch.end().map_err(Refused::Unwatchable)
}

/// Keeps the program that this process was forked from, until `service` says that it has ended.
pub(super) fn keep_started(
    order: &Order,
    service: Service,
    ended: BorrowedFd<'_>,
    tell: &mut dyn FnMut(Notice<'_>),
) -> io::Result<()> {
    let stop = stop_signals()?;
    leave_the_lanes(order)?;
    let mut watch = Watch::new(order, service, false, tell)?;
    watch.until(stop.as_fd(), Some(ended))?;
    let (left_behind, _) = watch.service.count()?;
    if left_behind > 0 {
        (watch.tell)(Notice::LeftBehind(left_behind));
    }
    watch.end()
}

/// What asks us to end can be waited for, beside other things.
fn stop_signals() -> io::Result<SignalFd> {
    let mut stop = SigSet::empty();
    [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP].into_iter().for_each(|s| stop.add(s));
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&stop), None)?;
    Ok(SignalFd::with_flags(&stop, SfdFlags::SFD_CLOEXEC)?)
}

/// A look is work too, and must not wake a request lane; where there is no other CPU, it does.
fn leave_the_lanes(order: &Order) -> io::Result<()> {
    let others = affinity::allowed()?.without(&order.request_lanes);
    if others.is_empty() { Ok(()) } else { affinity::set(0, &others) }
}

impl<'a> Watch<'a> {
    fn new(
        order: &'a Order,
        service: Service,
        moving_in: bool,
        tell: &'a mut dyn FnMut(Notice<'_>),
    ) -> io::Result<Self> {
        let lanes = &order.request_lanes;
        Ok(Self {
            order,
            service,
            keeping: Keeping::new(lanes.clone(), moving_in),
            idle: IdleWatch::new(lanes.clone()),
            start: (monotonic_ns(), idle::times(lanes)?),
            figures: Figures::default(),
            immovable: BTreeSet::new(),
            gone: false,
            tell,
        })
    }

    /// Fails if nothing at all could be moved.
    fn move_in(&mut self) -> Result<(), Refused> {
        for _ in 0..ROUNDS {
            let found = self.found().map_err(Refused::Unreadable)?.unwrap_or_default();
            let moves = self.keeping.look(found);
            if moves.is_empty() {
                break;
            }
            for one in moves {
                if let Some(error) = self.take(&one) {
                    return Err(Refused::Immovable { thread: one.thread, error });
                }
                self.figures.moved += 1;
            }
        }
        self.keeping.moved_in();
        self.count();
        Ok(())
    }

    /// Looks until told to stop, until `ended` can be read, or until the service's processes are
    /// gone.
    fn until(&mut self, stop: BorrowedFd<'_>, ended: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let every = PollTimeout::try_from(self.order.look_every).unwrap_or(PollTimeout::MAX);
        loop {
            let mut ready: Vec<PollFd<'_>> =
                [Some(stop), ended].into_iter().flatten().map(readable).collect();
            match poll(&mut ready, every) {
                Ok(0) => {}
                Ok(_) => return Ok(()),
                Err(Errno::EINTR) => continue,
                Err(error) => return Err(error.into()),
            }
            if !self.look()? && ended.is_none() {
                return Ok(());
            }
        }
    }

    /// One look at all threads; false if the service is gone for good.
    fn look(&mut self) -> io::Result<bool> {
        let found = self.found()?;
        let gone = found.is_none();
        for one in self.keeping.look(found.unwrap_or_default()) {
            self.bring_back(&one);
        }
        self.count();
        self.look_at_the_lanes()?;
        (self.tell)(Notice::Looked(&self.figures));
        if !matches!(self.service, Service::Cgroup(_)) {
            return Ok(!gone);
        }
        if gone && !std::mem::replace(&mut self.gone, gone) {
            (self.tell)(Notice::CgroupGone);
        }
        self.gone = gone;
        Ok(true)
    }

    fn bring_back(&mut self, one: &Move) {
        let name = thread_name(one.thread);
        match self.take(one) {
            None => {
                self.figures.brought_back += 1;
                let Move { thread, from, times } = one.clone();
                (self.tell)(Notice::BroughtBack { thread, name, cpus: from, times });
            }
            Some(error) => {
                self.figures.refused += 1;
                if self.immovable.insert(one.thread) {
                    (self.tell)(Notice::Refused { thread: one.thread, name, error });
                }
            }
        }
    }

    /// The error, if there is one that matters: a thread that ended meanwhile needs no place.
    fn take(&self, one: &Move) -> Option<io::Error> {
        let error = affinity::set(one.thread, &self.order.request_lanes).err()?;
        (error.raw_os_error() != Some(libc::ESRCH)).then_some(error)
    }

    fn undo(&mut self) -> io::Result<()> {
        let mut tried = BTreeSet::new();
        for _ in 0..ROUNDS {
            let found = self.found()?.unwrap_or_default();
            let mut homes = self.keeping.undo(&found);
            homes.retain(|(thread, _)| tried.insert(*thread));
            if homes.is_empty() {
                break;
            }
            for (thread, cpus) in homes {
                self.figures.undone += u64::from(affinity::set(thread, &cpus).is_ok());
            }
        }
        Ok(())
    }

    fn end(&mut self) -> io::Result<()> {
        self.look_at_the_lanes()?;
        self.figures.ended = true;
        (self.tell)(Notice::Ended(&self.figures));
        Ok(())
    }

    /// All threads there are; `None` if the service is gone.
    fn found(&mut self) -> io::Result<Option<Vec<Found>>> {
        let Some(processes) = self.service.processes()? else { return Ok(None) };
        self.figures.processes = processes.len();
        let threads = processes
            .into_iter()
            .flat_map(|process| threads_of(process).into_iter().map(move |one| (one, process)));
        let found = threads.filter_map(|(thread, process)| {
            // It has ended meanwhile.
            let cpus = affinity::of(thread).ok()?;
            Some(Found { thread, process, cpus })
        });
        Ok(Some(found.collect()))
    }

    fn count(&mut self) {
        self.figures.threads = self.keeping.threads();
    }

    fn look_at_the_lanes(&mut self) -> io::Result<()> {
        let lanes = &self.order.request_lanes;
        let now = idle::times(lanes)?;
        let (start_ns, start) = &self.start;
        self.figures.wall_ns = monotonic_ns() - start_ns;
        let idle = |((cpu, now), start): ((u32, &CpuTime), &CpuTime)| {
            let spent = now.since(*start);
            let percent = |ticks: u64| (ticks * 1_000).checked_div(spent.all).unwrap_or(0);
            let per_mille = u32::try_from(percent(spent.idle)).unwrap_or(0);
            LaneIdle { cpu, idle_percent: f64::from(per_mille) / 10.0 }
        };
        self.figures.idle = lanes.iter().zip(&now).zip(start).map(idle).collect();
        let processes = self.service.processes()?.unwrap_or_default();
        let ticks = processes.into_iter().filter_map(stat).map(|stat| stat.cpu_ticks).sum();
        for never in self.idle.look(&now, ticks) {
            (self.tell)(Notice::NeverIdle(never));
        }
        Ok(())
    }
}

fn readable(fd: BorrowedFd<'_>) -> PollFd<'_> {
    PollFd::new(fd, PollFlags::POLLIN)
}
