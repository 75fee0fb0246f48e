//! A guard's part of live checks. It sleeps until its next poll or until a check rings the
//! doorbell, probes now and then whether the batch has a check, and writes the planner's changes;
//! with several lanes, at a rendezvous of all guards.

use std::sync::Arc;
use std::sync::atomic::Ordering::*;
use std::thread::Thread;
use std::time::Duration;

use elfen_instrument::live::{Change, StoppedAt};
use elfen_kernel::preempted::{Notes, Preempted};
use elfen_rt::clock::{monotonic_ns, nanos};
use elfen_rt::lane::Lane;
use elfen_rt::nap::block;
use elfen_rt::signal::lane::{ASLEEP, AWAKE, LaneSlot};

use super::handover::{Exchange, Miss};
use super::handover::{Outcome, try_write};
use super::page::LiveWords;
use super::probe_schedule::{PROBE_TIME, ProbeSchedule};
use crate::channels::Channels;
use elfen_machine::affinity::Mask;
use elfen_machine::cpulist::CpuSet;
use elfen_machine::placement::{take_guard_rank, take_realtime_rank};
use elfen_machine::process::threads_of;

/// A batch thread that came onto its lane later than this after the start of the probe or request
/// did not have enough time to answer.
const LATE_NS: u64 = 20_000;

/// How often a thread may be in the way of a change, or asleep, before the change counts as late.
const UNCLEAR_MAX: u32 = 100;

/// The longest nap of a guard whose nap cannot be interrupted: a fraction of what the other guards
/// wait for it.
const CALLED_WITHIN_NS: u64 = 1_000_000;

/// The live checks of one lane's guard.
#[derive(Debug)]
pub(crate) struct SiteProbe {
    notes: Arc<Notes>,
    exchange: Arc<Exchange>,
    planner: Thread,
    schedule: ProbeSchedule,
    /// The task of the guard's thread.
    own_task: u64,
    /// The index of its lane in the lane page.
    index: usize,
    /// How many changes this guard has noticed.
    written: u32,
    /// Whether a request has come. A program that runs next to no request is left unchanged.
    saw_request: bool,
}

/// A probe in progress.
#[derive(Clone, Copy, Debug)]
struct Probe {
    at_ns: u64,
    at_tsc: u64,
}

impl SiteProbe {
    pub(super) fn new(
        notes: Arc<Notes>,
        exchange: Arc<Exchange>,
        planner: Thread,
        index: usize,
    ) -> Self {
        let schedule = ProbeSchedule::new();
        Self {
            notes,
            exchange,
            planner,
            schedule,
            own_task: 0,
            index,
            written: 0,
            saw_request: false,
        }
    }

    /// Whether the guards of all lanes are called to a rendezvous.
    pub(crate) fn is_called(&self) -> bool {
        self.exchange.rendezvous.as_ref().is_some_and(|rendezvous| rendezvous.is_called(self.index))
    }

    /// How long a guard may nap without checking whether it is called. `None` on a single lane.
    pub(crate) fn longest_nap_ns(&self) -> Option<u64> {
        self.exchange.rendezvous.as_ref().map(|_| CALLED_WITHIN_NS)
    }

    /// Comes to the rendezvous, if the guard is called to one.
    pub(crate) fn attend_rendezvous(&mut self, channels: &Channels, words: &LiveWords) {
        let Some(rendezvous) = &self.exchange.rendezvous else { return };
        let lanes = channels.assigned();
        let switches = |index: usize| {
            let (cpu, _) = lanes.get(index)?;
            let (map, _) = channels.tasks.as_ref()?;
            Some(map.slot(*cpu)?.switches.load(Relaxed))
        };
        let write = || {
            let cpus = lanes.iter().map(|&(batch, _)| batch).collect();
            self.write_change(&cpus);
        };
        if let Err(error) = rendezvous.attend(self.index, switches, write) {
            words.record_reason(&format!(
                "guards may not take real-time priority to patch several lanes: {error}"
            ));
        }
    }

    /// The guard has found the request lane busy.
    pub(crate) fn note_request(&mut self) {
        self.saw_request = true;
        self.schedule.note_request();
    }

    /// Sleeps for `at_most` while the batch may have the lane, or until a check rings. Before that,
    /// writes a change that waits.
    pub(crate) fn sleep(&mut self, lane: &Lane<'_>, words: &LiveWords, at_most: Duration) {
        // `new` ran in another thread, so the guard's own task is determined here.
        // SAFETY: gettid takes nothing and cannot fail.
        self.own_task = u64::from(std::process::id()) << 32
            | u64::from(unsafe { libc::gettid() }.unsigned_abs());
        if self.exchange.rendezvous.is_none() {
            // No batch thread runs now: this thread occupies the only lane.
            self.write_change(&[lane.batch_cpu].into_iter().collect());
        }
        let written = self.exchange.written.load(Relaxed);
        if self.written != written {
            self.written = written;
            self.schedule.note_change();
        }
        let slot = lane.slot;
        let is_due = self.saw_request && self.schedule.is_due(monotonic_ns());
        let probe = is_due.then(|| {
            slot.probe.store(1, Relaxed);
            Probe { at_ns: monotonic_ns(), at_tsc: tsc() }
        });
        let rung = self.wait_for_doorbell(lane, if probe.is_some() { PROBE_TIME } else { at_most });
        let now_ns = monotonic_ns();
        let noted = self.notes.preempted_by(lane.batch_cpu, self.own_task);
        let noted = noted.filter(|noted| noted.process != std::process::id());
        if let Some(probe) = probe {
            self.judge_probe(slot, words, probe, noted, now_ns);
        }
        if rung {
            words.stopped_by_check.fetch_add(1, Relaxed);
        } else if let Some(noted) = noted.filter(|noted| ran_next_to_request(lane, noted)) {
            words.stopped_by_guard.fetch_add(1, Relaxed);
            self.schedule.note_overlap();
            self.report_miss(words, &noted);
        }
    }

    fn judge_probe(
        &mut self,
        slot: &LaneSlot,
        words: &LiveWords,
        probe: Probe,
        noted: Option<Preempted>,
        now_ns: u64,
    ) {
        if slot.probe.swap(0, Acquire) == 0 {
            let ticks = slot.answer_tsc.load(Relaxed).saturating_sub(probe.at_tsc);
            let all = tsc().saturating_sub(probe.at_tsc).max(1);
            let gap = u128::from(ticks) * u128::from(now_ns - probe.at_ns) / u128::from(all);
            words.gap.record_shared(u64::try_from(gap).unwrap_or(u64::MAX));
            words.probes.fetch_add(1, Relaxed);
            return self.schedule.record(false, now_ns);
        }
        let ran = |noted: &Preempted| {
            noted.since_ns < probe.at_ns + LATE_NS
                && noted.until_ns >= probe.at_ns + nanos(PROBE_TIME) / 2
        };
        let Some(noted) = noted.filter(ran) else { return self.schedule.record_void(now_ns) };
        words.gap.record_shared(noted.until_ns.saturating_sub(probe.at_ns));
        words.probes.fetch_add(1, Relaxed);
        words.missed.fetch_add(1, Relaxed);
        self.schedule.record(true, now_ns);
        self.report_miss(words, &noted);
    }

    fn report_miss(&self, words: &LiveWords, noted: &Preempted) {
        if noted.in_kernel {
            return words.count(&elfen_instrument::live::Missed::Kernel);
        }
        let Preempted { process, thread, ip, sp, .. } = *noted;
        if let Some(mut miss) = self.exchange.miss.try_lock() {
            *miss = Some(Miss { process, stood: StoppedAt { thread, ip, sp } });
            drop(miss);
            self.planner.unpark();
        }
    }

    /// Writes the change that waits. No batch thread runs on the lanes now. A process with a thread
    /// elsewhere is refused; the supervisor puts that thread back.
    fn write_change(&self, lanes: &CpuSet) {
        let is_done = try_write(&self.exchange.change, |change| {
            if change.takes_several() {
                self.write_several(change, lanes)
            } else {
                Some(write(change, lanes))
            }
        });
        if is_done {
            self.exchange.written.fetch_add(1, Relaxed);
            self.planner.unpark();
        }
    }

    /// Writes a change of several instructions, for which no thread may stand inside the patch
    /// site. That must not change between the look at the thread and the last write, hence the
    /// rank: the scheduler gives a batch a little of a lane that an ordinary thread occupies.
    /// Returns `None` if the thread is inside the patch site now; the next poll retries.
    fn write_several(&self, change: &Change, lanes: &CpuSet) -> Option<Outcome> {
        if take_realtime_rank().is_err() {
            return Some(Outcome::Refused);
        }
        let stood = lanes.iter().next().and_then(|cpu| self.notes.preempted_by(cpu, self.own_task));
        let stood = stood.filter(|noted| noted.process == change.process && !noted.in_kernel);
        let is_clear = change.is_clear(stood.map(|noted| (noted.thread, noted.ip)));
        let outcome = is_clear.then(|| write(change, lanes));
        // The thread had this rank before, so it may take it again.
        let _as_before = take_guard_rank();
        outcome.or_else(|| {
            let unclear = self.exchange.unclear.fetch_add(1, Relaxed);
            (unclear >= UNCLEAR_MAX).then_some(Outcome::Late)
        })
    }

    /// Waits on the doorbell. Returns whether a check rang.
    fn wait_for_doorbell(&self, lane: &Lane<'_>, at_most: Duration) -> bool {
        let bell = &lane.slot.doorbell;
        // SeqCst: before the reads below. A check that finds a request, or a planner that calls,
        // after these reads finds the doorbell armed.
        bell.store(ASLEEP, SeqCst);
        if lane.request().is_some_and(|slot| slot.is_busy()) {
            return bell.swap(AWAKE, Acquire) == AWAKE;
        }
        if !self.is_called() {
            block::wait(bell, 1, nanos(at_most));
        }
        bell.swap(AWAKE, Acquire) == AWAKE && !self.is_called()
    }
}

fn write(change: &Change, lanes: &CpuSet) -> Outcome {
    let applied = is_on_lanes(change, lanes) && change.apply();
    if applied { Outcome::Applied } else { Outcome::Refused }
}

fn is_on_lanes(change: &Change, lanes: &CpuSet) -> bool {
    let home = Mask::of(lanes);
    let threads = threads_of(change.process);
    let is_home = |&thread: &u32| Mask::read(thread).is_ok_and(|mask| mask.is_within(&home));
    !threads.is_empty() && threads.iter().all(is_home)
}

/// Whether the batch thread ran on next to a request for longer than a check needs to ring.
fn ran_next_to_request(lane: &Lane<'_>, noted: &Preempted) -> bool {
    let switch = lane.request().and_then(|slot| slot.snapshot());
    let Some(busy_ns) = switch.and_then(|switch| switch.busy_since_ns) else { return false };
    noted.since_ns.max(busy_ns) + LATE_NS < noted.until_ns
}

fn tsc() -> u64 {
    // SAFETY: every processor that Elfen runs on has this instruction.
    unsafe { core::arch::x86_64::_rdtsc() }
}
