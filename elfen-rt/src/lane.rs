//! One step on a batch lane: sample the request lane, ask the policy, and wait if it says nap.
//!
//! Guards and batch threads with checks run the same step. [`Lane::step`] samples once and returns
//! whether the batch may run. If not, it returns a [`Wait`], which waits until the request lane
//! idles. A guard steps when its timer fires, and occupies the lane while it waits. A batch thread
//! steps when its check finds the lane busy, and waits itself.
//!
//! The policy's state lies in the lane's slot for threads with checks, because threads and
//! processes alternate on a lane. A guard keeps the state in its own memory: it trusts nothing that
//! the batch can write.
//!
//! Borrowed and overlapped time is not estimated from samples. The kernel counts how long the
//! batch's tasks ran on the lane, and how long of that next to a busy request lane
//! ([`crate::signal::account`]). A step takes over what the account gained since the last step. It
//! leaves out the time that a batch thread napped, which the kernel counts as running.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

use crate::clock::monotonic_ns;
use crate::nap::block::Block;
use crate::nap::line::Pause;
use crate::nap::{Nap, Woken, protocol};
use crate::policy::{Policy, Sample, Service, State, Verdict};
use crate::process::Liveness;
use crate::service::load_request;
use crate::signal::control::{ControlSlot, Settings};
use crate::signal::lane::{LaneInputs, LaneSlot, LaneState, REQUEST_OFFLINE};
use crate::signal::service::{ServiceReader, ServiceSlot, Writer};
use crate::signal::task::{Running, Switch, TaskMap, TaskSlot};

/// How long a service found alive, or dead, is assumed to stay so. Finding out costs system calls.
const WRITER_TRUSTED_NS: u64 = 10_000_000;

/// Bounds a nap on the task map. The nap normally ends when the request lane idles, but the program
/// that writes the map may be gone.
const NAP_BOUND_NS: u64 = 100_000_000;
/// Bounds a nap on a service's words, which have no writer once the service is dead.
const SERVICE_BOUND_NS: u64 = WRITER_TRUSTED_NS;
/// Bounds a nap of a thread that blocks: a third process has to wake it.
const BLOCK_BOUND_NS: u64 = 2_000_000;

/// Which side makes a step on the lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Actor {
    /// The guard, a thread of `elfen run`, which occupies the lane for the batch.
    Guard,
    /// A batch thread, at one of its checks.
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
    /// The words that decide. A guard has them in memory that only its process can write.
    pub inputs: &'a LaneInputs,
    pub service_cache: &'a ServiceCache,
}

/// Caches which slot of the service's page belongs to a lane, for all threads of a process.
///
/// Every word is a hint that is verified before use. Zeroed memory is an empty cache.
#[derive(Debug, Default)]
pub struct ServiceCache {
    /// The slot that belonged to the lane last time, and the identity of its writer.
    service_slot: AtomicU32,
    writer: AtomicU64,
    /// The last writer that was found dead.
    dead: AtomicU64,
    /// When a writer's liveness was last verified.
    verified_at_ns: AtomicU64,
}

/// The outcome of a step.
#[derive(Debug)]
pub enum Step<'l, 'a> {
    /// The batch may run. On a busy lane `until_ns` is when its budget ends, if a budget has an
    /// end.
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

/// The samples of one step, in the order in which they were taken.
struct Samples<'a> {
    switch: Option<Switch>,
    service: Option<&'a ServiceSlot>,
    sample: Sample,
}

impl<'a> Lane<'a> {
    /// Samples the request lane, applies the policy, and counts. `stopped_ns` is when the batch
    /// last ran on the lane: for a thread that checks this is `now_ns`, for a guard the time at
    /// which the guard was switched in.
    pub fn step(&self, actor: Actor, stopped_ns: u64, now_ns: u64) -> Step<'_, 'a> {
        let policy = self.settings().policy();
        let before = self.inputs.state();
        let needs_counts = policy != Policy::BorrowIdle && !matches!(before, State::Fresh { .. });
        let samples = self.take_samples(needs_counts, now_ns);
        let lane = &samples.sample;
        let due_ns = policy.deadline_ns(before, lane, now_ns);
        let (after, verdict) = policy.check(before, lane, now_ns);
        self.store_state(after);
        self.count(samples.switch.as_ref(), now_ns);
        if verdict == Verdict::Nap {
            self.record_reaction(&samples, due_ns, stopped_ns);
        }
        self.enter_state(actor, verdict, &samples, now_ns);
        match verdict {
            Verdict::Run => {
                let until_ns = policy.deadline_ns(after, lane, now_ns).filter(|_| lane.busy);
                Step::Run { busy: lane.busy, until_ns }
            }
            Verdict::Nap => Step::Nap(Wait { lane: self, service: samples.service, actor }),
        }
    }

    /// Counts what the batch ran, and records in the slot that no batch thread is on the lane.
    pub fn leave(&self, now_ns: u64) {
        self.tally(now_ns);
        self.slot.enter(LaneState::Off, now_ns);
    }

    /// Counts what the batch ran since the last count.
    pub fn tally(&self, now_ns: u64) {
        self.count(self.request().and_then(TaskSlot::snapshot).as_ref(), now_ns);
    }

    /// When the batch was last asked to terminate; 0 if never.
    pub fn termination_requested_ns(&self) -> u64 {
        self.control.termination_requested_ns.load(Relaxed)
    }

    /// The request lane's slot of the task map.
    pub fn request(&self) -> Option<&'a TaskSlot> {
        self.tasks?.slot(self.request_cpu)
    }

    /// The current settings. `borrow-idle` while the control page holds none, or while its writer
    /// died in the middle of a change.
    pub fn settings(&self) -> Settings {
        self.control.settings().map_or(Settings::BORROW_IDLE, |(_, settings)| settings)
    }

    /// The slot of the service that serves on the request lane; `None` if no living service does.
    ///
    /// The slot is looked up at each step: a service claims its lanes one by one, and may claim
    /// other slots after a restart.
    pub fn service(&self, now_ns: u64) -> Option<&'a ServiceSlot> {
        let (reader, cache) = (self.service?, self.service_cache);
        let age_ns = now_ns.saturating_sub(cache.verified_at_ns.load(Relaxed));
        let recent = cache.verified_at_ns.load(Relaxed) != 0 && age_ns < WRITER_TRUSTED_NS;
        let writer_of = |lane| reader.slot(lane).map_or(0, |slot| slot.writer.load(Relaxed));
        let last = cache.service_slot.load(Relaxed);
        let trusted = recent && writer_of(last) == cache.writer.load(Relaxed);
        if trusted && reader.stands_for(last, self.request_cpu) {
            return reader.slot(last);
        }
        let known_dead = |lane| recent && writer_of(lane) == cache.dead.load(Relaxed);
        let candidates = (0..reader.lanes())
            .filter(|&lane| reader.stands_for(lane, self.request_cpu) && !known_dead(lane));
        for lane in candidates {
            let word = writer_of(lane);
            cache.verified_at_ns.store(now_ns, Relaxed);
            match reader.writer(lane) {
                Writer::Process(_, Liveness::Alive | Liveness::Unknown) => {
                    cache.service_slot.store(lane, Relaxed);
                    cache.writer.store(word, Relaxed);
                    return reader.slot(lane);
                }
                Writer::Process(_, Liveness::Dead) | Writer::None => {
                    cache.dead.store(word, Relaxed);
                    cache.writer.store(0, Relaxed);
                }
            }
        }
        None
    }

    /// Samples the task map and the service's page. With `needs_counts`, a request that has just
    /// ended must be among the finished ones.
    fn take_samples(&self, needs_counts: bool, now_ns: u64) -> Samples<'a> {
        let switch = self.request().and_then(TaskSlot::snapshot);
        let slot = self.service(now_ns);
        let service = slot.map(|slot| published(slot, needs_counts));
        let busy = match switch.map(|switch| switch.running) {
            _ if self.is_offline() => false,
            Some(Running::Idle) => false,
            Some(Running::Task(_) | Running::Unknown) => true,
            // The snapshot was torn 16 times in a row: the lane switches all the time.
            None if self.tasks.is_some() => true,
            // Without a task map, the service's page decides. A service that is dead, or that does
            // not serve here, has no work. Without a page, the lane counts as busy.
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
        Samples { switch, service: slot, sample }
    }

    /// Whether the request lane's CPU is offline. The kernel switches and traces no task there.
    fn is_offline(&self) -> bool {
        self.inputs.hotplug.load(Relaxed) & REQUEST_OFFLINE != 0
    }

    /// Stores the policy's state. A guard also stores an idle moment for the threads with checks,
    /// because they do not sample a lane that idles.
    fn store_state(&self, state: State) {
        self.inputs.store_state(state);
        if matches!(state, State::Fresh { .. }) && !core::ptr::eq(self.inputs, &self.slot.inputs) {
            self.slot.inputs.store_state(state);
        }
    }

    /// Takes over what the kernel has added to its account since the last call.
    fn count(&self, request: Option<&Switch>, now_ns: u64) {
        let slot = self.slot;
        let claim = slot.account_claim.load(Relaxed);
        let index = usize::try_from(slot.account_index.load(Relaxed)).unwrap_or(usize::MAX);
        let (Some(tasks), Some(request)) = (self.tasks, request) else { return };
        let Some(account) = tasks.account(self.batch_cpu, index, claim) else { return };
        let ran_ns = account.ran_until_ns(now_ns);
        let shared_ns = account.shared_until_ns(now_ns, request.busy_until_ns(now_ns));
        // `fetch_max` keeps the larger count, so two threads that count at once never both take the
        // same interval.
        let ran_ns = ran_ns.saturating_sub(slot.counted_ran_ns.fetch_max(ran_ns, Relaxed));
        let shared_ns =
            shared_ns.saturating_sub(slot.counted_shared_ns.fetch_max(shared_ns, Relaxed));
        // A batch thread that naps on its CPU does no work. A batch task that runs while the guard
        // occupies the lane does work.
        if matches!(slot.state(), Some((LaneState::Napping, _))) {
            return;
        }
        let shared_ns = shared_ns.min(ran_ns);
        slot.add_overlapped(shared_ns);
        slot.add_borrowed(ran_ns - shared_ns);
    }

    /// Records the reaction: how long the batch kept running after it had to stop. Only if the lane
    /// was running until now.
    fn record_reaction(&self, samples: &Samples<'_>, due_ns: Option<u64>, stopped_ns: u64) {
        if !matches!(self.slot.state(), Some((LaneState::Running, _))) {
            return;
        }
        let started_ns =
            || samples.sample.service.map(|s| s.request_started_ns).filter(|&at| at != 0);
        let since_ns = match &samples.switch {
            Some(switch) => switch.busy_since_ns,
            None => started_ns(),
        };
        let Some(since_ns) = since_ns else { return };
        // A thread with a budget had to stop when the budget ended.
        let due_ns = due_ns.map_or(since_ns, |due_ns| due_ns.max(since_ns));
        self.slot.reaction.record_shared(stopped_ns.saturating_sub(due_ns));
    }

    /// Stores the lane's new state in its slot, and records how fast the batch took an idle lane.
    fn enter_state(&self, actor: Actor, verdict: Verdict, samples: &Samples<'_>, now_ns: u64) {
        let before = self.slot.state();
        let naps_on = before.is_some_and(|(state, since_ns)| {
            state == LaneState::Napping && now_ns.saturating_sub(since_ns) < NAP_BOUND_NS
        });
        let before = before.map(|(state, _)| state);
        match (verdict, actor) {
            // The batch naps already: the guard leaves the state as it is.
            (Verdict::Nap, Actor::Guard) if before == Some(LaneState::Napping) => {}
            (Verdict::Nap, Actor::Guard) => self.slot.enter(LaneState::Held, now_ns),
            (Verdict::Nap, Actor::Check) => self.slot.enter(LaneState::Napping, now_ns),
            (Verdict::Run, _) if before == Some(LaneState::Running) => {}
            // The napping thread has not sampled yet. If the next request arrives first, the thread
            // naps on, and would be counted as running. The thread itself records the end of its
            // nap, at the latest after the nap's bound; after that time the thread is gone.
            (Verdict::Run, Actor::Guard) if naps_on => {}
            (Verdict::Run, _) => {
                let idle = samples.switch.filter(|_| !samples.sample.busy);
                let napped = matches!(before, Some(LaneState::Napping | LaneState::Held));
                if let (true, Some(idle_at_ns)) = (napped, idle.and_then(|switch| switch.at_ns)) {
                    self.slot.wake.record_shared(now_ns.saturating_sub(idle_at_ns));
                }
                self.slot.enter(LaneState::Running, now_ns);
            }
        }
    }
}

/// How many samples are taken at most, if a request begins or ends during each of them.
const SAMPLES: usize = 4;
/// PAUSEs that cover the time between a service's two stores at the end of a request.
const SETTLE_PAUSES: usize = 8;

/// Samples a slot's words so that the running request and the finished count belong together.
///
/// Two mixtures must not be seen:
/// - A request that has just ended, with a count that includes it, looks like a request that had to
///   wait for another.
/// - No request, with a count that misses the last one, makes the next request look like that. No
///   later sample corrects this, because checks do not sample a lane that idles.
fn published(slot: &ServiceSlot, needs_counts: bool) -> Service {
    let mut service = sample(slot);
    for _ in 1..SAMPLES {
        // The acquire in `sample` orders this load: if the sample saw the count that `Worker::end`
        // stored after it cleared the request, this load sees the cleared request.
        if slot.running_request.load(Relaxed) == service.running_request {
            break;
        }
        service = sample(slot);
    }
    if needs_counts && service.running_request == 0 {
        for _ in 0..SETTLE_PAUSES {
            core::hint::spin_loop();
        }
        service = sample(slot);
    }
    service
}

fn sample(slot: &ServiceSlot) -> Service {
    let (running_request, request_started_ns) =
        load_request(&slot.running_request, &slot.request_started_ns);
    Service {
        queue_len: slot.queue_len.load(Relaxed),
        running_request,
        request_started_ns,
        // Acquire: pairs with the release in `Worker::end`.
        finished: slot.finished_requests.load(Acquire),
    }
}

/// How long a batch that was asked to terminate gets slices of its lane.
const TERMINATION_NS: u64 = 1_000_000_000;
const SLICE_EVERY_NS: u64 = 100_000_000;
const SLICE_NS: u64 = 10_000_000;

/// The rest of the current slice in which a batch may run in order to terminate; `None` outside of
/// a slice.
///
/// A batch that was asked to terminate at `requested_ns` gets a tenth of the next second, even next
/// to a request. Otherwise a batch on a permanently busy lane could never handle SIGTERM.
pub fn termination_slice_ns(requested_ns: u64, now_ns: u64) -> Option<u64> {
    let since_ns = now_ns.saturating_sub(requested_ns);
    let left_ns = SLICE_NS.checked_sub(since_ns % SLICE_EVERY_NS);
    left_ns.filter(|&left_ns| requested_ns != 0 && since_ns < TERMINATION_NS && left_ns > 0)
}

/// Waits for the request lane to idle. Under every policy, a verdict to nap holds until then.
#[derive(Debug)]
pub struct Wait<'l, 'a> {
    lane: &'l Lane<'a>,
    service: Option<&'a ServiceSlot>,
    actor: Actor,
}

/// A word that never changes, for lanes without a task map and a service: the nap ends at its
/// bound.
static UNCHANGING: AtomicU64 = AtomicU64::new(1);

impl Wait<'_, '_> {
    /// Waits until the request lane idles, `is_over` returns true, or the bound passes. Returns
    /// [`Woken::Elsewhere`] if this way to nap does not work on this pair.
    pub fn on(&self, nap: &Nap, bound_ns: u64, is_over: impl Fn() -> bool) -> Woken {
        let bound_ns = bound_ns.min(self.bound_ns(nap));
        let end_ns = monotonic_ns().saturating_add(bound_ns);
        let left_ns = || end_ns.saturating_sub(monotonic_ns());
        let goes_on = || self.is_busy() && !is_over();
        let line = self.line();
        match nap {
            // Without a task map the module has no word to monitor.
            Nap::Device(_) if self.lane.tasks.is_none() => protocol::nap(&Pause, goes_on, left_ns),
            Nap::Device(device) => match self.actor {
                Actor::Guard => device.nap(self.lane.request_cpu, bound_ns),
                Actor::Check => device.nap_if_open(self.lane.request_cpu, bound_ns),
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

    /// The word that is written when the lane idles. On a service's page it is the running request:
    /// a queue without a running request lasts only until a worker takes from it.
    fn line(&self) -> &AtomicU64 {
        let running = self.service.map(|service| &service.running_request);
        self.lane.request().map(|slot| &slot.task).or(running).unwrap_or(&UNCHANGING)
    }

    fn is_busy(&self) -> bool {
        if self.lane.is_offline() {
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
    fn a_terminating_batch_gets_a_tenth_of_a_second_in_total() {
        const MS: u64 = 1_000_000;
        assert_eq!(termination_slice_ns(0, 5 * MS), None, "termination was not requested");
        let at = |ms: u64| termination_slice_ns(1_000 * MS, (1_000 + ms) * MS).map(|ns| ns / MS);
        assert_eq!([at(0), at(4), at(9), at(11), at(99)], [Some(10), Some(6), Some(1), None, None]);
        assert_eq!((0..3_000).filter(|&ms| at(ms).is_some()).count(), 100);
    }
}
