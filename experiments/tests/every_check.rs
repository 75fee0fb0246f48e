//! The simulator leaps from one thing that can change a decision to the next. This test makes every
//! single check.
//!
//! Goal: leaping changes nothing. Method: the same requests go through a second, slow model of a
//! pair that steps through all arrivals, ends, checks, naps and wakes one by one and asks the
//! policy at each check; every end of a request, every shared nanosecond and every nap must be the
//! same.

use elfen_rt::policy::{Lane, Policy, Service, State, Verdict};
use experiments::simulate::pair::{Batch, Control, REF_IPC_MILLI};
use experiments::simulate::source::{Requests, Until};
use experiments::simulate::trace::Served;
use experiments::simulate::{Model, Queue};
use proptest::prelude::*;

#[derive(Clone, Copy, PartialEq, Debug)]
enum Thread {
    Runs,
    Leaves(u64),
    Naps,
    Wakes(u64),
}

#[derive(Clone, Copy, PartialEq, Debug)]
struct Request {
    arrived_ns: u64,
    started_ns: u64,
    left: u64,
}

/// One nanosecond event after the other.
struct Slow<'a> {
    batch: Batch,
    policy: Policy,
    trace: &'a [(u64, u64)],
    arrived: usize,
    begun: usize,
    running: Option<Request>,
    finished: u64,
    thread: Thread,
    state: State,
    now_ns: u64,
    naps: u64,
    borrowed_ns: u64,
    overlapped_ns: u64,
    ends: Vec<(u64, u64)>,
    overlapped_before_ns: u64,
}

impl Slow<'_> {
    fn occupies_its_lane(&self) -> bool {
        matches!(self.thread, Thread::Runs | Thread::Leaves(_))
    }

    fn speed(&self) -> u64 {
        if self.occupies_its_lane() { 1000 } else { self.batch.request_slowdown_milli }
    }

    fn pass(&mut self, to_ns: u64) {
        let (passed_ns, speed) = (to_ns - self.now_ns, self.speed());
        let overlaps = self.occupies_its_lane();
        match &mut self.running {
            Some(request) => {
                request.left = request.left.saturating_sub(passed_ns * speed);
                if overlaps {
                    self.overlapped_ns += passed_ns;
                }
            }
            None if self.thread == Thread::Runs => self.borrowed_ns += passed_ns,
            None => {}
        }
        self.now_ns = to_ns;
    }

    fn next_ns(&self) -> u64 {
        let arrival = self.trace.get(self.arrived).map(|request| request.0);
        let end = self.running.map(|request| self.now_ns + request.left.div_ceil(self.speed()));
        let check = (self.now_ns / self.batch.check_ns + 1) * self.batch.check_ns;
        let thread = match self.thread {
            Thread::Runs => Some(check),
            Thread::Leaves(at_ns) | Thread::Wakes(at_ns) => Some(at_ns.max(self.now_ns)),
            Thread::Naps => None,
        };
        [arrival, end, thread].into_iter().flatten().min().expect("something always happens")
    }

    fn check(&mut self) {
        let service = Service {
            queue_len: (self.arrived - self.begun) as u64,
            running_request: self.running.map_or(0, |_| self.begun as u64),
            request_started_ns: self.running.map_or(0, |request| request.started_ns),
            finished: self.finished,
        };
        let busy = self.running.is_some();
        let ipc_milli = busy.then(|| REF_IPC_MILLI * 1000 / self.batch.request_slowdown_milli);
        let lane = Lane { busy, service: Some(service), ipc_milli };
        let verdict;
        (self.state, verdict) = self.policy.check(self.state, &lane, self.now_ns);
        self.thread = match verdict {
            Verdict::Run => Thread::Runs,
            Verdict::Nap => {
                self.naps += 1;
                Thread::Leaves(self.now_ns + self.batch.sleep_ns)
            }
        };
    }

    /// Everything that happens at this moment: first requests, then the thread.
    fn step(&mut self) {
        let to_ns = self.next_ns();
        let due = match self.thread {
            Thread::Leaves(at_ns) | Thread::Wakes(at_ns) => at_ns <= to_ns,
            Thread::Runs => to_ns.is_multiple_of(self.batch.check_ns),
            Thread::Naps => false,
        };
        self.pass(to_ns);
        let mut changed = false;
        while self.trace.get(self.arrived).is_some_and(|request| request.0 <= to_ns) {
            self.arrived += 1;
        }
        if let Some(request) = self.running.filter(|request| request.left == 0) {
            self.ends.push((to_ns, self.overlapped_ns - self.overlapped_before_ns));
            self.finished += 1;
            self.running = None;
            assert!(request.arrived_ns <= request.started_ns);
            changed = true;
        }
        if self.running.is_none() && self.begun < self.arrived {
            let (arrived_ns, demand_ns) = self.trace[self.begun];
            let left = demand_ns * self.batch.request_slowdown_milli;
            self.running = Some(Request { arrived_ns, started_ns: to_ns, left });
            self.overlapped_before_ns = self.overlapped_ns;
            self.begun += 1;
            changed = true;
        } else if changed {
            // The lane has gone idle.
            match self.thread {
                Thread::Naps => self.thread = Thread::Wakes(to_ns + self.batch.wake_ns),
                Thread::Leaves(at_ns) => {
                    self.thread = Thread::Wakes(at_ns + self.batch.wake_ns);
                }
                Thread::Runs | Thread::Wakes(_) => {}
            }
            return;
        }
        match self.thread {
            Thread::Leaves(_) if due => self.thread = Thread::Naps,
            // A check in the very moment of a start or an end has not seen it.
            Thread::Runs if due && !changed => self.check(),
            Thread::Wakes(_) if due => self.check(),
            _ => {}
        }
    }
}

fn batches() -> impl Strategy<Value = Batch> {
    (1000u64..3000, 1u64..40, 0u64..30, 0u64..30).prop_map(
        |(request_slowdown_milli, check_ns, sleep_ns, wake_ns)| Batch {
            request_slowdown_milli,
            batch_slowdown_milli: 1000,
            check_ns,
            sleep_ns,
            wake_ns,
        },
    )
}

fn policies() -> impl Strategy<Value = Policy> {
    let ref_ipc_milli = REF_IPC_MILLI;
    (0u64..200, 0..4).prop_map(move |(budget_ns, kind)| match kind {
        0 => Policy::BorrowIdle,
        1 => Policy::FixedBudget { budget_ns },
        2 => Policy::RefreshBudget { budget_ns },
        _ => Policy::DynamicBudget { budget_ns, ref_ipc_milli },
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn leaping_over_checks_changes_nothing(
        batch in batches(), policy in policies(),
        requests in prop::collection::vec((1u64..200, 1u64..150), 1..40),
    ) {
        let mut at_ns = 0;
        let trace: Vec<(u64, u64)> = requests
            .iter()
            .map(|&(pause_ns, demand_ns)| { at_ns += pause_ns; (at_ns, demand_ns) })
            .collect();
        let model = Model {
            machines: 1,
            cores: 1,
            queue: Queue::PerCore,
            requests: Requests::Trace(trace.clone().into()),
            until: Until::Requests(1),
            batch,
            control: Control::Policy(policy),
            watch: None,
            seed: 0,
        };
        let mut ends = Vec::new();
        let outcome = model.run_into(&mut |served: &Served| {
            ends.push((served.ended_ns, served.overlapped_ns));
        });
        let mut slow = Slow {
            batch,
            policy,
            trace: &trace,
            arrived: 0,
            begun: 0,
            running: None,
            finished: 0,
            thread: Thread::Wakes(0),
            state: State::default(),
            now_ns: 0,
            naps: 0,
            borrowed_ns: 0,
            overlapped_ns: 0,
            ends: Vec::new(),
            overlapped_before_ns: 0,
        };
        while slow.ends.len() < trace.len() {
            slow.step();
        }
        prop_assert_eq!(&ends, &slow.ends);
        prop_assert_eq!(outcome.tally.naps, slow.naps);
        prop_assert_eq!(outcome.tally.overlapped_ns, slow.overlapped_ns);
        prop_assert_eq!(outcome.tally.borrowed_ns, slow.borrowed_ns);
    }
}
