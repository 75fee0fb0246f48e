//! The guard thread of one batch lane.
//!
//! The guard polls the request lane. While the policy says `Nap`, it occupies the batch lane, so
//! the batch cannot run next to a request. The guard ranks above the batch (see [`placement`]): the
//! scheduler gives it the lane as soon as it wakes.
//!
//! A sleeping guard costs the batch one timer interrupt and two context switches for each poll.
//! Threads with checks react earlier: they evaluate the same [`Lane`] themselves.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use elfen_rt::check::CRITICAL_BOUND_NS;
use elfen_rt::clock::{monotonic_ns, nanos};
use elfen_rt::lane::{Actor, Lane, ServiceCache, Step, Wait, termination_slice_ns};
use elfen_rt::nap::{Nap, NapKind, Woken};
use elfen_rt::signal::lane::{AWAKE, BATCH_OFFLINE, HOLDS};
use elfen_rt::signal::task::TaskSlot;

use super::channels::Channels;
use super::ipc::Meter;
use super::live::SiteProbe;
use super::pacer::Pacer;
use super::poll_timing::{Activity, IdleTime, PollTiming};
use elfen_machine::affinity;
use elfen_machine::placement;

/// The longest nap before a guard looks again whether it has to stop or the batch received SIGTERM,
/// where those cannot interrupt the nap.
const NAP_MAX_NS: u64 = 20_000_000;
/// The longest nap during which the guard cannot report that it runs.
const UNREPORTED_NS: u64 = 1_000_000;
/// How long a guard whose lane is offline waits before it looks again.
const OFFLINE_SLEEP: Duration = Duration::from_millis(50);

/// The guards of a run. Dropping this stops them; they leave their lanes.
#[derive(Debug)]
pub struct Guards {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    polls: Vec<Arc<AtomicU64>>,
}

impl Guards {
    /// Starts a guard on every batch lane.
    pub fn start(channels: &Arc<Channels>, nap: &Arc<Nap>, timing: PollTiming) -> io::Result<Self> {
        Self::start_with_probes(channels, nap, timing, |_| None)
    }

    /// Starts a guard on every batch lane. `probe` makes what a guard needs for live checks,
    /// from the index of its lane.
    pub(super) fn start_with_probes(
        channels: &Arc<Channels>,
        nap: &Arc<Nap>,
        timing: PollTiming,
        probe: impl Fn(usize) -> Option<SiteProbe>,
    ) -> io::Result<Self> {
        // New threads inherit the rank of the thread that starts them. A guard that started at
        // SCHED_IDLE might never run to raise its own rank.
        let _ranked = placement::take_guard_rank();
        let stop = Arc::new(AtomicBool::new(false));
        let mut guards = Self { stop: stop.clone(), threads: Vec::new(), polls: Vec::new() };
        for (index, &(cpu, _)) in channels.assigned().iter().enumerate() {
            let channels = channels.clone();
            let nap = nap.clone();
            let stop = stop.clone();
            let pacer = Pacer::start(cpu)?;
            let probe = probe(index);
            let polls = Arc::new(AtomicU64::new(0));
            guards.polls.push(polls.clone());
            let guard = move || {
                run_guard(&channels, index, (&nap, &pacer), timing, probe, &stop, &polls);
            };
            guards.threads.push(thread::Builder::new().name("elfen-guard".into()).spawn(guard)?);
        }
        Ok(guards)
    }

    /// How often each guard has polled its lane, in the order of the lane page. The count stops
    /// while the guard runs on another CPU or not at all. It goes on while the lane is offline.
    pub fn polls(&self) -> impl Iterator<Item = u64> {
        // Relaxed: the reader only wants to see that the count changes.
        self.polls.iter().map(|polls| polls.load(Relaxed))
    }
}

impl Drop for Guards {
    fn drop(&mut self) {
        // Relaxed: the join below orders everything else.
        self.stop.store(true, Relaxed);
        for thread in self.threads.drain(..) {
            // A guard does not panic. If it did, its lane would merely be unguarded.
            let _ended = thread.join();
        }
    }
}

fn run_guard(
    channels: &Channels,
    index: usize,
    (nap, pacer): (&Nap, &Pacer),
    timing: PollTiming,
    probe: Option<SiteProbe>,
    stop: &AtomicBool,
    polls: &AtomicU64,
) {
    let service_cache = ServiceCache::default();
    let Some(lane) = channels.lane(index, &service_cache) else { return };
    // `may_take_guard_rank` has established that this is permitted.
    let _ranked = placement::take_guard_rank();
    let mut guard = Guard { probe, ..Guard::new(channels, &lane, (nap, pacer), timing, stop) };
    while !stop.load(Relaxed) {
        if guard.is_offline() {
            guard.leave_lane_for(OFFLINE_SLEEP);
        } else if guard.is_on_its_lane() {
            guard.poll();
        } else {
            // On another CPU it must not act as if it occupied its lane, so this does not count as
            // a poll.
            guard.leave_lane_for(OFFLINE_SLEEP);
            continue;
        }
        polls.fetch_add(1, Relaxed);
    }
    lane.leave(monotonic_ns());
}

struct Guard<'g> {
    channels: &'g Channels,
    lane: &'g Lane<'g>,
    nap: &'g Nap,
    pacer: &'g Pacer,
    timing: PollTiming,
    stop: &'g AtomicBool,
    slack: Slack,
    idle_time: IdleTime,
    meter: Meter,
    probe: Option<SiteProbe>,
    ignored_naps: IgnoredNaps,
    critical: CriticalSections,
}

impl<'g> Guard<'g> {
    fn new(
        channels: &'g Channels,
        lane: &'g Lane<'g>,
        (nap, pacer): (&'g Nap, &'g Pacer),
        timing: PollTiming,
        stop: &'g AtomicBool,
    ) -> Self {
        let now_ns = monotonic_ns();
        lane.slot.guard_nap.store(nap.kind() as u64, Relaxed);
        let idle_time = IdleTime::from(now_ns, activity(channels, lane, now_ns));
        Self {
            channels,
            lane,
            nap,
            pacer,
            timing,
            stop,
            slack: Slack::least(),
            idle_time,
            meter: Meter::default(),
            probe: None,
            ignored_naps: IgnoredNaps::default(),
            critical: CriticalSections::default(),
        }
    }

    /// Polls the lane once, and does what the policy says.
    fn poll(&mut self) {
        if let (Some(probe), Some(words)) = (&mut self.probe, self.channels.live()) {
            probe.attend_rendezvous(self.channels, words);
        }
        let now_ns = monotonic_ns();
        if let Some(rest) = self.critical_time_left(now_ns) {
            // The section may end sooner.
            return self.leave_lane_for(rest.min(self.timing.interval));
        }
        self.measure_ipc();
        // The batch stopped when the kernel switched to this thread, some time before this line.
        let own = self.lane.tasks.and_then(|tasks| tasks.slot(self.lane.batch_cpu));
        let stopped_ns = own.and_then(TaskSlot::snapshot).and_then(|switch| switch.at_ns);
        let lane = self.lane;
        let step = lane.step(Actor::Guard, stopped_ns.unwrap_or(now_ns), now_ns);
        self.allow_slack(step.is_busy(), now_ns);
        match step {
            Step::Run { busy, until_ns } => {
                self.pacer.stop();
                self.ignored_naps = IgnoredNaps::default();
                let budget = until_ns.map(|until_ns| until_ns.saturating_sub(now_ns));
                let budget = budget.map_or(self.timing.interval, Duration::from_nanos);
                self.sleep_until_next_poll(busy, self.timing.interval.min(budget));
            }
            Step::Nap(wait) => {
                if let Some(probe) = &mut self.probe {
                    probe.note_request();
                }
                self.occupy_lane(&wait, now_ns);
            }
        }
    }

    /// Sleeps until the next poll, or until a check rings the doorbell. The batch has the lane
    /// meanwhile. The doorbell is not armed while the policy lets the batch run next to a request.
    fn sleep_until_next_poll(&mut self, busy: bool, at_most: Duration) {
        match (&mut self.probe, self.channels.live()) {
            (Some(probe), Some(words)) if !busy => {
                probe.sleep(self.lane, words, at_most);
            }
            _ => thread::sleep(at_most),
        }
    }

    /// Leaves the lane to others for this time; nothing ends the sleep earlier.
    fn leave_lane_for(&self, time: Duration) {
        self.pacer.stop();
        thread::sleep(time);
    }

    /// Whether the lane is offline. The kernel moves a guard whose lane goes offline to another
    /// CPU, maybe a request lane.
    fn is_offline(&self) -> bool {
        self.lane.inputs.hotplug.load(Relaxed) & BATCH_OFFLINE != 0
    }

    /// Whether this thread is on its lane, or could be moved back. A cpuset may keep it off.
    fn is_on_its_lane(&self) -> bool {
        // SAFETY: takes nothing and cannot fail.
        let here = unsafe { libc::sched_getcpu() };
        u32::try_from(here) == Ok(self.lane.batch_cpu) || affinity::pin(self.lane.batch_cpu).is_ok()
    }

    /// How much longer the guard leaves the lane to a batch thread that holds a lock.
    fn critical_time_left(&mut self, now_ns: u64) -> Option<Duration> {
        let busy = self.lane.request().is_none_or(TaskSlot::is_busy);
        let word = if busy { self.lane.slot.critical.load(Relaxed) } else { 0 };
        self.critical.time_left(word, now_ns)
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
        self.slack.set(self.idle_time.slack(busy, activity, now_ns).min(self.timing.slack));
    }

    /// Occupies the lane until the request lane idles or the next poll is due.
    ///
    /// A batch that received SIGTERM gets short slices in between, so that it can handle the
    /// signal.
    fn occupy_lane(&mut self, wait: &Wait<'_, '_>, now_ns: u64) {
        let ending_ns = self.lane.termination_requested_ns();
        if let Some(slice_ns) = termination_slice_ns(ending_ns, now_ns) {
            return self.leave_lane_for(Duration::from_nanos(slice_ns));
        }
        let is_called = || self.probe.as_ref().is_some_and(SiteProbe::is_called);
        let is_over = || {
            self.stop.load(Relaxed)
                || self.lane.termination_requested_ns() != ending_ns
                || is_called()
        };
        if matches!(self.nap, Nap::Block) {
            let busy_ns = self.channels.busy_ns(self.lane.batch_cpu, now_ns);
            let nap =
                if self.ignored_naps.observe(busy_ns, now_ns) { &Nap::Spin } else { self.nap };
            wait.on(nap, nanos(self.timing.interval), is_over);
            return;
        }
        let (unreported_ns, at_most_ns) = match self.nap.kind() {
            NapKind::Device | NapKind::Mwaitx => (UNREPORTED_NS, UNREPORTED_NS),
            NapKind::Umwait | NapKind::Block | NapKind::Spin => (0, NAP_MAX_NS),
        };
        let called_ns = self.probe.as_ref().and_then(SiteProbe::longest_nap_ns);
        self.report_occupied(now_ns, unreported_ns);
        let report = || {
            self.report_occupied(monotonic_ns(), unreported_ns);
            is_over()
        };
        if wait.on(self.nap, called_ns.unwrap_or(at_most_ns), report) == Woken::Elsewhere {
            // The nanonap module does not serve this pair. The launcher reads `guard_nap` and
            // warns.
            self.nap = &Nap::Spin;
            self.lane.slot.guard_nap.store(NapKind::Spin as u64, Relaxed);
        }
        if self.probe.is_some() {
            self.lane.slot.doorbell.store(AWAKE, Relaxed);
        }
    }

    /// Reports that the guard runs and occupies the lane: to the pacer, which then does not fire,
    /// and to checks. A batch thread that the scheduler runs nevertheless yields at its next check,
    /// and the pacer takes the lane back.
    fn report_occupied(&self, now_ns: u64, unreported_ns: u64) {
        self.pacer.postpone(now_ns, Duration::from_nanos(unreported_ns));
        let bell = &self.lane.slot.doorbell;
        if self.probe.is_some() && bell.load(Relaxed) != HOLDS {
            bell.store(HOLDS, Relaxed);
        }
    }
}

fn activity(channels: &Channels, lane: &Lane<'_>, now_ns: u64) -> Activity {
    Activity::of(channels.busy_ns(lane.request_cpu, now_ns), lane.service(now_ns))
}

/// Critical sections of the batch during requests.
///
/// The batch writes the word that names a section, so it could name a new one each time. All
/// sections therefore share one bound: together they get the lane for [`CRITICAL_BOUND_NS`], which
/// refills by one part in [`REFILL`] of the time that passes.
#[derive(Debug, Default)]
struct CriticalSections {
    /// The section that was seen last, and since when.
    section: u64,
    since_ns: u64,
    /// How much of the bound is used up, at `at_ns`.
    used_ns: u64,
    at_ns: u64,
    /// Whether the guard has left the lane to a section since `at_ns`.
    is_yielding: bool,
}

/// Two per mille of a lane that is always busy. The scheduler alone gives a batch up to four.
const REFILL: u64 = 500;

impl CriticalSections {
    /// For how long the guard may leave the lane to the section that `word` names. `None` if it
    /// names no section or the bound is used up.
    fn time_left(&mut self, word: u64, now_ns: u64) -> Option<Duration> {
        let passed_ns = now_ns.saturating_sub(std::mem::replace(&mut self.at_ns, now_ns));
        let used_ns =
            if self.is_yielding { self.used_ns.saturating_add(passed_ns) } else { self.used_ns };
        self.used_ns = used_ns.saturating_sub(passed_ns / REFILL);
        self.is_yielding = false;
        if word == 0 {
            return None;
        }
        if word != self.section {
            self.section = word;
            self.since_ns = now_ns;
        }
        let of_this_ns = CRITICAL_BOUND_NS.checked_sub(now_ns.saturating_sub(self.since_ns))?;
        let left_ns = CRITICAL_BOUND_NS.checked_sub(self.used_ns)?.min(of_this_ns);
        self.is_yielding = left_ns > 0;
        self.is_yielding.then(|| Duration::from_nanos(left_ns))
    }
}

/// How much later than due the kernel may let this thread's timers fire, to save an interrupt.
struct Slack(Duration);

impl Slack {
    /// The least slack, instead of the usual 50 us.
    fn least() -> Self {
        let mut slack = Self(Duration::MAX);
        slack.set(Duration::ZERO);
        slack
    }

    fn set(&mut self, slack: Duration) {
        if self.0 != slack {
            self.0 = slack;
            // SAFETY: prctl takes numbers. 0 would mean the default slack, so the least is 1.
            unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, nanos(slack).max(1), 0, 0, 0) };
        }
    }
}

/// Detects a program that runs on the batch lane although its threads should block in a nap. It has
/// no checks, or they are rare. The guard compares the lane's busy time since its last poll.
#[derive(Debug, Default)]
struct IgnoredNaps {
    before: Option<(u64, u64)>,
}

impl IgnoredNaps {
    /// Whether the lane was busy for more than half of the time since the last call.
    fn observe(&mut self, busy_ns: Option<u64>, now_ns: u64) -> bool {
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
        let mut critical = CriticalSections::default();
        assert_eq!(critical.time_left(0, 10), None, "no section");
        assert_eq!(critical.time_left(7, 1_000), Some(WHOLE));
        let rest = critical.time_left(7, 401_000).unwrap();
        assert!(WHOLE - rest >= Duration::from_nanos(399_000), "{rest:?}");
        assert_eq!(critical.time_left(7, 1_000 + CRITICAL_BOUND_NS), None);
        assert_eq!(critical.time_left(7, 99_000 * MS), None, "a dead thread left the word behind");
        assert_eq!(critical.time_left(9, 99_000 * MS), Some(WHOLE), "another section");
    }

    /// Goal: a batch that names a new section each time gets no more than one bound. Method: polls
    /// for a second, each with another section.
    #[test]
    fn sections_share_one_bound() {
        let mut critical = CriticalSections::default();
        let mut left_ns = 0;
        let mut now_ns = MS;
        for word in 1.. {
            if now_ns > 1_001 * MS {
                break;
            }
            let step_ns = 50_000;
            left_ns += if critical.time_left(word, now_ns).is_some() { step_ns } else { 0 };
            now_ns += step_ns;
        }
        let most_ns = CRITICAL_BOUND_NS + 1_000 * MS / REFILL + 50_000;
        assert!((CRITICAL_BOUND_NS..most_ns).contains(&left_ns), "{left_ns} ns of a second");
    }
}
