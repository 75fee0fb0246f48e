//! A batch lane, in the hands of a guard or of a thread that checks itself: sample the
//! request lane, decide, wait.
//!
//! Both do the same with different hands. [`Lane::step`] looks once and says whether the batch may
//! run; if not, the [`Wait`] that it returns waits for what would change that. A guard steps when
//! its timer fires and waits in the batch's stead; a thread that checks steps when its check finds
//! the lane busy, and waits itself. Threads with checks keep what the policy remembers in the
//! lane's slot, as threads and processes take turns on a lane. A guard keeps its own: it believes
//! nothing that the batch can write.
//!
//! What the batch borrowed and overlapped is not guessed from looks: the kernel counts how long its
//! tasks ran on the lane and how much of that beside a busy request lane
//! ([`crate::signal::account`]). A step takes what has come to that account since the last one, and
//! leaves out what a batch thread napped away by itself, which to the kernel is running.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

use crate::clock::monotonic_ns;
use crate::nap::block::Block;
use crate::nap::line::Pause;
use crate::nap::{Nap, Woken, protocol};
use crate::policy::{Policy, Sample, Service, State, Verdict};
use crate::process::Liveness;
use crate::service::shown;
use crate::signal::control::{ControlSlot, Settings};
use crate::signal::lane::{LaneInputs, LaneSlot, LaneState, REQUEST_OFFLINE};
use crate::signal::service::{ServiceReader, ServiceSlot, Writer};
use crate::signal::task::{Running, Switch, TaskMap, TaskSlot};

/// How long a service that was seen alive, or dead, counts as that: looking costs system calls.
const WRITER_TRUSTED_NS: u64 = 10_000_000;

/// A nap on the task map ends when the request lane idles, which is all that a verdict to nap waits
/// for. At the latest after this: the program that writes the map may be gone.
const NAP_BOUND_NS: u64 = 100_000_000;
/// The same on a service's words, which have no writer once the service is dead.
const SERVICE_BOUND_NS: u64 = WRITER_TRUSTED_NS;
/// A thread that blocks is woken by a third process.
const BLOCK_BOUND_NS: u64 = 2_000_000;

/// The side that steps on the lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hand {
    /// The guard, a thread of `elfen run`, in the batch's stead.
    Guard,
    /// A batch thread, at a check of its own.
    Check,
}

/// A batch lane's view of its request lane.
#[derive(Debug)]
pub struct Lane<'a> {
    pub batch_cpu: u32,
    pub request_cpu: u32,
    /// With neither a task map nor a service, the request lane counts as busy.
    pub tasks: Option<&'a TaskMap>,
    pub service: Option<&'a ServiceReader>,
    pub control: &'a ControlSlot,
    /// Where the lane's state and counts are published. Every process of the batch can write it.
    pub slot: &'a LaneSlot,
    /// What decides: for a guard, in memory that only its process can write.
    pub inputs: &'a LaneInputs,
    pub memory: &'a Memory,
}

/// What a process remembers from one look at a lane to the next, for all its threads. Every word is
/// a hint that is looked at again; zeroed memory is one that no look has used.
#[derive(Debug, Default)]
pub struct Memory {
    /// Which slot of the service's page stood for the lane last time, and who wrote it.
    service_slot: AtomicU32,
    writer: AtomicU64,
    /// The last writer that was found dead.
    dead: AtomicU64,
    looked_at_ns: AtomicU64,
}

/// The outcome of a step.
#[derive(Debug)]
pub enum Step<'l, 'a> {
    /// The batch may run: on a busy lane until `until_ns`, if a budget says until when.
    Run {
        busy: bool,
        until_ns: Option<u64>,
    },
    Nap(Wait<'l, 'a>),
}

impl Step<'_, '_> {
    pub fn verdict(&self) -> Verdict {
        match self {
            Self::Run { .. } => Verdict::Run,
            Self::Nap(_) => Verdict::Nap,
        }
    }

    pub fn is_busy(&self) -> bool {
        matches!(self, Self::Run { busy: true, .. } | Self::Nap(_))
    }
}

/// The samples of one look, in the order in which they were taken.
struct Look<'a> {
    switch: Option<Switch>,
    service: Option<&'a ServiceSlot>,
    sample: Sample,
}

impl<'a> Lane<'a> {
    /// Looks, decides and counts. `stopped_ns` is when the batch last ran on the lane: `now_ns` for
    /// a thread that checks, and for a guard the time at which it was switched in.
    pub fn step(&self, hand: Hand, stopped_ns: u64, now_ns: u64) -> Step<'_, 'a> {
        let policy = self.settings().policy();
        let before = self.inputs.state();
        let counts = policy != Policy::BorrowIdle && !matches!(before, State::Fresh { .. });
        let look = self.look(counts, now_ns);
        let lane = &look.sample;
        let due_ns = policy.deadline_ns(before, lane, now_ns);
        let (after, verdict) = policy.check(before, lane, now_ns);
        self.remember(after);
        self.count(look.switch.as_ref(), now_ns);
        if verdict == Verdict::Nap {
            self.react(&look, due_ns, stopped_ns);
        }
        self.enter(hand, verdict, &look, now_ns);
        match verdict {
            Verdict::Run => {
                let until_ns = policy.deadline_ns(after, lane, now_ns).filter(|_| lane.busy);
                Step::Run { busy: lane.busy, until_ns }
            }
            Verdict::Nap => Step::Nap(Wait { lane: self, service: look.service, hand }),
        }
    }

    /// The batch leaves the lane: counts what it ran, and says in the slot that no batch thread is
    /// there.
    pub fn leave(&self, now_ns: u64) {
        self.tally(now_ns);
        self.slot.enter(LaneState::Off, now_ns);
    }

    /// Counts what the batch ran since the last count.
    pub fn tally(&self, now_ns: u64) {
        self.count(self.request().and_then(TaskSlot::snapshot).as_ref(), now_ns);
    }

    /// When the batch was last told to end; 0 if never.
    pub fn told_to_end_ns(&self) -> u64 {
        self.control.told_to_end_ns.load(Relaxed)
    }

    /// The request lane's slot of the task map.
    pub fn request(&self) -> Option<&'a TaskSlot> {
        self.tasks?.slot(self.request_cpu)
    }

    /// The settings in force; `borrow-idle` while the control page holds nothing, or a change that
    /// its writer did not live to end.
    pub fn settings(&self) -> Settings {
        self.control.settings().map_or(Settings::BORROW_IDLE, |(_, settings)| settings)
    }

    /// The slot of the service that serves on the request lane; `None` if none does, or the one
    /// that did is dead. Found anew at each look: a service claims its lanes one by one, and
    /// other slots after a restart.
    pub fn service(&self, now_ns: u64) -> Option<&'a ServiceSlot> {
        let (reader, memory) = (self.service?, self.memory);
        let age_ns = now_ns.saturating_sub(memory.looked_at_ns.load(Relaxed));
        let recent = memory.looked_at_ns.load(Relaxed) != 0 && age_ns < WRITER_TRUSTED_NS;
        let writer_of = |lane| reader.slot(lane).map_or(0, |slot| slot.writer.load(Relaxed));
        let last = memory.service_slot.load(Relaxed);
        let trusted = recent && writer_of(last) == memory.writer.load(Relaxed);
        if trusted && reader.stands_for(last, self.request_cpu) {
            return reader.slot(last);
        }
        let known_dead = |lane| recent && writer_of(lane) == memory.dead.load(Relaxed);
        let candidates = (0..reader.lanes())
            .filter(|&lane| reader.stands_for(lane, self.request_cpu) && !known_dead(lane));
        for lane in candidates {
            let word = writer_of(lane);
            memory.looked_at_ns.store(now_ns, Relaxed);
            match reader.writer(lane) {
                Writer::Process(_, Liveness::Alive | Liveness::Unknown) => {
                    memory.service_slot.store(lane, Relaxed);
                    memory.writer.store(word, Relaxed);
                    return reader.slot(lane);
                }
                Writer::Process(_, Liveness::Dead) | Writer::Nobody => {
                    memory.dead.store(word, Relaxed);
                    memory.writer.store(0, Relaxed);
                }
            }
        }
        None
    }

    /// `counts` says that a request that has just ended has to be among the finished ones.
    fn look(&self, counts: bool, now_ns: u64) -> Look<'a> {
        let switch = self.request().and_then(TaskSlot::snapshot);
        let slot = self.service(now_ns);
        let service = slot.map(|slot| published(slot, counts));
        let busy = match switch.map(|switch| switch.running) {
            _ if self.is_gone() => false,
            Some(Running::Idle) => false,
            Some(Running::Task(_) | Running::Unknown) => true,
            // Torn 16 times in a row: the lane switches all the time.
            None if self.tasks.is_some() => true,
            // The page alone. A service that is dead, or does not serve here, has no work; no
            // page at all says nothing.
            None => service
                .map_or(self.service.is_none(), |s| s.running_request != 0 || s.queue_len != 0),
        };
        let started_ns = service.map_or(0, |s| s.request_started_ns);
        let sample = Sample {
            busy,
            busy_since_ns: switch.and_then(|switch| switch.busy_since_ns),
            service,
            ipc_milli: self.inputs.ipc_milli(started_ns, now_ns),
        };
        Look { switch, service: slot, sample }
    }

    /// Whether the request lane's CPU is offline, where the kernel switches
    /// nothing, and traces nothing.
    fn is_gone(&self) -> bool {
        self.inputs.hotplug.load(Relaxed) & REQUEST_OFFLINE != 0
    }

    /// An idle moment that a guard has seen counts for threads with checks too: they do not look at
    /// a lane that idles.
    fn remember(&self, state: State) {
        self.inputs.remember(state);
        if matches!(state, State::Fresh { .. }) && !core::ptr::eq(self.inputs, &self.slot.inputs) {
            self.slot.inputs.remember(state);
        }
    }

    /// Takes over what the kernel has added to its account.
    fn count(&self, request: Option<&Switch>, now_ns: u64) {
        let slot = self.slot;
        let claim = slot.account_claim.load(Relaxed);
        let index = usize::try_from(slot.account_index.load(Relaxed)).unwrap_or(usize::MAX);
        let (Some(tasks), Some(request)) = (self.tasks, request) else { return };
        let Some(account) = tasks.account(self.batch_cpu, index, claim) else { return };
        let ran_ns = account.ran_until_ns(now_ns);
        let shared_ns = account.shared_until_ns(now_ns, request.busy_until_ns(now_ns));
        // The larger stays: of two threads that count at once, each stretch goes to one.
        let ran_ns = ran_ns.saturating_sub(slot.counted_ran_ns.fetch_max(ran_ns, Relaxed));
        let shared_ns =
            shared_ns.saturating_sub(slot.counted_shared_ns.fetch_max(shared_ns, Relaxed));
        // The time that a batch thread naps away on its CPU is no work. A batch task that runs
        // while the guard holds the lane does work.
        if matches!(slot.state(), Some((LaneState::Napping, _))) {
            return;
        }
        let shared_ns = shared_ns.min(ran_ns);
        slot.add_overlapped(shared_ns);
        slot.add_borrowed(ran_ns - shared_ns);
    }

    /// Records how fast the lane was left, if it is left now.
    fn react(&self, look: &Look<'_>, due_ns: Option<u64>, stopped_ns: u64) {
        if !matches!(self.slot.state(), Some((LaneState::Running, _))) {
            return;
        }
        let started_ns = || look.sample.service.map(|s| s.request_started_ns).filter(|&at| at != 0);
        let since_ns = match &look.switch {
            Some(switch) => switch.busy_since_ns,
            None => started_ns(),
        };
        let Some(since_ns) = since_ns else { return };
        // A thread that had a budget was due off its lane when that ended.
        let due_ns = due_ns.map_or(since_ns, |due_ns| due_ns.max(since_ns));
        self.slot.reaction.record_shared(stopped_ns.saturating_sub(due_ns));
    }

    /// Puts the lane's new state into its slot, and records how fast it was taken.
    fn enter(&self, hand: Hand, verdict: Verdict, look: &Look<'_>, now_ns: u64) {
        let before = self.slot.state();
        let naps_on = before.is_some_and(|(state, since_ns)| {
            state == LaneState::Napping && now_ns.saturating_sub(since_ns) < NAP_BOUND_NS
        });
        let before = before.map(|(state, _)| state);
        match (verdict, hand) {
            // A guard that finds the batch napping leaves it at that.
            (Verdict::Nap, Hand::Guard) if before == Some(LaneState::Napping) => {}
            (Verdict::Nap, Hand::Guard) => self.slot.enter(LaneState::Held, now_ns),
            (Verdict::Nap, Hand::Check) => self.slot.enter(LaneState::Napping, now_ns),
            (Verdict::Run, _) if before == Some(LaneState::Running) => {}
            // The thread that naps has not looked yet, and the next request may come before it
            // does: it would nap on, and count as running. It says itself that its nap is over,
            // at the latest after its bound; after that it is gone.
            (Verdict::Run, Hand::Guard) if naps_on => {}
            (Verdict::Run, _) => {
                let idle = look.switch.filter(|_| !look.sample.busy);
                let napped = matches!(before, Some(LaneState::Napping | LaneState::Held));
                if let (true, Some(idle_at_ns)) = (napped, idle.and_then(|switch| switch.at_ns)) {
                    self.slot.wake.record_shared(now_ns.saturating_sub(idle_at_ns));
                }
                self.slot.enter(LaneState::Running, now_ns);
            }
        }
    }
}

/// How often a sample is taken anew that a request began or ended in.
const SAMPLES: usize = 4;
/// How long a service takes from one of its two stores at the end of a request to the other.
const SETTLE_PAUSES: usize = 8;

/// The words of a slot at one moment. A request that has just ended, beside the count in which it
/// is, would look like one that came after another and had to wait; and a count without it, beside
/// no request, would make the next one look like that. No later look would mend the second: checks
/// do not look at a lane that idles.
fn published(slot: &ServiceSlot, counts: bool) -> Service {
    let mut service = sample(slot);
    for _ in 1..SAMPLES {
        // Acquire in `sample`: a count that `Worker::end` wrote after it cleared the request is not
        // seen before that.
        if slot.running_request.load(Relaxed) == service.running_request {
            break;
        }
        service = sample(slot);
    }
    if counts && service.running_request == 0 {
        (0..SETTLE_PAUSES).for_each(|_| core::hint::spin_loop());
        service = sample(slot);
    }
    service
}

fn sample(slot: &ServiceSlot) -> Service {
    let (running_request, request_started_ns) =
        shown(&slot.running_request, &slot.request_started_ns);
    Service {
        queue_len: slot.queue_len.load(Relaxed),
        running_request,
        request_started_ns,
        // Acquire: pairs with the release in `Worker::end`.
        finished: slot.finished_requests.load(Acquire),
    }
}

/// How long a batch that was told to end is given a tenth of its lane.
const TO_END_NS: u64 = 1_000_000_000;
const SLICE_EVERY_NS: u64 = 100_000_000;
const SLICE_NS: u64 = 10_000_000;

/// A batch that was told to end at `told_ns` may have its lane for a tenth of the next second, even
/// beside a request: next to a request lane that is busy all the time it could not even die. The
/// rest of the slice, if this is one.
pub fn time_to_end_ns(told_ns: u64, now_ns: u64) -> Option<u64> {
    let since_ns = now_ns.saturating_sub(told_ns);
    let left_ns = SLICE_NS.checked_sub(since_ns % SLICE_EVERY_NS);
    left_ns.filter(|&left_ns| told_ns != 0 && since_ns < TO_END_NS && left_ns > 0)
}

/// Waits on a lane for the request lane to idle. Under every policy that is what a
/// verdict to nap waits for.
#[derive(Debug)]
pub struct Wait<'l, 'a> {
    lane: &'l Lane<'a>,
    service: Option<&'a ServiceSlot>,
    hand: Hand,
}

/// Where neither the kernel nor a service writes anything, there is a bound to wait for.
static NOTHING: AtomicU64 = AtomicU64::new(1);

impl Wait<'_, '_> {
    /// Waits until the request lane idles, `is_over` says so, or the bound passes.
    /// [`Woken::Elsewhere`]: this nap can't be had on this pair.
    pub fn on(&self, nap: &Nap, bound_ns: u64, is_over: impl Fn() -> bool) -> Woken {
        let bound_ns = bound_ns.min(self.bound_ns(nap));
        let end_ns = monotonic_ns().saturating_add(bound_ns);
        let left_ns = || end_ns.saturating_sub(monotonic_ns());
        let goes_on = || self.is_busy() && !is_over();
        let line = self.line();
        match nap {
            // On the page alone there is nothing that the module could watch.
            Nap::Device(_) if self.lane.tasks.is_none() => protocol::nap(&Pause, goes_on, left_ns),
            Nap::Device(device) => match self.hand {
                Hand::Guard => device.nap(self.lane.request_cpu, bound_ns),
                Hand::Check => device.nap_as_guest(self.lane.request_cpu, bound_ns),
            },
            Nap::Umwait(has) => protocol::nap(&has.on(line), goes_on, left_ns),
            Nap::Mwaitx(has) => protocol::nap(&has.on(line), goes_on, left_ns),
            Nap::Block => protocol::nap(&Block::on(&self.lane.slot.wakes), goes_on, left_ns),
            Nap::Spin => protocol::nap(&Pause, goes_on, left_ns),
        }
    }

    fn bound_ns(&self, nap: &Nap) -> u64 {
        match (nap, self.lane.tasks) {
            (Nap::Block, _) => BLOCK_BOUND_NS,
            (_, Some(_)) => NAP_BOUND_NS,
            (_, None) => SERVICE_BOUND_NS,
        }
    }

    /// The word that is written when the lane idles. Of a service's page it is the running request:
    /// a queue without one lasts only until a worker takes from it.
    fn line(&self) -> &AtomicU64 {
        let running = self.service.map(|service| &service.running_request);
        self.lane.request().map(|slot| &slot.task).or(running).unwrap_or(&NOTHING)
    }

    fn is_busy(&self) -> bool {
        if self.lane.is_gone() {
            return false;
        }
        match (self.lane.request(), self.service) {
            (Some(slot), _) => slot.is_busy(),
            (None, Some(service)) => {
                let words = [&service.running_request, &service.queue_len];
                words.iter().any(|word| word.load(Relaxed) != 0)
            }
            (None, None) => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_that_was_told_to_end_gets_a_tenth_of_a_second_in_all() {
        const MS: u64 = 1_000_000;
        assert_eq!(time_to_end_ns(0, 5 * MS), None, "nobody told it");
        let at = |ms: u64| time_to_end_ns(1_000 * MS, (1_000 + ms) * MS).map(|ns| ns / MS);
        assert_eq!([at(0), at(4), at(9), at(11), at(99)], [Some(10), Some(6), Some(1), None, None]);
        assert_eq!((0..3_000).filter(|&ms| at(ms).is_some()).count(), 100);
    }
}
