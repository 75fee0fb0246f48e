//! The keeper: parent of the batch, holder of its guards, reaper of the processes that the batch
//! leaves behind.
//!
//! [`Tending`] is the work; the keeper process does it, and the front does it after the keeper was
//! killed. It ends when no process of the batch is left.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use elfen_rt::clock::monotonic_ns;
use elfen_rt::inherit::Inherited;
use elfen_rt::policy::slo::{Controller, Slo, Window};
use elfen_rt::process::Identity;
use elfen_rt::signal::account::Claim;
use elfen_rt::signal::histogram::BUCKETS;
use elfen_rt::signal::lane::{BATCH_OFFLINE, LaneSlot};
use elfen_rt::signal::task::LEASE_NS;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::SigSet;
use nix::sys::signalfd::{SfdFlags, SignalFd};

use super::Order;
use super::channels::Channels;
use super::event::Event;
use super::guard::Guards;
use super::hotplug::{Hotplug, online};
use super::launch::launch;
use super::live::Planner;
use super::place::{Place, lighten_session};
use super::spins::Spins;
use super::waker::Wakers;
use crate::process::{below, stat, threads_of};

/// Leases are renewed four times as often as they run out, and so is everything else that is slow.
const CHORES_EVERY_NS: u64 = LEASE_NS / 4;
const TICK_MS: u16 = 100;

/// The care of one running batch.
#[derive(Debug)]
pub(super) struct Tending {
    channels: Arc<Channels>,
    place: Place,
    hotplug: Hotplug,
    spins: Spins,
    root: Option<i32>,
    steering: Option<Steering>,
    chores_at_ns: u64,
    wanted: u64,
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
        channels.renew_leases();
        channels.claim(claim);
        let keeper = Identity::own().map_or(0, Identity::word);
        channels.control().keeper.store(keeper, Relaxed);
        // A keeper that died in the middle of a change leaves no settings behind.
        if channels.settings().is_none() {
            channels.control().publish(&order.settings);
        }
        let planner = order.notes.as_ref().and_then(|_| channels.pages(inheritance));
        let planner = planner.map(|pages| Planner::start(channels, pages)).transpose()?;
        let rehearsal = planner.as_ref().zip(order.notes.as_ref());
        let rehearsal = rehearsal.and_then(|(planner, notes)| planner.rehearsal(notes.clone()));
        Ok(Self {
            channels: channels.clone(),
            place: Place::new(&order.lanes().map(|(batch, _)| batch).collect()),
            hotplug: Hotplug::after(channels.lanes().slots().all(has_no_lane)),
            spins: Spins::default(),
            root: None,
            steering: order.slo.map(Steering::new),
            chores_at_ns: 0,
            wanted: channels.wanted().generation.load(Relaxed),
            _wakers: order.alarm.as_ref().map(|a| Wakers::start(channels, a)).transpose()?,
            guards: Some(Guards::rehearsing(channels, &order.nap, order.looks, rehearsal)?),
            _planner: planner,
        })
    }

    pub(super) fn adopt(&mut self, root: i32) {
        self.root = Some(root);
    }

    /// What has to be done ten times a second. Says if the batch lost its
    /// last lane, or has one again.
    pub(super) fn tick(&mut self) -> Option<Event> {
        self.take_over_what_is_wanted();
        let event = self.follow_hotplug();
        let now_ns = monotonic_ns();
        if now_ns >= self.chores_at_ns || event.is_some() {
            self.chores_at_ns = now_ns + CHORES_EVERY_NS;
            self.channels.renew_leases();
            self.put_back();
            if let Some(steering) = &mut self.steering {
                steering.window(&self.channels, now_ns);
            }
        }
        event
    }

    /// The kernel moves a thread whose CPU goes offline to any other, also to a request lane. So
    /// the batch goes on on the lanes that are left, and is stopped where there is none.
    fn follow_hotplug(&mut self) -> Option<Event> {
        let change = self.hotplug.look(&online()?, self.channels.assigned())?;
        for (slot, &lane) in self.channels.lanes().slots().zip(self.channels.assigned()) {
            slot.hotplug.store(change.online.bits_of(lane), Relaxed);
        }
        if let Some(lanes) = &change.lanes {
            self.place = Place::new(lanes);
        }
        let signal = match change.event? {
            Event::LostLanes => libc::SIGSTOP,
            _ => libc::SIGCONT,
        };
        for process in below(std::process::id()) {
            // SAFETY: the process is a descendant of ours, which only we and the front reap.
            unsafe { libc::kill(process.cast_signed(), signal) };
        }
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

    /// `elfen set` writes what it wants beside what holds, and the keeper, or the front in its
    /// place, takes it over.
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

    /// Brings back threads that left the batch lanes or their low priority. A dying process may
    /// hurry: it runs nothing of its program any more, and on a lane that is always busy it would
    /// keep its memory for long.
    fn put_back(&mut self) {
        let mut threads = Vec::new();
        for process in below(std::process::id()) {
            lighten_session(process);
            let dying = stat(process).is_some_and(|stat| stat.dying);
            for thread in threads_of(process) {
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
        self.spins.end(|| threads, || self.channels.requests());
    }
}

/// Whether a stop is one that a shell would see: not that of a process which the planner has
/// stopped for a moment, to make a system call in its name.
fn is_job_control(status: i32) -> bool {
    const STOPS: [i32; 4] = [libc::SIGSTOP, libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];
    status >> 16 == 0 && STOPS.contains(&libc::WSTOPSIG(status))
}

fn has_no_lane(slot: &LaneSlot) -> bool {
    slot.hotplug.load(Relaxed) & BATCH_OFFLINE != 0
}

impl Drop for Tending {
    fn drop(&mut self) {
        // The guards count to their end what the kernel counts for them.
        drop(self.guards.take());
        self.channels.disclaim();
    }
}

/// slo-budget: from the latencies of each window to the budget of the next.
#[derive(Debug)]
struct Steering {
    controller: Box<Controller>,
    /// The requests that the pages had counted at the end of the last window. Pages outlive
    /// restarts of a service: their first counts are its past, and no window.
    before: Option<Box<Window>>,
}

impl Steering {
    fn new(slo: Slo) -> Self {
        Self { controller: Box::new(Controller::new(slo)), before: None }
    }

    fn window(&mut self, channels: &Channels, now_ns: u64) {
        let Some(mut settings) = channels.settings() else { return };
        settings.budget_ns = self.budget_ns(latencies(channels));
        // A keeper that is killed leaves no budget behind for longer than this.
        settings.budget_until_ns = now_ns + 2 * CHORES_EVERY_NS;
        channels.control().publish(&settings);
    }

    /// The budget after a window that ends with these counts, which are `None` if no service
    /// publishes.
    fn budget_ns(&mut self, counts: Option<Window>) -> u64 {
        let before = std::mem::replace(&mut self.before, counts.map(Box::new));
        let window = counts.zip(before).map(|(counts, before)| {
            let mut window = [0; BUCKETS];
            for (at, (count, before)) in counts.iter().zip(before.iter()).enumerate() {
                window[at] = count.saturating_sub(*before);
            }
            window
        });
        self.controller.window(window.as_ref())
    }
}

/// Finished requests by latency, over the slots of our request lanes; `None` if no service
/// publishes.
fn latencies(channels: &Channels) -> Option<Window> {
    let mut all = [0; BUCKETS];
    let mut published = false;
    let service = channels.service.as_ref()?;
    for slot in service.living(&channels.requests()) {
        published = true;
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
    inheritance: &Inherited,
    signals: SigSet,
    mut front: File,
    front_process: u32,
) -> io::Result<()> {
    let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
    let children = SignalFd::with_flags(&SigSet::all(), flags)?;
    let claim = Claim::of_run(front_process, std::process::id());
    let mut tending = Tending::start(order, channels, inheritance, claim)?;
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
        tending.tick().into_iter().for_each(|event| tell(&mut front, event));
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

/// A reader of the batch's output waits for the last process that could print: the keeper must not
/// be that process.
fn let_go_of_the_terminal() {
    let Ok(null) = File::options().read(true).write(true).open("/dev/null") else { return };
    for standard in 0..3 {
        use std::os::fd::AsRawFd;
        // SAFETY: dup2 takes numbers; nothing in this process uses the three but by their numbers.
        unsafe { libc::dup2(null.as_raw_fd(), standard) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use elfen_rt::signal::histogram::bucket_top_ns;

    fn window(latency_ns: u64, count: u64) -> Window {
        let at = (0..BUCKETS).find(|&at| bucket_top_ns(at) >= latency_ns).unwrap();
        std::array::from_fn(|bucket| if bucket == at { count } else { 0 })
    }

    /// Goal: a budget comes from what is measured from now on. Method: a service with a
    /// million good requests behind it.
    #[test]
    fn the_past_of_a_service_is_no_window() {
        let slo = Slo { per_million: 990_000, latency_ns: 100_000_000 };
        let mut steering = Steering::new(slo);
        assert_eq!(steering.budget_ns(Some(window(1_000_000, 1_000_000))), 0);
        let good = steering.budget_ns(Some(window(1_000_000, 1_002_000)));
        assert!(good > 0, "two thousand good ones since");
        assert_eq!(steering.budget_ns(None), 0, "nobody publishes");
        assert_eq!(
            steering.budget_ns(Some(window(1_000_000, 9_000_000))),
            0,
            "it is its past again"
        );
    }
}
