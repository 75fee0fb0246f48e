//! The guard's side: it sleeps until its next look or until a check rings, asks now and then who
//! checks, and writes what the planner has made; with several lanes, together with the others.

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

use super::drills::{DRILL, Drills};
use super::exchange::{Exchange, Miss};
use super::handover::{Outcome, take_up};
use super::words::LiveWords;
use crate::affinity::Mask;
use crate::cpulist::CpuSet;
use crate::process::threads_of;
use crate::run::channels::Channels;
use crate::run::place::{rank_above_all, rank_first};

/// A batch thread that came onto its lane later than this after the question, or after the request,
/// was not asked for long enough.
const LATE_NS: u64 = 20_000;

/// How often a thread may stand in the way of a change, or sleep, until that is put off.
const UNCLEAR_MAX: u32 = 100;

/// Of a guard whose nap can't be interrupted: a part of what the others wait for it.
const CALLED_WITHIN_NS: u64 = 1_000_000;

/// The rehearsals of one lane's guard.
#[derive(Debug)]
pub(in crate::run) struct Rehearsal {
    notes: Arc<Notes>,
    exchange: Arc<Exchange>,
    planner: Thread,
    drills: Drills,
    own: u64,
    /// Its lane, by its index in the lane page.
    index: usize,
    /// Changes that it knows of.
    written: u32,
    /// A request has come by: a program that meets none is left as it is.
    met_request: bool,
}

/// A drill that is under way.
#[derive(Clone, Copy, Debug)]
struct Asked {
    at_ns: u64,
    at_tsc: u64,
}

impl Rehearsal {
    pub(super) fn new(
        notes: Arc<Notes>,
        exchange: Arc<Exchange>,
        planner: Thread,
        index: usize,
    ) -> Self {
        let drills = Drills::new();
        Self { notes, exchange, planner, drills, own: 0, index, written: 0, met_request: false }
    }

    /// Whether the guards of all lanes are called together.
    pub(in crate::run) fn is_called(&self) -> bool {
        self.exchange.meetings.as_ref().is_some_and(|meetings| meetings.is_called(self.index))
    }

    /// How long a guard may nap without looking whether it is called: other lanes wait for it.
    pub(in crate::run) fn nap_at_most_ns(&self) -> Option<u64> {
        self.exchange.meetings.as_ref().map(|_| CALLED_WITHIN_NS)
    }

    /// Comes to the meeting that it is called to, if it is to one.
    pub(in crate::run) fn attend(&mut self, channels: &Channels, words: &LiveWords) {
        let Some(meetings) = &self.exchange.meetings else { return };
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
        if let Err(error) = meetings.attend(self.index, switches, write) {
            words.say_why(&format!("guards may not take the lanes for a moment: {error}"));
        }
    }

    /// The guard has seen the lane busy.
    pub(in crate::run) fn meet_request(&mut self) {
        self.met_request = true;
        self.drills.met();
    }

    /// Sleeps for `at_most` on a lane that the batch may have, or until a check rings.
    pub(in crate::run) fn sleep(&mut self, lane: &Lane<'_>, words: &LiveWords, at_most: Duration) {
        // The thread that sleeps is the guard's, and this was made elsewhere.
        // SAFETY: takes nothing and cannot fail.
        self.own = u64::from(std::process::id()) << 32
            | u64::from(unsafe { libc::gettid() }.unsigned_abs());
        if self.exchange.meetings.is_none() {
            // Nothing of the batch runs now: this thread has the only lane.
            self.write_change(&[lane.batch_cpu].into_iter().collect());
        }
        let written = self.exchange.written.load(Relaxed);
        if self.written != written {
            self.written = written;
            self.drills.changed();
        }
        let slot = lane.slot;
        let is_due = self.met_request && self.drills.is_due(monotonic_ns());
        let asked = is_due.then(|| {
            slot.drill.store(1, Relaxed);
            Asked { at_ns: monotonic_ns(), at_tsc: tsc() }
        });
        let rung = self.wait_for_bell(lane, if asked.is_some() { DRILL } else { at_most });
        let now_ns = monotonic_ns();
        let noted = self.notes.before(lane.batch_cpu, self.own);
        let noted = noted.filter(|noted| noted.process != std::process::id());
        if let Some(asked) = asked {
            self.judge(slot, words, asked, noted, now_ns);
        }
        if rung {
            words.bells.fetch_add(1, Relaxed);
        } else if let Some(noted) = noted.filter(|noted| was_beside_request(lane, noted)) {
            words.stopped_by_guard.fetch_add(1, Relaxed);
            self.drills.was_beside();
            self.missed(words, &noted);
        }
    }

    fn judge(
        &mut self,
        slot: &LaneSlot,
        words: &LiveWords,
        asked: Asked,
        noted: Option<Preempted>,
        now_ns: u64,
    ) {
        if slot.drill.swap(0, Acquire) == 0 {
            let ticks = slot.answer_tsc.load(Relaxed).saturating_sub(asked.at_tsc);
            let all = tsc().saturating_sub(asked.at_tsc).max(1);
            let gap = u128::from(ticks) * u128::from(now_ns - asked.at_ns) / u128::from(all);
            words.gap.record_shared(u64::try_from(gap).unwrap_or(u64::MAX));
            words.drills.fetch_add(1, Relaxed);
            return self.drills.judged(false, now_ns);
        }
        let ran = |noted: &Preempted| {
            noted.since_ns < asked.at_ns + LATE_NS
                && noted.until_ns >= asked.at_ns + nanos(DRILL) / 2
        };
        let Some(noted) = noted.filter(ran) else { return self.drills.void(now_ns) };
        words.gap.record_shared(noted.until_ns.saturating_sub(asked.at_ns));
        words.drills.fetch_add(1, Relaxed);
        words.missed.fetch_add(1, Relaxed);
        self.drills.judged(true, now_ns);
        self.missed(words, &noted);
    }

    fn missed(&self, words: &LiveWords, noted: &Preempted) {
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

    /// Nothing of the batch runs on its lanes now. A process of which a thread may be elsewhere is
    /// left for the keeper to put back.
    fn write_change(&self, lanes: &CpuSet) {
        let is_done = take_up(&self.exchange.change, |change| match change.takes_several() {
            false => Some(write(change, lanes)),
            true => self.write_several(change, lanes),
        });
        if is_done {
            self.exchange.written.fetch_add(1, Relaxed);
            self.planner.unpark();
        }
    }

    /// Where it matters where the thread stands, that must not change between the look and the last
    /// write: the scheduler leaves a batch a little of a lane that others have. Nothing: the thread
    /// stands there now.
    fn write_several(&self, change: &Change, lanes: &CpuSet) -> Option<Outcome> {
        if rank_above_all().is_err() {
            return Some(Outcome::Refused);
        }
        let stood = lanes.iter().next().and_then(|cpu| self.notes.before(cpu, self.own));
        let stood = stood.filter(|noted| noted.process == change.process && !noted.in_kernel);
        let is_clear = change.is_clear(stood.map(|noted| (noted.thread, noted.ip)));
        let outcome = is_clear.then(|| write(change, lanes));
        // It could have this rank before.
        let _as_before = rank_first();
        outcome.or_else(|| {
            let unclear = self.exchange.unclear.fetch_add(1, Relaxed);
            (unclear >= UNCLEAR_MAX).then_some(Outcome::Late)
        })
    }

    /// Says whether a check rang.
    fn wait_for_bell(&self, lane: &Lane<'_>, at_most: Duration) -> bool {
        let bell = &lane.slot.bell;
        // SeqCst: before the looks below. A request, or a call, that comes after them finds the
        // bell there.
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
    let applied = is_at_home(change, lanes) && change.apply();
    if applied { Outcome::Applied } else { Outcome::Refused }
}

fn is_at_home(change: &Change, lanes: &CpuSet) -> bool {
    let home = Mask::of(lanes);
    let threads = threads_of(change.process);
    let is_home = |&thread: &u32| Mask::read(thread).is_ok_and(|mask| mask.is_within(&home));
    !threads.is_empty() && threads.iter().all(is_home)
}

/// Whether the batch thread went on next to a request for longer than a check takes to ring.
fn was_beside_request(lane: &Lane<'_>, noted: &Preempted) -> bool {
    let switch = lane.request().and_then(|slot| slot.snapshot());
    let Some(busy_ns) = switch.and_then(|switch| switch.busy_since_ns) else { return false };
    noted.since_ns.max(busy_ns) + LATE_NS < noted.until_ns
}

fn tsc() -> u64 {
    // SAFETY: every processor that Elfen runs on has it.
    unsafe { core::arch::x86_64::_rdtsc() }
}
