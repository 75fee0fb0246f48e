//! One pair: a request lane that serves, and a batch lane that checks, reacts, naps and wakes.
//!
//! Time advances from one thing that can change a decision to the next: a request starts, a budget
//! runs out, the lane goes idle, a nap is over. Between them the policy would answer every look
//! alike, so none is made; at each of them the policy of `elfen-rt` is asked at the moment of the
//! next look. So a request costs a handful of steps, whatever its length and however dense the
//! looks.
//!
//! Requests start at any time, and a look knows nothing of them: the first look at a request comes
//! after half an interval on average.

use elfen_rt::policy::{Policy, Sample, Service, State, Verdict};

use super::figure;

/// The batch program beside the service, and what it and its lane cost.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Batch {
    /// How much longer a request takes while the batch runs, in thousandths; at least 1000.
    pub request_slowdown_milli: u64,
    /// How much longer the batch takes while a request runs, in thousandths; at least 1000.
    pub batch_slowdown_milli: u64,
    /// How much longer a request takes while the batch lane naps, in thousandths; at least 1000. A
    /// lane that naps by PAUSE goes on taking from its core.
    pub nap_slowdown_milli: u64,
    pub looks: Looks,
    pub signal: Signal,
    /// From a look that decides to nap until the nap has begun.
    pub sleep_ns: u64,
    /// From the request lane going idle until the batch runs.
    pub wake_ns: u64,
    /// From a request's start until its IPC is known, for dynamic-budget.
    pub ipc_after_ns: u64,
}

/// When the batch thread, or a guard for it, looks at the request lane while the batch runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Looks {
    /// Checks in the batch program's source, at multiples of this time.
    Checks { every_ns: u64 },
    /// A guard beside a program without checks. Its timer starts anew at each look, and a budget
    /// that ends earlier wakes it then (`elfen run`, `host/run/guard.rs`).
    Guard { every_ns: u64 },
}

/// What a look can see of the request lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Signal {
    /// Its requests and its queue, which the service publishes.
    Service,
    /// Whether it is busy and since when, which is all that a task map has.
    Tasks,
}

impl Looks {
    pub fn every_ns(self) -> u64 {
        let (Self::Checks { every_ns } | Self::Guard { every_ns }) = self;
        every_ns
    }
}

/// The rule by which the batch lane runs or naps.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Control {
    /// No batch at all.
    NoBatch,
    /// The batch never naps.
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
    /// Runs; the next look that could decide otherwise is due at `look_ns`.
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
    /// Nanoseconds left at full speed, times both slowdowns of a request: whole numbers at every
    /// speed.
    left: u128,
}

#[derive(Clone, Debug)]
pub struct Pair {
    batch: Batch,
    pub control: Control,
    state: State,
    figure: figure::State,
    batching: Batching,
    /// The guard's last look.
    looked_ns: u64,
    /// When a budget wakes the guard before its timer does, as it knew at its last look.
    budget_ends_ns: u64,
    running: Option<Running>,
    /// When the request lane last stopped idling; `None` while it idles.
    busy_since_ns: Option<u64>,
    pub tally: Tally,
}

impl Batch {
    /// What a request gets done in a nanosecond with the core to itself.
    fn full_speed(&self) -> u64 {
        self.request_slowdown_milli * self.nap_slowdown_milli
    }
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
            looked_ns: 0,
            budget_ends_ns: u64::MAX,
            running: None,
            busy_since_ns: None,
            tally: Tally::default(),
        }
    }

    /// The request lane idles from `from_ns` until `to_ns`.
    #[inline]
    pub fn idle(&mut self, from_ns: u64, to_ns: u64) {
        self.busy_since_ns = None;
        let (runs_ns, look_ns) = match self.batching {
            Batching::Absent => return,
            Batching::Runs { .. } => (from_ns, self.look_after(from_ns)),
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
            // Later looks in this idle time see the same, and change nothing that matters.
            self.decide(false, false, look_ns);
        }
    }

    /// A request of `demand_ns` starts.
    #[inline]
    pub fn begin(&mut self, id: u64, now_ns: u64, demand_ns: u64) {
        let left = u128::from(demand_ns) * u128::from(self.batch.full_speed());
        self.running = Some(Running { id, started_ns: now_ns, now_ns, left });
        self.busy_since_ns.get_or_insert(now_ns);
        if matches!(self.batching, Batching::Runs { .. }) {
            // Not the earlier of the two: a look in the very moment of a start has not seen it.
            self.batching = Batching::Runs { look_ns: self.look_after(now_ns) };
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
            let batch = &self.batch;
            let (overlaps, speed, until_ns) = match self.batching {
                Batching::Absent => (false, batch.full_speed(), u64::MAX),
                Batching::Naps => (false, 1000 * batch.request_slowdown_milli, u64::MAX),
                Batching::Wakes { at_ns } => (false, batch.full_speed(), at_ns),
                Batching::Runs { look_ns: at_ns } | Batching::Leaves { at_ns } => {
                    (true, 1000 * batch.nap_slowdown_milli, at_ns)
                }
            };
            let left_ns = running.left.div_ceil(speed.into());
            let left_ns = u64::try_from(left_ns).unwrap_or(u64::MAX);
            let end_ns = running.now_ns.saturating_add(left_ns);
            let next_ns = end_ns.min(until_ns).min(limit_ns).max(running.now_ns);
            let ran_ns = next_ns - running.now_ns;
            self.tally.busy_ns += ran_ns;
            self.tally.overlapped_ns += if overlaps { ran_ns } else { 0 };
            let done = u128::from(ran_ns) * u128::from(speed);
            running.left = running.left.saturating_sub(done);
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

    /// The queue has changed: the next look may decide otherwise.
    pub fn queue_changed(&mut self, now_ns: u64) {
        if let Batching::Runs { look_ns } = self.batching {
            let look_ns = self.look_after(now_ns).min(look_ns);
            self.batching = Batching::Runs { look_ns };
        }
    }

    /// Whether the queue can matter to the next looks: the batch runs beside a request that has no
    /// budget of its own, yet.
    pub fn heeds_queue(&self) -> bool {
        let Some(running) = self.running else { return false };
        let own = matches!(self.state, State::Sharing { request, .. } if request == running.id);
        matches!(self.batching, Batching::Runs { .. }) && !own
    }

    /// The next look after `now_ns`, if nothing else happens.
    fn look_after(&mut self, now_ns: u64) -> u64 {
        match self.batch.looks {
            Looks::Checks { every_ns } => (now_ns / every_ns + 1) * every_ns,
            Looks::Guard { every_ns } => {
                if self.budget_ends_ns <= now_ns {
                    // Nor has this look, in the very moment of a change, seen it.
                    self.looked_ns = std::mem::replace(&mut self.budget_ends_ns, u64::MAX);
                }
                let looks = (now_ns - self.looked_ns) / every_ns + 1;
                self.budget_ends_ns.min(self.looked_ns + looks * every_ns)
            }
        }
    }

    /// The look that finds a budget spent which ends at `due_ns`.
    fn look_from(&self, due_ns: u64) -> u64 {
        match self.batch.looks {
            Looks::Checks { every_ns } => due_ns.div_ceil(every_ns).saturating_mul(every_ns),
            Looks::Guard { .. } => due_ns,
        }
    }

    /// The first look to which the running request's IPC is known, if it is not yet.
    fn look_that_knows_the_ipc(&self, now_ns: u64) -> u64 {
        let known_ns = self.running.map_or(0, |one| one.started_ns + self.batch.ipc_after_ns);
        match self.batch.looks {
            _ if known_ns <= now_ns => u64::MAX,
            Looks::Checks { every_ns } => known_ns.div_ceil(every_ns).saturating_mul(every_ns),
            Looks::Guard { every_ns } => {
                now_ns + (known_ns - now_ns).div_ceil(every_ns).saturating_mul(every_ns)
            }
        }
    }

    /// One look: a check of the batch thread, or a guard's.
    fn decide(&mut self, busy: bool, waiting: bool, now_ns: u64) {
        let lane = self.lane(busy, waiting, now_ns);
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
        self.looked_ns = now_ns;
        self.budget_ends_ns = u64::MAX;
        self.batching = match verdict {
            Verdict::Run => {
                let ends_ns = deadline_ns.map_or(u64::MAX, |due_ns| self.look_from(due_ns));
                self.budget_ends_ns = ends_ns;
                Batching::Runs { look_ns: ends_ns.min(self.look_that_knows_the_ipc(now_ns)) }
            }
            Verdict::Nap => {
                self.tally.naps += 1;
                Batching::Leaves { at_ns: now_ns + self.batch.sleep_ns }
            }
        };
    }

    /// What a look sees. Policies ask only whether the queue is empty, so 1 stands for any number.
    fn lane(&self, busy: bool, waiting: bool, now_ns: u64) -> Sample {
        let (running_request, request_started_ns) =
            self.running.map_or((0, 0), |running| (running.id, running.started_ns));
        let service = Service {
            queue_len: u64::from(waiting),
            running_request,
            request_started_ns,
            finished: self.tally.finished,
        };
        let measured = now_ns.saturating_sub(request_started_ns) >= self.batch.ipc_after_ns;
        let ipc_milli =
            (busy && measured).then(|| REF_IPC_MILLI * 1000 / self.batch.request_slowdown_milli);
        let service = (self.batch.signal == Signal::Service).then_some(service);
        Sample { busy, busy_since_ns: self.busy_since_ns, service, ipc_milli }
    }
}

/// A thread that wakes runs, and looks, at once.
fn at(now_ns: u64) -> (u64, u64) {
    (now_ns, now_ns)
}
