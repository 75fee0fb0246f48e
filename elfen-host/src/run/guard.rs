//! The guard of one batch lane: a thread that has the lane whenever it wants it, and wants it
//! while the policy says nap.
//!
//! Asleep it costs the batch a timer and two context switches per look. Awake it holds the
//! lane and naps there, so that nothing of the batch runs next to a request. It notices a
//! request when it next looks; a program with checks of its own notices at once, and steps
//! through the same [`Lane`].

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use elfen_rt::check::CRITICAL_BOUND_NS;
use elfen_rt::clock::{monotonic_ns, nanos};
use elfen_rt::lane::{Actor, Lane, ServiceCache, Step, Wait, termination_slice_ns};
use elfen_rt::nap::{Kind, Nap, Woken};
use elfen_rt::signal::lane::{AWAKE, BATCH_OFFLINE, HOLDS};
use elfen_rt::signal::task::TaskSlot;

use super::channels::Channels;
use super::ipc::Meter;
use super::live::Rehearsal;
use super::looks::{Activity, Idling, Looks};
use super::pacer::Pacer;
use super::place;
use crate::affinity;

/// How long a guard holds its lane before it sees to the run again (its end, a batch that was told
/// to end), where the nap itself can't be interrupted.
const HELD_NS: u64 = 20_000_000;
/// The longest nap during which it can't show that it runs.
const BLIND_NS: u64 = 1_000_000;
/// How long a guard without a lane waits for it to come back.
const OFFLINE: Duration = Duration::from_millis(50);

/// The guards of a run. They leave their lanes when this drops.
#[derive(Debug)]
pub struct Guards {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    turns: Vec<Arc<AtomicU64>>,
}

impl Guards {
    /// Starts a guard on every batch lane.
    pub fn start(channels: &Arc<Channels>, nap: &Arc<Nap>, looks: Looks) -> io::Result<Self> {
        Self::rehearsing(channels, nap, looks, |_| None)
    }

    /// The same; `rehearsal` is what the guard of a lane, by its index, needs for live checks.
    pub(super) fn rehearsing(
        channels: &Arc<Channels>,
        nap: &Arc<Nap>,
        looks: Looks,
        rehearsal: impl Fn(usize) -> Option<Rehearsal>,
    ) -> io::Result<Self> {
        // Threads begin with the rank of the one that starts them: a guard at SCHED_IDLE might
        // not come to raise its own.
        let _ranked = place::rank_first();
        let stop = Arc::new(AtomicBool::new(false));
        let mut guards = Self { stop: stop.clone(), threads: Vec::new(), turns: Vec::new() };
        for (index, &(cpu, _)) in channels.assigned().iter().enumerate() {
            let (channels, nap, stop) = (channels.clone(), nap.clone(), stop.clone());
            let pacer = Pacer::start(cpu)?;
            let rehearsal = rehearsal(index);
            let turns = Arc::new(AtomicU64::new(0));
            guards.turns.push(turns.clone());
            let guard = move || {
                guard(&channels, index, (&nap, &pacer), looks, rehearsal, &stop, &turns);
            };
            guards.threads.push(thread::Builder::new().name("elfen-guard".into()).spawn(guard)?);
        }
        Ok(guards)
    }

    /// How often each guard has looked at its lane, in the order of the lane page: one that stands
    /// elsewhere, or not at all, does not get on. One whose lane is offline does.
    pub(crate) fn turns(&self) -> impl Iterator<Item = u64> {
        // Relaxed: that it changes is all that is read of it.
        self.turns.iter().map(|turns| turns.load(Relaxed))
    }
}

impl Drop for Guards {
    fn drop(&mut self) {
        // Relaxed: the join below orders everything else.
        self.stop.store(true, Relaxed);
        for thread in self.threads.drain(..) {
            // A guard does not panic; if it did, its lane is no worse off than without it.
            let _ended = thread.join();
        }
    }
}

fn guard(
    channels: &Channels,
    index: usize,
    (how, pacer): (&Nap, &Pacer),
    looks: Looks,
    rehearsal: Option<Rehearsal>,
    stop: &AtomicBool,
    turns: &AtomicU64,
) {
    let service_cache = ServiceCache::default();
    let Some(lane) = channels.lane(index, &service_cache) else { return };
    // `may_rank_first` has found that this is allowed.
    let _ranked = place::rank_first();
    let mut guard = Guard { rehearsal, ..Guard::of(channels, &lane, (how, pacer), looks, stop) };
    while !stop.load(Relaxed) {
        match guard.is_offline() {
            true => guard.leave_for(OFFLINE),
            // Where it may not stand on its lane, it must not act as if it did.
            false if !guard.has_its_lane() => {
                guard.leave_for(OFFLINE);
                continue;
            }
            false => guard.turn(),
        }
        turns.fetch_add(1, Relaxed);
    }
    lane.leave(monotonic_ns());
}

/// Whether guards of ours would get the rank that they need: see [`place::rank_first`].
pub fn may_rank_first() -> io::Result<()> {
    // In a thread of its own, so that nothing else of this process changes its rank.
    thread::spawn(place::rank_first).join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
}

/// Whether they would get the one that it takes to write into a program on several lanes.
pub fn may_rank_above_all() -> io::Result<()> {
    let taken = thread::spawn(place::rank_above_all).join();
    taken.unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
}

struct Guard<'g> {
    channels: &'g Channels,
    lane: &'g Lane<'g>,
    how: &'g Nap,
    pacer: &'g Pacer,
    looks: Looks,
    stop: &'g AtomicBool,
    slack: Slack,
    idling: Idling,
    meter: Meter,
    rehearsal: Option<Rehearsal>,
    disobeyed: Disobeyed,
    critical: Critical,
}

impl<'g> Guard<'g> {
    fn of(
        channels: &'g Channels,
        lane: &'g Lane<'g>,
        (how, pacer): (&'g Nap, &'g Pacer),
        looks: Looks,
        stop: &'g AtomicBool,
    ) -> Self {
        let now_ns = monotonic_ns();
        lane.slot.guard_nap.store(how.kind() as u64, Relaxed);
        let idling = Idling::from(now_ns, activity(channels, lane, now_ns));
        Self {
            channels,
            lane,
            how,
            pacer,
            looks,
            stop,
            slack: Slack::none(),
            idling,
            meter: Meter::default(),
            rehearsal: None,
            disobeyed: Disobeyed::default(),
            critical: Critical::default(),
        }
    }

    /// One look at the lane, and what follows from it.
    fn turn(&mut self) {
        if let (Some(rehearsal), Some(words)) = (&mut self.rehearsal, self.channels.live()) {
            rehearsal.attend(self.channels, words);
        }
        let now_ns = monotonic_ns();
        if let Some(rest) = self.critical_rest(now_ns) {
            // The section may be over sooner.
            return self.leave_for(rest.min(self.looks.every));
        }
        self.measure_ipc();
        // The batch stopped when this thread was switched in, which is a while before it looks.
        let own = self.lane.tasks.and_then(|tasks| tasks.slot(self.lane.batch_cpu));
        let stopped_ns = own.and_then(TaskSlot::snapshot).and_then(|switch| switch.at_ns);
        let lane = self.lane;
        let step = lane.step(Actor::Guard, stopped_ns.unwrap_or(now_ns), now_ns);
        self.allow_slack(step.is_busy(), now_ns);
        match step {
            Step::Run { busy, until_ns } => {
                self.pacer.rest();
                self.disobeyed = Disobeyed::default();
                let budget = until_ns.map(|until_ns| until_ns.saturating_sub(now_ns));
                let budget = budget.map_or(self.looks.every, Duration::from_nanos);
                self.leave_the_lane(busy, self.looks.every.min(budget));
            }
            Step::Nap(wait) => {
                self.rehearsal.as_mut().into_iter().for_each(Rehearsal::meet_request);
                self.hold(&wait, now_ns);
            }
        }
    }

    /// The batch has the lane until the next look, or until it rings: next to a request that it may
    /// run beside, nobody is to be rung.
    fn leave_the_lane(&mut self, busy: bool, at_most: Duration) {
        match (&mut self.rehearsal, self.channels.live()) {
            (Some(rehearsal), Some(words)) if !busy => {
                rehearsal.sleep(self.lane, words, at_most);
            }
            _ => thread::sleep(at_most),
        }
    }

    /// Others have the lane for so long, whatever comes.
    fn leave_for(&self, time: Duration) {
        self.pacer.rest();
        thread::sleep(time);
    }

    /// The lane can go offline while a guard runs: then the kernel moves its thread elsewhere,
    /// maybe onto a request lane.
    fn is_offline(&self) -> bool {
        self.lane.inputs.hotplug.load(Relaxed) & BATCH_OFFLINE != 0
    }

    /// Whether this thread is on its lane, also after it was moved; a cpuset may keep it off.
    fn has_its_lane(&self) -> bool {
        // SAFETY: takes nothing and cannot fail.
        let here = unsafe { libc::sched_getcpu() };
        u32::try_from(here) == Ok(self.lane.batch_cpu) || affinity::pin(self.lane.batch_cpu).is_ok()
    }

    /// How much longer the lane is left to a thread that holds a lock.
    fn critical_rest(&mut self, now_ns: u64) -> Option<Duration> {
        let busy = self.lane.request().is_none_or(TaskSlot::is_busy);
        let word = if busy { self.lane.slot.critical.load(Relaxed) } else { 0 };
        self.critical.rest(word, now_ns)
    }

    fn measure_ipc(&mut self) {
        let counted = self.channels.counted(self.lane);
        if let Some(window) = counted.and_then(|now| self.meter.window(now)) {
            for inputs in [self.lane.inputs, &self.lane.slot.inputs] {
                inputs.publish_ipc(window.ipc_milli, window.since_ns, window.until_ns);
            }
        }
    }

    fn allow_slack(&mut self, busy: bool, now_ns: u64) {
        let activity = activity(self.channels, self.lane, now_ns);
        self.slack.set(self.idling.slack(busy, activity, now_ns).min(self.looks.slack));
    }

    /// Keeps the batch off the lane, unless it has to have some of it in order to die.
    fn hold(&mut self, wait: &Wait<'_, '_>, now_ns: u64) {
        let told_ns = self.lane.termination_requested_ns();
        if let Some(slice_ns) = termination_slice_ns(told_ns, now_ns) {
            return self.leave_for(Duration::from_nanos(slice_ns));
        }
        let is_called = || self.rehearsal.as_ref().is_some_and(Rehearsal::is_called);
        let is_over = || {
            self.stop.load(Relaxed)
                || self.lane.termination_requested_ns() != told_ns
                || is_called()
        };
        if matches!(self.how, Nap::Block) {
            let busy_ns = self.channels.busy_ns(self.lane.batch_cpu, now_ns);
            let how =
                if self.disobeyed.since_last(busy_ns, now_ns) { &Nap::Spin } else { self.how };
            wait.on(how, nanos(self.looks.every), is_over);
            return;
        }
        let (blind_ns, at_most_ns) = match self.how.kind() {
            Kind::Device | Kind::Mwaitx => (BLIND_NS, BLIND_NS),
            Kind::Umwait | Kind::Block | Kind::Spin => (0, HELD_NS),
        };
        let called_ns = self.rehearsal.as_ref().and_then(Rehearsal::nap_at_most_ns);
        self.show_hold(now_ns, blind_ns);
        let shows = || {
            self.show_hold(monotonic_ns(), blind_ns);
            is_over()
        };
        if wait.on(self.how, called_ns.unwrap_or(at_most_ns), shows) == Woken::Elsewhere {
            // The module has not tied this pair. The front reads this, and says it.
            self.how = &Nap::Spin;
            self.lane.slot.guard_nap.store(Kind::Spin as u64, Relaxed);
        }
        if self.rehearsal.is_some() {
            self.lane.slot.doorbell.store(AWAKE, Relaxed);
        }
    }

    /// A batch thread that runs all the same is one that the scheduler has let in: a check, if it
    /// comes to one, gives the lane back, and the pacer takes it.
    fn show_hold(&self, now_ns: u64, blind_ns: u64) {
        self.pacer.put_off(now_ns, Duration::from_nanos(blind_ns));
        let bell = &self.lane.slot.doorbell;
        if self.rehearsal.is_some() && bell.load(Relaxed) != HOLDS {
            bell.store(HOLDS, Relaxed);
        }
    }
}

fn activity(channels: &Channels, lane: &Lane<'_>, now_ns: u64) -> Activity {
    Activity::of(channels.busy_ns(lane.request_cpu, now_ns), lane.service(now_ns))
}

/// Critical sections that the guard has met next to a request.
///
/// The word that names a section is the batch's own, so all sections share one bound: in all, the
/// lane is left to them for [`CRITICAL_BOUND_NS`], and for one part in [`REFILL`] of the time.
#[derive(Debug, Default)]
struct Critical {
    met: u64,
    since_ns: u64,
    /// How much of the bound is used up, as of `at_ns`.
    used_ns: u64,
    at_ns: u64,
    /// Whether the lane has been left to a section since `at_ns`.
    is_left: bool,
}

/// Two per mille of a lane that is busy all the time. The scheduler lets a batch have up to four.
const REFILL: u64 = 500;

impl Critical {
    /// For how long the lane may be left to the section that `word` names; `None` if it names none,
    /// or nothing is left.
    fn rest(&mut self, word: u64, now_ns: u64) -> Option<Duration> {
        let passed_ns = now_ns.saturating_sub(std::mem::replace(&mut self.at_ns, now_ns));
        let used_ns =
            if self.is_left { self.used_ns.saturating_add(passed_ns) } else { self.used_ns };
        self.used_ns = used_ns.saturating_sub(passed_ns / REFILL);
        self.is_left = false;
        if word == 0 {
            return None;
        }
        if word != self.met {
            (self.met, self.since_ns) = (word, now_ns);
        }
        let of_this_ns = CRITICAL_BOUND_NS.checked_sub(now_ns.saturating_sub(self.since_ns))?;
        let left_ns = CRITICAL_BOUND_NS.checked_sub(self.used_ns)?.min(of_this_ns);
        self.is_left = left_ns > 0;
        self.is_left.then(|| Duration::from_nanos(left_ns))
    }
}

/// How much later than due the kernel may let this thread's timers fire, to save an interrupt.
struct Slack(Duration);

impl Slack {
    /// Instead of the usual 50 us.
    fn none() -> Self {
        let mut slack = Self(Duration::MAX);
        slack.set(Duration::ZERO);
        slack
    }

    fn set(&mut self, slack: Duration) {
        if self.0 != slack {
            self.0 = slack;
            // SAFETY: prctl takes numbers; of these, 0 would stand for the usual slack.
            unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, nanos(slack).max(1), 0, 0, 0) };
        }
    }
}

/// Whether a program runs on a batch lane although its threads ought to block: one without checks,
/// or one whose checks are rare. The guard tells it by the time that the lane was busy since its
/// last look.
#[derive(Debug, Default)]
struct Disobeyed {
    before: Option<(u64, u64)>,
}

impl Disobeyed {
    fn since_last(&mut self, busy_ns: Option<u64>, now_ns: u64) -> bool {
        let before = self.before;
        self.before = busy_ns.map(|busy_ns| (busy_ns, now_ns));
        let (Some(busy_ns), Some((busy_before_ns, before_ns))) = (busy_ns, before) else {
            return false;
        };
        busy_ns.saturating_sub(busy_before_ns) > now_ns.saturating_sub(before_ns) / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: Duration = Duration::from_nanos(CRITICAL_BOUND_NS);
    const MS: u64 = 1_000_000;

    #[test]
    fn a_critical_section_holds_the_guard_off_for_its_bound_and_no_longer() {
        let mut critical = Critical::default();
        assert_eq!(critical.rest(0, 10), None, "no section");
        assert_eq!(critical.rest(7, 1_000), Some(WHOLE));
        let rest = critical.rest(7, 401_000).unwrap();
        assert!(WHOLE - rest >= Duration::from_nanos(399_000), "{rest:?}");
        assert_eq!(critical.rest(7, 1_000 + CRITICAL_BOUND_NS), None);
        assert_eq!(critical.rest(7, 99_000 * MS), None, "a word that a dead thread left behind");
        assert_eq!(critical.rest(9, 99_000 * MS), Some(WHOLE), "another section");
    }

    /// Goal: a batch that names a new section each time gets no more than one bound. Method: looks
    /// for a second, each at another section.
    #[test]
    fn sections_share_one_bound() {
        let mut critical = Critical::default();
        let mut left_ns = 0;
        let mut now_ns = MS;
        for word in 1.. {
            if now_ns > 1_001 * MS {
                break;
            }
            let step_ns = 50_000;
            left_ns += if critical.rest(word, now_ns).is_some() { step_ns } else { 0 };
            now_ns += step_ns;
        }
        let most_ns = CRITICAL_BOUND_NS + 1_000 * MS / REFILL + 50_000;
        assert!((CRITICAL_BOUND_NS..most_ns).contains(&left_ns), "{left_ns} ns of a second");
    }
}
