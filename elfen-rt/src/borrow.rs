//! One look of a batch lane at its request lane: sample, decide, count. The slow path of every check.
//!
//! Whoever controls a batch lane, a thread that checks itself or a guard that holds the lane for threads that can't,
//! calls [`Borrow::look`] and does what the [`Verdict`] says. What the policy remembers and what was borrowed lies in
//! the lane's slot, because several threads and processes may take turns on one lane.
//!
//! Overlap is not guessed from looks: the task map counts the busy time of a watched request lane, so the time that
//! batch and request ran together is exact, even of requests too short for any look to meet.

use core::sync::atomic::Ordering::Relaxed;

use crate::policy::{self, Lane, Policy, State, Verdict};
use crate::process::Liveness;
use crate::signal::control::{BusyWhen, ControlSlot, PolicyKind, Settings};
use crate::signal::lane::{LaneSlot, LaneState};
use crate::signal::service::{ServiceReader, Writer};
use crate::signal::task::{Running, Switch, TaskSlot};

/// What can be sampled of a request lane. With neither, the lane counts as busy.
#[derive(Clone, Copy, Debug)]
pub struct Sources<'a> {
    pub tasks: Option<&'a TaskSlot>,
    /// The service's page, and which of its slots is this lane's.
    pub service: Option<(&'a ServiceReader, u32)>,
}

/// How long a writer that was seen alive counts as alive: looking costs system calls.
const WRITER_TRUSTED_NS: u64 = 10_000_000;

/// A batch lane's view of its request lane.
#[derive(Debug)]
pub struct Borrow<'a> {
    sources: Sources<'a>,
    control: &'a ControlSlot,
    lane: &'a LaneSlot,
    generation: u64,
    settings: Settings,
    writer_alive: bool,
    writer_looked_at_ns: u64,
}

/// What a look found and decided.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Look {
    pub verdict: Verdict,
    pub busy: bool,
    /// Until when a batch thread may go on sharing with a busy lane; `None` if no budget runs.
    pub until_ns: Option<u64>,
}

impl<'a> Borrow<'a> {
    /// Starts from the control page, or as `borrow-idle` while that holds nothing.
    pub fn new(sources: Sources<'a>, control: &'a ControlSlot, lane: &'a LaneSlot) -> Self {
        let mut borrow = Self {
            sources,
            control,
            lane,
            generation: 0,
            settings: Settings::BORROW_IDLE,
            writer_alive: false,
            writer_looked_at_ns: 0,
        };
        borrow.read_settings();
        borrow
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Samples, decides and counts. Between two looks the batch did what the first one said.
    pub fn look(&mut self, now_ns: u64) -> Look {
        self.look_after(now_ns, now_ns)
    }

    /// The same for who took the lane from the batch at `stopped_ns` in order to look.
    pub fn look_after(&mut self, stopped_ns: u64, now_ns: u64) -> Look {
        if self.control.generation.load(Relaxed) != self.generation {
            self.read_settings();
        }
        let switch = self.sources.tasks.and_then(TaskSlot::snapshot);
        let lane = self.sample(switch.as_ref(), now_ns);
        let policy = self.settings.policy();
        let before = self.state();
        let due_ns = policy.deadline_ns(before, &lane, now_ns);
        let (after, verdict) = policy.check(before, &lane, now_ns);
        self.remember(after);
        self.count(switch.as_ref(), &lane, stopped_ns, now_ns);
        self.react(verdict, switch.as_ref(), &lane, due_ns, stopped_ns);
        self.enter(verdict, switch.as_ref(), &lane, now_ns);
        let until_ns = match verdict {
            Verdict::Run if lane.busy => policy.deadline_ns(after, &lane, now_ns),
            _ => None,
        };
        Look { verdict, busy: lane.busy, until_ns }
    }

    /// The batch leaves the lane: counts what it ran, and says that nobody is there.
    pub fn leave(&mut self, now_ns: u64) {
        let switch = self.sources.tasks.and_then(TaskSlot::snapshot);
        let lane = self.sample(switch.as_ref(), now_ns);
        self.count(switch.as_ref(), &lane, now_ns, now_ns);
        self.lane.enter(LaneState::Off, now_ns);
    }

    /// Keeps what it has while the parent is in the middle of a change, or wrote nonsense.
    fn read_settings(&mut self) {
        if let Some((generation, settings)) = self.control.settings() {
            (self.generation, self.settings) = (generation, settings);
        }
    }

    fn sample(&mut self, switch: Option<&Switch>, now_ns: u64) -> Lane {
        let service = self.service(now_ns);
        let published = service.map(|s| s.running_request != 0 || s.queue_len != 0);
        let busy = match switch.map(|switch| switch.running) {
            Some(Running::Idle) => false,
            Some(Running::Unknown) => true,
            Some(Running::Task(task)) => match self.settings.busy_when {
                BusyWhen::AnyTask => true,
                BusyWhen::Service => u64::from(task.process) == self.settings.service_process,
            },
            // Torn 16 times in a row: the lane switches all the time.
            None if self.sources.tasks.is_some() => true,
            // The page alone. A service that died or never came has no work; no page at all says nothing.
            None => published.unwrap_or(self.sources.service.is_none()),
        };
        Lane { busy, service, ipc_milli: self.lane.ipc_milli(now_ns) }
    }

    /// What the service publishes, if it lives.
    fn service(&mut self, now_ns: u64) -> Option<policy::Service> {
        let (reader, lane) = self.sources.service?;
        let slot = reader.slot(lane)?;
        if !self.writer_lives(reader, lane, now_ns) {
            return None;
        }
        Some(policy::Service {
            queue_len: slot.queue_len.load(Relaxed),
            running_request: slot.running_request.load(Relaxed),
            request_started_ns: slot.request_started_ns.load(Relaxed),
            finished: slot.finished_requests.load(Relaxed),
        })
    }

    fn writer_lives(&mut self, reader: &ServiceReader, lane: u32, now_ns: u64) -> bool {
        if now_ns.saturating_sub(self.writer_looked_at_ns) >= WRITER_TRUSTED_NS {
            let writer = reader.writer(lane);
            self.writer_alive =
                matches!(writer, Writer::Process(_, Liveness::Alive | Liveness::Unknown));
            self.writer_looked_at_ns = now_ns;
        }
        self.writer_alive
    }

    fn state(&self) -> State {
        self.lane.policy_state.each_ref().map(|word| word.load(Relaxed)).into()
    }

    fn remember(&self, state: State) {
        let words: [u64; 4] = state.into();
        for (slot, word) in self.lane.policy_state.iter().zip(words) {
            slot.store(word, Relaxed);
        }
    }

    /// Adds the time from the last look until the batch stopped to what the lane borrowed and overlapped, if it ran.
    fn count(&self, switch: Option<&Switch>, lane: &Lane, stopped_ns: u64, now_ns: u64) {
        // Swapped: of two threads that count at once, each stretch goes to one.
        let from_ns = self.lane.counted_to_ns.swap(now_ns, Relaxed);
        let busy_ns = switch.map_or(0, |switch| switch.busy_until_ns(now_ns));
        let busy_before_ns = self.lane.counted_busy_ns.swap(busy_ns, Relaxed);
        let ran = matches!(self.lane.state(), Some((LaneState::Running, _)));
        if !ran || from_ns == 0 {
            return;
        }
        let stretch_ns = stopped_ns.saturating_sub(from_ns);
        let shared_ns = match (switch, lane.service) {
            (Some(switch), _) => switch.busy_until_ns(stopped_ns).saturating_sub(busy_before_ns),
            (None, Some(service)) if lane.busy => {
                stopped_ns.saturating_sub(service.request_started_ns)
            }
            (None, _) => 0,
        };
        let overlapped_ns = shared_ns.min(stretch_ns);
        self.lane.add_overlapped(overlapped_ns);
        self.lane.add_borrowed(stretch_ns - overlapped_ns);
    }

    /// Records how fast the lane was left, if it is left now.
    fn react(
        &self,
        verdict: Verdict,
        switch: Option<&Switch>,
        lane: &Lane,
        due_ns: Option<u64>,
        stopped_ns: u64,
    ) {
        let ran = matches!(self.lane.state(), Some((LaneState::Running, _)));
        if verdict != Verdict::Nap || !ran {
            return;
        }
        let Some(since_ns) = self.busy_since_ns(switch, lane) else { return };
        // A thread that had a budget was due off its lane when that ended.
        let due_ns = due_ns.map_or(since_ns, |due_ns| due_ns.max(since_ns));
        self.lane.reaction.record_shared(stopped_ns.saturating_sub(due_ns));
    }

    /// Says what the lane does from now on, and records how fast it was taken.
    fn enter(&self, verdict: Verdict, switch: Option<&Switch>, lane: &Lane, now_ns: u64) {
        let before = self.lane.state().map(|(state, _)| state);
        match verdict {
            Verdict::Nap => self.lane.enter(LaneState::Napping, now_ns),
            Verdict::Run if before == Some(LaneState::Running) => {}
            Verdict::Run => {
                let idle_at_ns = switch.filter(|_| !lane.busy).and_then(|switch| switch.at_ns);
                if let (Some(LaneState::Napping), Some(idle_at_ns)) = (before, idle_at_ns) {
                    self.lane.wake.record_shared(now_ns.saturating_sub(idle_at_ns));
                }
                self.lane.enter(LaneState::Running, now_ns);
            }
        }
    }

    fn busy_since_ns(&self, switch: Option<&Switch>, lane: &Lane) -> Option<u64> {
        match switch {
            Some(switch) => switch.busy_since_ns,
            None => lane.service.filter(|s| s.running_request != 0).map(|s| s.request_started_ns),
        }
    }
}

impl Settings {
    /// What holds until the parent has said anything.
    pub const BORROW_IDLE: Self = Self {
        policy: PolicyKind::BorrowIdle,
        budget_ns: 0,
        budget_until_ns: 0,
        slo_latency_ns: 0,
        slo_per_million: 0,
        ref_ipc_milli: 0,
        busy_when: BusyWhen::AnyTask,
        service_process: 0,
    };

    /// The policy with its parameters.
    pub fn policy(&self) -> Policy {
        let budget_ns = self.budget_ns;
        match self.policy {
            PolicyKind::BorrowIdle => Policy::BorrowIdle,
            PolicyKind::FixedBudget => Policy::FixedBudget { budget_ns },
            PolicyKind::RefreshBudget => Policy::RefreshBudget { budget_ns },
            PolicyKind::DynamicBudget => {
                Policy::DynamicBudget { budget_ns, ref_ipc_milli: self.ref_ipc_milli }
            }
            PolicyKind::SloBudget => {
                Policy::SloBudget { budget_ns, until_ns: self.budget_until_ns }
            }
        }
    }
}
