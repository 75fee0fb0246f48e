//! Compares the simulator, which skips polls that cannot change a decision, with a slow model that
//! makes every poll.
//!
//! Goal: skipping polls does not change results. Method: the slow model steps through all arrivals,
//! ends, polls, naps and wakes one by one, and evaluates the policy at each poll. Both models must
//! agree on every end of a request, every shared nanosecond and every nap. Short times on one core
//! produce every combination of simultaneous events. Long times on several cores with one queue
//! produce none.

use std::collections::VecDeque;

use elfen_rt::policy::{Policy, Sample, Service, State, Verdict};
use proptest::prelude::*;
use simulator::pair::{Batch, Control, Polling, REF_IPC_MILLI, Signal};
use simulator::source::{Requests, Until};
use simulator::trace::Served;
use simulator::{Model, Queue};

#[derive(Clone, Copy, PartialEq, Debug)]
enum Thread {
    /// The batch runs until the next poll, which is at this time.
    Runs(u64),
    Leaves(u64),
    Naps,
    Wakes(u64),
}

#[derive(Clone, Copy, PartialEq, Debug)]
struct Request {
    id: u64,
    arrived_ns: u64,
    started_ns: u64,
    left: u128,
    overlapped_ns: u64,
}

#[derive(Clone, Debug)]
struct Core {
    batch: Batch,
    policy: Policy,
    running: Option<Request>,
    busy_since_ns: Option<u64>,
    finished: u64,
    thread: Thread,
    state: State,
    /// When the budget ends, as computed at the last poll.
    budget_ends_ns: Option<u64>,
    naps: u64,
    borrowed_ns: u64,
    overlapped_ns: u64,
}

impl Core {
    fn new(batch: Batch, policy: Policy) -> Self {
        Self {
            batch,
            policy,
            running: None,
            busy_since_ns: None,
            finished: 0,
            thread: Thread::Wakes(0),
            state: State::default(),
            budget_ends_ns: None,
            naps: 0,
            borrowed_ns: 0,
            overlapped_ns: 0,
        }
    }

    fn occupies_its_lane(&self) -> bool {
        matches!(self.thread, Thread::Runs(_) | Thread::Leaves(_))
    }

    /// Returns the progress per nanosecond, in units of one over the product of both slowdowns.
    fn speed(&self) -> u128 {
        let Batch { request_slowdown_milli: running, nap_slowdown_milli: napping, .. } = self.batch;
        u128::from(match self.thread {
            Thread::Runs(_) | Thread::Leaves(_) => 1000 * napping,
            Thread::Naps => running * 1000,
            Thread::Wakes(_) => running * napping,
        })
    }

    fn pass(&mut self, passed_ns: u64) {
        let (speed, overlaps) = (self.speed(), self.occupies_its_lane());
        match &mut self.running {
            Some(request) => {
                request.left = request.left.saturating_sub(u128::from(passed_ns) * speed);
                if overlaps {
                    request.overlapped_ns += passed_ns;
                    self.overlapped_ns += passed_ns;
                }
            }
            None if matches!(self.thread, Thread::Runs(_)) => self.borrowed_ns += passed_ns,
            None => {}
        }
    }

    fn next_ns(&self, now_ns: u64) -> u64 {
        let left_ns = |request: Request| {
            u64::try_from(request.left.div_ceil(self.speed())).expect("some minutes at most")
        };
        let end_ns = self.running.map_or(u64::MAX, |request| now_ns + left_ns(request));
        match self.thread {
            Thread::Runs(at_ns) | Thread::Leaves(at_ns) | Thread::Wakes(at_ns) => {
                end_ns.min(at_ns.max(now_ns))
            }
            Thread::Naps => end_ns,
        }
    }

    fn poll(&mut self, queue_len: u64, now_ns: u64) {
        let service = Service {
            queue_len,
            running_request: self.running.map_or(0, |request| request.id),
            request_started_ns: self.running.map_or(0, |request| request.started_ns),
            finished: self.finished,
        };
        let busy = self.running.is_some();
        let measured = now_ns - service.request_started_ns >= self.batch.ipc_after_ns;
        let ipc_milli =
            (busy && measured).then(|| REF_IPC_MILLI * 1000 / self.batch.request_slowdown_milli);
        let service = (self.batch.signal == Signal::Service).then_some(service);
        let busy_since_ns = self.busy_since_ns;
        let lane = Sample { busy, busy_since_ns, service, ipc_milli };
        let verdict;
        (self.state, verdict) = self.policy.check(self.state, &lane, now_ns);
        self.thread = match verdict {
            Verdict::Run => {
                let ends_ns = self.policy.deadline_ns(self.state, &lane, now_ns);
                self.budget_ends_ns = ends_ns.filter(|_| busy);
                Thread::Runs(self.next_poll_ns(now_ns))
            }
            Verdict::Nap => {
                self.naps += 1;
                Thread::Leaves(now_ns + self.batch.sleep_ns)
            }
        };
    }

    /// Returns the time of the next check, or of the guard's timer.
    fn next_poll_ns(&self, now_ns: u64) -> u64 {
        match self.batch.polling {
            Polling::Checks { every_ns } => (now_ns / every_ns + 1) * every_ns,
            Polling::Guard { every_ns } => {
                let ends_ns = self.budget_ends_ns.filter(|&ends_ns| ends_ns > now_ns);
                ends_ns.unwrap_or(u64::MAX).min(now_ns + every_ns)
            }
        }
    }

    /// Performs what the thread does at this time, after the starts and ends of requests at this
    /// time.
    fn follow(&mut self, began_or_ended: bool, queue_len: u64, now_ns: u64) {
        if self.running.is_none() {
            self.busy_since_ns = None;
        } else {
            self.busy_since_ns.get_or_insert(now_ns);
        }
        if began_or_ended && self.running.is_none() {
            match self.thread {
                Thread::Naps => self.thread = Thread::Wakes(now_ns + self.batch.wake_ns),
                Thread::Leaves(at_ns) => self.thread = Thread::Wakes(at_ns + self.batch.wake_ns),
                Thread::Runs(at_ns) if at_ns == now_ns => {
                    self.thread = Thread::Runs(self.next_poll_ns(now_ns));
                }
                Thread::Runs(_) | Thread::Wakes(_) => {}
            }
            return;
        }
        match self.thread {
            Thread::Leaves(at_ns) if at_ns <= now_ns => self.thread = Thread::Naps,
            // A poll at exactly the time of a start or an end has not yet seen it.
            Thread::Runs(at_ns) if at_ns == now_ns && began_or_ended => {
                self.thread = Thread::Runs(self.next_poll_ns(now_ns));
            }
            Thread::Runs(at_ns) if at_ns == now_ns => self.poll(queue_len, now_ns),
            Thread::Wakes(at_ns) if at_ns <= now_ns => self.poll(queue_len, now_ns),
            _ => {}
        }
    }
}

/// The slow model.
struct Slow<'a> {
    trace: &'a [(u64, u64)],
    arrived: usize,
    begun: usize,
    cores: Vec<Core>,
    /// The indices of the idle cores. The core that has idled for the longest time is first.
    idle: VecDeque<usize>,
    now_ns: u64,
    ends: Vec<End>,
}

/// The arrival time and the end of a request, and how long it shared its core.
type End = (u64, u64, u64);

impl Slow<'_> {
    /// Performs all events of the next time with an event: first the requests', then the threads'.
    fn step(&mut self) {
        let arrives_ns = self.trace.get(self.arrived).map(|request| request.0);
        let nexts = self.cores.iter().map(|core| core.next_ns(self.now_ns));
        let now_ns = nexts.chain(arrives_ns).min().expect("there is a core");
        let passed_ns = now_ns - self.now_ns;
        self.now_ns = now_ns;
        self.cores.iter_mut().for_each(|core| core.pass(passed_ns));
        while self.trace.get(self.arrived).is_some_and(|request| request.0 <= now_ns) {
            self.arrived += 1;
        }
        let mut changed = vec![false; self.cores.len()];
        for (index, core) in self.cores.iter_mut().enumerate() {
            if let Some(request) = core.running.take_if(|request| request.left == 0) {
                self.ends.push((request.arrived_ns, now_ns, request.overlapped_ns));
                core.finished += 1;
                self.idle.push_back(index);
                changed[index] = true;
            }
        }
        while self.begun < self.arrived
            && let Some(index) = self.idle.pop_front()
        {
            let (arrived_ns, demand_ns) = self.trace[self.begun];
            self.begun += 1;
            let Batch { request_slowdown_milli: running, nap_slowdown_milli: napping, .. } =
                self.cores[index].batch;
            let left = u128::from(demand_ns) * u128::from(running * napping);
            let (id, started_ns) = (self.begun as u64, now_ns);
            self.cores[index].running =
                Some(Request { id, arrived_ns, started_ns, left, overlapped_ns: 0 });
            changed[index] = true;
        }
        let queue_len = (self.arrived - self.begun) as u64;
        for (core, changed) in self.cores.iter_mut().zip(changed) {
            core.follow(changed, queue_len, now_ns);
        }
    }
}

/// Asserts that both models agree. Each request is a pause since the previous arrival, and a
/// demand.
#[track_caller]
fn agree(
    cores: u64,
    batch: Batch,
    policy: Policy,
    requests: &[(u64, u64)],
) -> Result<(), TestCaseError> {
    let mut at_ns = 0;
    let arrive = |&(pause_ns, demand_ns): &(u64, u64)| {
        at_ns += pause_ns;
        (at_ns, demand_ns)
    };
    let trace: Vec<(u64, u64)> = requests.iter().map(arrive).collect();
    let model = Model {
        machines: 1,
        cores,
        queue: Queue::Shared,
        requests: Requests::Trace(trace.clone().into()),
        until: Until::Requests(1),
        batch,
        control: Control::Policy(policy),
        watch: None,
        seed: 0,
    };
    let mut ends: Vec<End> = Vec::new();
    let outcome = model.run_into(&mut |served: &Served| {
        ends.push((served.arrived_ns, served.ended_ns, served.overlapped_ns));
    });
    let count = usize::try_from(cores).expect("a few");
    let mut slow = Slow {
        trace: &trace,
        arrived: 0,
        begun: 0,
        cores: vec![Core::new(batch, policy); count],
        idle: (0..count).collect(),
        now_ns: 0,
        ends: Vec::new(),
    };
    while slow.ends.len() < trace.len() {
        slow.step();
    }
    let sum = |of: fn(&Core) -> u64| slow.cores.iter().map(of).sum::<u64>();
    prop_assert_eq!(&ends, &slow.ends);
    prop_assert_eq!(outcome.tally.naps, sum(|core| core.naps));
    prop_assert_eq!(outcome.tally.overlapped_ns, sum(|core| core.overlapped_ns));
    // With several cores, the sums of lent time differ: the slow model stops at the last end of a
    // request, and the simulator does not.
    if cores == 1 {
        prop_assert_eq!(outcome.tally.borrowed_ns, sum(|core| core.borrowed_ns));
    }
    Ok(())
}

/// Generates batches whose times are up to about `scale_ns`.
fn batches(scale_ns: u64) -> impl Strategy<Value = Batch> {
    let short = 0..scale_ns;
    let slowdowns = (1000u64..3000, prop_oneof![Just(1000u64), 1000u64..2000]);
    let signal = prop_oneof![3 => Just(Signal::Service), 1 => Just(Signal::Tasks)];
    let looks = (any::<bool>(), 1..scale_ns + scale_ns / 4);
    let ipc_after_ns = prop_oneof![Just(0), short.clone()];
    (slowdowns, looks, signal, short.clone(), short, ipc_after_ns).prop_map(
        |(slowdowns, (guard, every_ns), signal, sleep_ns, wake_ns, ipc_after_ns)| Batch {
            request_slowdown_milli: slowdowns.0,
            batch_slowdown_milli: 1000,
            nap_slowdown_milli: slowdowns.1,
            polling: if guard { Polling::Guard { every_ns } } else { Polling::Checks { every_ns } },
            signal,
            sleep_ns,
            wake_ns,
            ipc_after_ns,
        },
    )
}

fn policies(most_ns: u64) -> impl Strategy<Value = Policy> {
    let ref_ipc_milli = REF_IPC_MILLI;
    (0..most_ns, 0..4).prop_map(move |(budget_ns, kind)| match kind {
        0 => Policy::BorrowIdle,
        1 => Policy::FixedBudget { budget_ns },
        2 => Policy::RefreshBudget { budget_ns },
        _ => Policy::DynamicBudget { budget_ns, ref_ipc_milli },
    })
}

/// Times up to this length are so long that chance never puts two events into the same nanosecond.
const LONG_NS: u64 = 1_000_000_000_000;

/// Differences that were found become tests in this file, not seeds in another file.
fn config() -> ProptestConfig {
    ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2000) }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn skipping_polls_changes_nothing(
        batch in batches(32), policy in policies(200),
        requests in prop::collection::vec((1u64..200, 1u64..150), 1..40),
    ) {
        agree(1, batch, policy, &requests)?;
    }

    #[test]
    fn skipping_polls_changes_nothing_on_several_cores(
        cores in 2u64..5, batch in batches(LONG_NS / 8), policy in policies(2 * LONG_NS),
        requests in prop::collection::vec((1..LONG_NS / 2, 1..LONG_NS), 1..40),
    ) {
        // More frequent polls would make the slow model too slow.
        let every_ns = batch.polling.every_ns().max(LONG_NS / 1000);
        let polling = match batch.polling {
            Polling::Checks { .. } => Polling::Checks { every_ns },
            Polling::Guard { .. } => Polling::Guard { every_ns },
        };
        agree(cores, Batch { polling, ..batch }, policy, &requests)?;
    }
}

/// Two cases in which the models once differed.
#[test]
fn a_nap_of_no_time_and_a_budget_that_ends_between_two_checks() {
    let batch = |request_slowdown_milli, every_ns| Batch {
        request_slowdown_milli,
        batch_slowdown_milli: 1000,
        nap_slowdown_milli: 1000,
        polling: Polling::Checks { every_ns },
        signal: Signal::Service,
        sleep_ns: 0,
        wake_ns: 0,
        ipc_after_ns: 0,
    };
    agree(1, batch(1000, 1), Policy::BorrowIdle, &[(1, 2)]).unwrap();
    let requests = [(169, 1), (131, 1), (126, 1), (4, 1), (104, 1), (102, 1), (105, 127), (1, 1)];
    agree(1, batch(1520, 11), Policy::FixedBudget { budget_ns: 184 }, &requests).unwrap();
}
