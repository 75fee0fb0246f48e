//! One pair: a request lane that serves, and a batch lane that checks, reacts, naps and wakes.
//!
//! Time advances from one thing that can change a decision to the next: a request starts, a budget
//! runs out, the lane goes idle, a nap is over. Between them the policy would answer every check
//! alike, so none is made; at each of them the policy of `elfen-rt` is asked at the moment of the
//! next check. So a request costs a handful of steps, whatever its length and however dense the
//! checks.
//!
//! Checks are due at multiples of the check interval. Requests start at any time, so the first
//! check of a request comes after half an interval on average, as in a program that knows nothing
//! of requests.

use elfen_rt::policy::{Lane, Policy, Service, State, Verdict};

use super::figure;

/// The batch program beside the service, and what it and its lane cost.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Batch {
    /// How much longer a request takes while the batch runs, in thousandths; at least 1000.
    pub request_slowdown_milli: u64,
    /// How much longer the batch takes while a request runs, in thousandths; at least 1000.
    pub batch_slowdown_milli: u64,
    /// From one check to the next.
    pub check_ns: u64,
    /// From a check that decides to nap until the request has the core to itself.
    pub sleep_ns: u64,
    /// From the request lane going idle until the batch runs.
    pub wake_ns: u64,
}

/// Who decides what the batch lane does.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Control {
    /// No batch at all.
    NoBatch,
    /// The batch never checks.
    Unrestrained,
    Policy(Policy),
    /// Figure 5.9 by the letter, for comparison.
    Figure(figure::FixedBudget),
}

/// The reference IPC of a request with the core to itself; only its ratio to the IPC while sharing
/// matters.
pub const REF_IPC_MILLI: u64 = 1_000_000;

/// What the batch thread is doing.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Batching {
    Absent,
    /// Runs; the next check that could decide otherwise is due at `look_ns`.
    Runs {
        look_ns: u64,
    },
    /// Has decided to nap and still occupies its lane.
    Leaves {
        at_ns: u64,
    },
    Naps,
    Wakes {
        at_ns: u64,
    },
}

/// What has happened on the pair so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tally {
    pub busy_ns: u64,
    pub borrowed_ns: u64,
    pub overlapped_ns: u64,
    pub naps: u64,
    pub finished: u64,
}

/// The request that runs.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Running {
    id: u64,
    started_ns: u64,
    now_ns: u64,
    /// Nanoseconds left at full speed, times `request_slowdown_milli`: whole numbers at both
    /// speeds.
    left: u64,
}

#[derive(Clone, Debug)]
pub struct Pair {
    batch: Batch,
    pub control: Control,
    state: State,
    figure: figure::State,
    batching: Batching,
    running: Option<Running>,
    pub tally: Tally,
}

impl Pair {
    /// Idle at time 0, the batch about to run.
    pub fn new(batch: Batch, control: Control) -> Self {
        let batching = match control {
            Control::NoBatch => Batching::Absent,
            _ => Batching::Wakes { at_ns: 0 },
        };
        Self {
            batch,
            control,
            state: State::default(),
            figure: figure::State::default(),
            batching,
            running: None,
            tally: Tally::default(),
        }
    }

    /// The request lane idles from `from_ns` until `to_ns`.
    #[inline]
    pub fn idle(&mut self, from_ns: u64, to_ns: u64) {
        let (runs_ns, look_ns) = match self.batching {
            Batching::Absent => return,
            Batching::Runs { .. } => (from_ns, self.check_after(from_ns)),
            // The nap looks again before it waits, and finds the lane idle.
            Batching::Leaves { at_ns } => at(at_ns.max(from_ns) + self.batch.wake_ns),
            Batching::Naps => at(from_ns + self.batch.wake_ns),
            Batching::Wakes { at_ns } => at(at_ns.max(from_ns)),
        };
        if runs_ns >= to_ns {
            self.batching = Batching::Wakes { at_ns: runs_ns };
            return;
        }
        self.tally.borrowed_ns += to_ns - runs_ns;
        self.batching = Batching::Runs { look_ns: u64::MAX };
        if look_ns < to_ns {
            // Later checks of this idle time see the same, and change nothing that matters.
            self.decide(false, false, look_ns);
        }
    }

    /// A request of `demand_ns` starts.
    #[inline]
    pub fn begin(&mut self, id: u64, now_ns: u64, demand_ns: u64) {
        let left = demand_ns.saturating_mul(self.batch.request_slowdown_milli);
        self.running = Some(Running { id, started_ns: now_ns, now_ns, left });
        // Not the earlier of the two: a check in the very moment of a start has not seen it.
        let due_ns = self.check_after(now_ns);
        if let Batching::Runs { look_ns } = &mut self.batching {
            *look_ns = due_ns;
        }
    }

    /// Runs the request to its end; `waiting` tells whether others queue at some time. `None` if no
    /// request runs.
    #[inline]
    pub fn finish(&mut self, waiting: impl Fn(u64) -> bool) -> Option<u64> {
        self.advance(u64::MAX, waiting)
    }

    /// Runs the request to its end, or until `limit_ns` if that is earlier.
    #[inline]
    pub fn advance(&mut self, limit_ns: u64, waiting: impl Fn(u64) -> bool) -> Option<u64> {
        let mut running = self.running?;
        loop {
            let (overlaps, until_ns) = match self.batching {
                Batching::Absent | Batching::Naps => (false, u64::MAX),
                Batching::Runs { look_ns } => (true, look_ns),
                Batching::Leaves { at_ns } => (true, at_ns),
                Batching::Wakes { at_ns } => (false, at_ns),
            };
            let speed = if overlaps { 1000 } else { self.batch.request_slowdown_milli };
            let end_ns = running.now_ns.saturating_add(running.left.div_ceil(speed));
            let next_ns = end_ns.min(until_ns).min(limit_ns).max(running.now_ns);
            let ran_ns = next_ns - running.now_ns;
            self.tally.busy_ns += ran_ns;
            self.tally.overlapped_ns += if overlaps { ran_ns } else { 0 };
            running.left = running.left.saturating_sub(ran_ns.saturating_mul(speed));
            running.now_ns = next_ns;
            if next_ns == end_ns {
                self.running = None;
                self.tally.finished += 1;
                return Some(end_ns);
            }
            self.running = Some(running);
            if next_ns == until_ns {
                match self.batching {
                    Batching::Leaves { .. } => self.batching = Batching::Naps,
                    _ => self.decide(true, waiting(until_ns), until_ns),
                }
            } else {
                return None;
            }
        }
    }

    /// The queue has changed: the next check may decide otherwise.
    pub fn look_at_next_check(&mut self, now_ns: u64) {
        let due_ns = self.check_after(now_ns);
        if let Batching::Runs { look_ns } = &mut self.batching {
            *look_ns = due_ns.min(*look_ns);
        }
    }

    /// Whether the batch shares the lane with a request that its budget was not given for.
    pub fn hopes_for_refresh(&self) -> bool {
        let State::Sharing { request, .. } = self.state else { return false };
        matches!(self.batching, Batching::Runs { .. })
            && self.running.is_some_and(|running| running.id != request)
    }

    fn check_after(&self, now_ns: u64) -> u64 {
        (now_ns / self.batch.check_ns + 1) * self.batch.check_ns
    }

    /// The first check at `due_ns` or later.
    fn check_from(&self, due_ns: u64) -> u64 {
        due_ns.div_ceil(self.batch.check_ns).saturating_mul(self.batch.check_ns)
    }

    /// One check of the batch thread.
    fn decide(&mut self, busy: bool, waiting: bool, now_ns: u64) {
        let lane = self.lane(busy, waiting);
        let (verdict, deadline_ns) = match self.control {
            Control::NoBatch => return,
            Control::Unrestrained => (Verdict::Run, None),
            Control::Policy(policy) => {
                let verdict;
                (self.state, verdict) = policy.check(self.state, &lane, now_ns);
                (verdict, policy.deadline_ns(self.state, &lane, now_ns))
            }
            Control::Figure(rule) => {
                let verdict;
                (self.figure, verdict) = rule.check(self.figure, &lane, now_ns);
                (verdict, rule.deadline_ns(self.figure, now_ns))
            }
        };
        self.batching = match verdict {
            Verdict::Run => {
                Batching::Runs { look_ns: deadline_ns.map_or(u64::MAX, |due| self.check_from(due)) }
            }
            Verdict::Nap => {
                self.tally.naps += 1;
                Batching::Leaves { at_ns: now_ns + self.batch.sleep_ns }
            }
        };
    }

    /// What a check sees. Policies ask only whether the queue is empty, so 1 stands for any number.
    fn lane(&self, busy: bool, waiting: bool) -> Lane {
        let (running_request, request_started_ns) =
            self.running.map_or((0, 0), |running| (running.id, running.started_ns));
        let service = Service {
            queue_len: u64::from(waiting),
            running_request,
            request_started_ns,
            finished: self.tally.finished,
        };
        let ipc_milli = busy.then(|| REF_IPC_MILLI * 1000 / self.batch.request_slowdown_milli);
        Lane { busy, service: Some(service), ipc_milli }
    }
}

/// A thread that wakes runs, and checks, at once.
fn at(now_ns: u64) -> (u64, u64) {
    (now_ns, now_ns)
}
