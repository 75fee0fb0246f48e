//! The guard's side: it sleeps until its next look or until a check rings, asks now and then who
//! checks, and writes what the planner has made.

use std::sync::Arc;
use std::sync::atomic::Ordering::*;
use std::thread::Thread;
use std::time::Duration;

use elfen_instrument::live::{Change, Stood};
use elfen_kernel::preempted::{Notes, Preempted};
use elfen_rt::clock::{monotonic_ns, nanos};
use elfen_rt::lane::Lane;
use elfen_rt::nap::block;
use elfen_rt::signal::lane::LaneSlot;

use super::drills::{DRILL, Drills};
use super::exchange::{APPLIED, Exchange, Miss, REFUSED};
use super::words::LiveWords;
use crate::affinity::Mask;
use crate::process::threads_of;

/// A batch thread that came onto its lane later than this after the question, or after the request,
/// was not asked for long enough.
const LATE_NS: u64 = 20_000;

/// The rehearsals of one lane's guard.
#[derive(Debug)]
pub(in crate::run) struct Rehearsal {
    notes: Arc<Notes>,
    exchange: Arc<Exchange>,
    planner: Thread,
    drills: Drills,
    own: u64,
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
    pub(super) fn new(notes: Arc<Notes>, exchange: Arc<Exchange>, planner: Thread) -> Self {
        Self { notes, exchange, planner, drills: Drills::new(), own: 0, met_request: false }
    }

    /// The guard has seen the lane busy.
    pub(in crate::run) fn meet_request(&mut self) {
        self.met_request = true;
    }

    /// Sleeps for `at_most` on a lane that the batch may have, or until a check rings.
    pub(in crate::run) fn sleep(&mut self, lane: &Lane<'_>, words: &LiveWords, at_most: Duration) {
        // The thread that sleeps is the guard's, and this was made elsewhere.
        // SAFETY: takes nothing and cannot fail.
        self.own = u64::from(std::process::id()) << 32
            | u64::from(unsafe { libc::gettid() }.unsigned_abs());
        self.write_change(lane);
        let slot = lane.slot;
        let is_due = self.met_request && self.drills.is_due(monotonic_ns());
        let asked = is_due.then(|| {
            slot.drill.store(1, Relaxed);
            Asked { at_ns: monotonic_ns(), at_tsc: tsc() }
        });
        let rung = wait_for_bell(lane, if asked.is_some() { DRILL } else { at_most });
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
            words.gap.record(u64::try_from(gap).unwrap_or(u64::MAX));
            words.drills.fetch_add(1, Relaxed);
            return self.drills.judged(false, now_ns);
        }
        let ran = |noted: &Preempted| {
            noted.since_ns < asked.at_ns + LATE_NS
                && noted.until_ns >= asked.at_ns + nanos(DRILL) / 2
        };
        let Some(noted) = noted.filter(ran) else { return self.drills.void(now_ns) };
        words.gap.record(noted.until_ns.saturating_sub(asked.at_ns));
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
            *miss = Some(Miss { process, stood: Stood { thread, ip, sp } });
            drop(miss);
            self.planner.unpark();
        }
    }

    /// Nothing of the batch runs now: this thread has the only lane. A process of which a thread
    /// may be elsewhere is left for the keeper to put back.
    fn write_change(&mut self, lane: &Lane<'_>) {
        let Some(change) = self.exchange.change.try_lock().and_then(|mut one| one.take()) else {
            return;
        };
        let applied = is_at_home(&change, lane.batch_cpu) && change.apply();
        self.exchange.outcome.store(if applied { APPLIED } else { REFUSED }, Release);
        self.planner.unpark();
        self.drills.changed();
    }
}

fn is_at_home(change: &Change, cpu: u32) -> bool {
    let here = Mask::of(&[cpu].into_iter().collect());
    let threads = threads_of(change.process);
    let is_home = |&thread: &u32| Mask::read(thread).is_ok_and(|mask| mask.is_within(&here));
    !threads.is_empty() && threads.iter().all(is_home)
}

/// Whether the batch thread went on next to a request for longer than a check takes to ring.
fn was_beside_request(lane: &Lane<'_>, noted: &Preempted) -> bool {
    let switch = lane.request().and_then(|slot| slot.snapshot());
    let Some(busy_ns) = switch.and_then(|switch| switch.busy_since_ns) else { return false };
    noted.since_ns.max(busy_ns) + LATE_NS < noted.until_ns
}

/// Says whether a check rang.
fn wait_for_bell(lane: &Lane<'_>, at_most: Duration) -> bool {
    let bell = &lane.slot.bell;
    // SeqCst: before the look below. A request that comes after that look finds the bell there.
    bell.store(1, SeqCst);
    if lane.request().is_some_and(|slot| slot.is_busy()) {
        return bell.swap(0, Acquire) == 0;
    }
    block::wait(bell, 1, nanos(at_most));
    bell.swap(0, Acquire) == 0
}

fn tsc() -> u64 {
    // SAFETY: every processor that Elfen runs on has it.
    unsafe { core::arch::x86_64::_rdtsc() }
}
