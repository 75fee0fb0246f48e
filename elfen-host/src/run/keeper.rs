//! The keeper: parent of the batch, holder of its guards, reaper of the processes that the batch
//! leaves behind.
//!
//! [`Tending`] is the work; the keeper process does it, and the front does it after the keeper was
//! killed. It ends when no process of the batch is left.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use elfen_rt::clock::monotonic_ns;
use elfen_rt::inherit::Inherited;
use elfen_rt::signal::account::Claim;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::SigSet;
use nix::sys::signalfd::{SfdFlags, SignalFd};

use super::Order;
use super::beside::Beside;
use super::care::Care;
use super::channels::Channels;
use super::event::{Event, ToFront};
use super::guard::Guards;
use super::hotplug::{Hotplug, online};
use super::launch::launch;
use super::live::Planner;
use super::place::{Place, lighten_session};
use super::spins::{OwnSpins, Spins};
use super::waker::Wakers;
use crate::pidfd::PidFd;
use crate::process::{below, stat, threads_of};

const TICK_MS: u16 = 100;

/// The care of one running batch.
#[derive(Debug)]
pub(super) struct Tending {
    channels: Arc<Channels>,
    claim: Claim,
    place: Place,
    hotplug: Hotplug,
    spins: Spins,
    _own_spins: OwnSpins,
    beside: Beside,
    root: Option<i32>,
    care: Care,
    guards: Option<Guards>,
    _planner: Option<Planner>,
    _wakers: Option<Wakers>,
}

impl Tending {
    /// Starts the guards, and names this process in the control page as the one that keeps the run.
    /// The batch are the descendants of the processes in `claim`.
    pub(super) fn start(
        order: &Order,
        channels: &Arc<Channels>,
        inheritance: &Inherited,
        claim: Claim,
    ) -> io::Result<Self> {
        channels.claim(claim);
        let care = Care::begin(order, channels);
        let planner = order.notes.as_ref().and_then(|_| channels.pages(inheritance));
        let planner = planner.map(|pages| Planner::start(channels, pages)).transpose()?;
        let live = planner.as_ref().zip(order.notes.as_ref());
        let rehearsal =
            |index| live.and_then(|(planner, notes)| planner.rehearsal(notes.clone(), index));
        Ok(Self {
            channels: channels.clone(),
            claim,
            place: Place::new(&order.lanes().map(|(batch, _)| batch).collect()),
            hotplug: Hotplug::after(channels.batch_lanes_offline() == channels.assigned().len()),
            spins: Spins::default(),
            _own_spins: OwnSpins::watch(channels.requests())?,
            beside: Beside::guards_of_this_process(),
            root: None,
            care,
            _wakers: order.alarm.as_ref().map(|a| Wakers::start(channels, a)).transpose()?,
            guards: Some(Guards::rehearsing(channels, &order.nap, order.looks, rehearsal)?),
            _planner: planner,
        })
    }

    pub(super) fn adopt(&mut self, root: i32) {
        self.root = Some(root);
    }

    /// What has to be done ten times a second. Says if the batch lost its last lane, or has one
    /// again, and of a process that left the rank below its guard.
    pub(super) fn tick(&mut self) -> impl Iterator<Item = Event> {
        let event = self.follow_hotplug();
        let due = self.care.tick(event.is_some());
        let beside = if due { self.put_back() } else { Vec::new() };
        let beside = beside.into_iter().map(|pid| Event::Beside { pid: pid.cast_signed() });
        event.into_iter().chain(beside)
    }

    /// The kernel moves a thread whose CPU goes offline to any other, also to a request lane. So
    /// the batch goes on on the lanes that are left, and is stopped where there is none.
    fn follow_hotplug(&mut self) -> Option<Event> {
        let change = self.hotplug.look(&online()?, self.channels.assigned())?;
        self.channels.follow_hotplug(&change.online);
        if let Some(lanes) = &change.lanes {
            self.place = Place::new(lanes);
        }
        let signal = match change.event? {
            Event::LostLanes => libc::SIGSTOP,
            _ => libc::SIGCONT,
        };
        send_to_all(signal);
        change.event
    }

    /// Collects children that ended or stopped. `None` when there is none left.
    pub(super) fn reap(&mut self) -> Option<Vec<Event>> {
        // Processes that the planner stops for a moment are not this thread's to hear of.
        const OPTIONS: i32 = libc::WNOHANG | libc::WUNTRACED | libc::__WNOTHREAD;
        let mut events = Vec::new();
        loop {
            let mut status = 0;
            // SAFETY: `status` is ours.
            let child = unsafe { libc::waitpid(-1, &mut status, OPTIONS) };
            match child {
                0 => return Some(events),
                -1 => return if events.is_empty() { None } else { Some(events) },
                // Not the terminal's doing, which a shell would have to see.
                _ if libc::WIFSTOPPED(status)
                    && (self.hotplug.has_stopped_it() || !is_job_control(status)) => {}
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

    /// Told to end once the front is gone, which passes signals on: that is for all that is left of
    /// the batch. Who had to kill the keeper instead would have a batch that nobody guards.
    fn end_what_is_left(&self) {
        self.channels.control().termination_requested_ns.store(monotonic_ns(), Relaxed);
        send_to_all(libc::SIGTERM);
    }

    /// Brings back threads that left the batch lanes or their low priority. A dying process may
    /// hurry: it runs nothing of its program any more, and on a lane that is always busy it would
    /// keep its memory for long. Returns processes that cannot be brought back below their guard.
    fn put_back(&mut self) -> Vec<u32> {
        let mut threads = Vec::new();
        // A process that ends and is reaped by its parent leaves its id to others. So each is
        // looked at again before it is touched.
        let processes: Vec<PidFd> = descendants().collect();
        for process in processes.iter().filter(|process| !process.has_ended()) {
            lighten_session(process.pid());
            let dying = stat(process.pid()).is_some_and(|stat| stat.dying);
            for thread in threads_of(process.pid()) {
                if !process.has_thread(thread) {
                    continue;
                }
                threads.push(thread);
                if dying {
                    let _raised = Place::raise(thread);
                } else if self.place.is_left_by(thread) == Some(true) {
                    // A thread that ends meanwhile, or a program of
                    // another user, stays where it is.
                    let _put_back = self.place.take(thread);
                }
            }
        }
        let processes: Vec<u32> = processes.iter().map(PidFd::pid).collect();
        self.spins.end(|| threads, || self.channels.requests());
        self.beside.new_ones(&processes)
    }
}

/// All processes below this one that still run.
fn descendants() -> impl Iterator<Item = PidFd> {
    below(std::process::id()).into_iter().filter_map(PidFd::descendant)
}

fn send_to_all(signal: i32) {
    descendants().for_each(|process| process.send(signal));
}

/// Whether a stop is one that a shell would see: not that of a process which the planner has
/// stopped for a moment, to make a system call in its name.
fn is_job_control(status: i32) -> bool {
    const STOPS: [i32; 4] = [libc::SIGSTOP, libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];
    status >> 16 == 0 && STOPS.contains(&libc::WSTOPSIG(status))
}

impl Drop for Tending {
    fn drop(&mut self) {
        // The guards count to their end what the kernel counts for them.
        drop(self.guards.take());
        self.channels.disclaim(self.claim);
    }
}

/// The keeper process, from fork to exit.
pub(super) fn keep(
    order: &Order,
    channels: &Arc<Channels>,
    inheritance: &Inherited,
    signals: SigSet,
    mut front: ToFront,
) -> io::Result<()> {
    let claim = Claim::of_run(front.pid, std::process::id());
    let mut tending = Tending::start(order, channels, inheritance, claim)?;
    match launch(order, channels, inheritance, signals, &front) {
        Ok(root) => tending.adopt(i32::try_from(root.id()).unwrap_or(i32::MAX)),
        Err(error) => {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            front.tell(Event::Refused { errno });
            return Ok(());
        }
    }
    let_go_of_the_terminal();
    tend(tending, &mut front)
}

/// Looks after a batch until nothing of it is left.
pub(super) fn tend(mut tending: Tending, front: &mut ToFront) -> io::Result<()> {
    let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
    let children = SignalFd::with_flags(&SigSet::all(), flags)?;
    front.tell(Event::Kept { by: std::process::id() });
    while let Some(events) = tending.reap() {
        events.into_iter().for_each(|event| front.tell(event));
        tending.tick().for_each(|event| front.tell(event));
        let mut wait = [PollFd::new(children.as_fd(), PollFlags::POLLIN)];
        poll(&mut wait, PollTimeout::from(TICK_MS))?;
        while let Ok(Some(signal)) = children.read_signal() {
            let told_to_end = signal.ssi_signo.cast_signed() == libc::SIGTERM;
            if told_to_end && front.is_gone() {
                tending.end_what_is_left();
            }
        }
    }
    Ok(())
}

/// A reader of the batch's output waits for the last process that could print: the keeper must not
/// be that process.
pub(super) fn let_go_of_the_terminal() {
    let Ok(null) = File::options().read(true).write(true).open("/dev/null") else { return };
    for standard in 0..3 {
        // SAFETY: dup2 takes numbers; nothing in this process uses the three but by their numbers.
        unsafe { libc::dup2(null.as_raw_fd(), standard) };
    }
}
