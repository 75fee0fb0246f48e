//! One pair: a request lane that serves requests, and a batch lane that polls, naps and wakes.
//!
//! Simulated time advances from event to event. Events are what can change a decision: a request
//! starts, a budget ends, the lane becomes idle, or a nap ends. All polls between two events would
//! get the same answer from the policy, so the simulator skips them. At each event, it evaluates
//! the policy of `elfen-rt` at the time of the next poll. So a request takes a few steps, whatever
//! its length and the interval of the polls.
//!
//! Requests start independently of the polls. On average, the first poll of a request comes half an
//! interval after its start.

use elfen_rt::policy::{Policy, Sample, Service, State, Verdict};

/// The batch program, and how long its lane takes to nap and to wake.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Batch {
    /// The slowdown of a request while the batch runs, in thousandths; at least 1000.
    pub request_slowdown_milli: u64,
    /// The slowdown of the batch while a request runs, in thousandths; at least 1000.
    pub batch_slowdown_milli: u64,
    /// The slowdown of a request while the batch lane naps, in thousandths; at least 1000. It is
    /// above 1000 if the lane naps with PAUSE, which uses a part of the core.
    pub nap_slowdown_milli: u64,
    pub polling: Polling,
    pub signal: Signal,
    /// The time from a poll that decides to nap until the nap has begun.
    pub sleep_ns: u64,
    /// The time from the start of the request lane's idle period until the batch runs.
    pub wake_ns: u64,
    /// The time from a request's start until its IPC is known, for dynamic-budget.
    pub ipc_after_ns: u64,
}

/// When the batch thread, or its guard, polls the request lane while the batch runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Polling {
    /// Checks in the batch program's source poll at multiples of this time.
    Checks { every_ns: u64 },
    /// A guard polls for a program without checks. Its timer starts again at each poll. If a budget
    /// ends before the timer does, the guard wakes at the end of the budget (`elfen-run`,
    /// `guard.rs`).
    Guard { every_ns: u64 },
}

/// What a poll reads about the request lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Signal {
    /// The running request and the queue, from the service's page.
    Service,
    /// Whether the lane is busy, and since when, from the task map.
    Tasks,
}

impl Polling {
    pub fn every_ns(self) -> u64 {
        let (Self::Checks { every_ns } | Self::Guard { every_ns }) = self;
        every_ns
    }
}

/// The rule that decides whether the batch runs or naps.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Control {
    /// The core has no batch program.
    NoBatch,
    /// The batch never naps.
    Unrestrained,
    Policy(Policy),
    /// The code of Figure 5.9 as printed, for comparison.
    Printed(PrintedFixedBudget),
}

/// The IPC of a request that does not share its core. Only its ratio to the IPC during sharing
/// matters.
pub const REF_IPC_MILLI: u64 = 1_000_000;

/// The state of the batch thread.
#[derive(Clone, Copy, PartialEq, Debug)]
enum BatchState {
    Absent,
    /// The batch runs. At `poll_ns` comes the next poll that could change the decision.
    Runs {
        poll_ns: u64,
    },
    /// The batch has decided to nap and occupies its lane until `at_ns`.
    Leaves {
        at_ns: u64,
    },
    Naps,
    Wakes {
        at_ns: u64,
    },
}

/// The counts of a pair so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tally {
    pub busy_ns: u64,
    pub borrowed_ns: u64,
    pub overlapped_ns: u64,
    pub naps: u64,
    pub finished: u64,
}

/// The running request.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Running {
    id: u64,
    started_ns: u64,
    now_ns: u64,
    /// The remaining time at full speed in nanoseconds, multiplied by both slowdowns of a request.
    /// This product is an integer at every speed.
    left: u128,
}

#[derive(Clone, Debug)]
pub struct Pair {
    batch: Batch,
    pub control: Control,
    state: State,
    printed: PrintedState,
    batch_state: BatchState,
    /// When the guard polled last.
    polled_ns: u64,
    /// When the current budget ends, which wakes the guard before its timer. Computed at the
    /// guard's last poll.
    budget_ends_ns: u64,
    running: Option<Running>,
    /// When the request lane became busy; `None` while it idles.
    busy_since_ns: Option<u64>,
    pub tally: Tally,
}

impl Batch {
    /// Returns the progress per nanosecond of a request that does not share its core.
    fn full_speed(&self) -> u64 {
        self.request_slowdown_milli * self.nap_slowdown_milli
    }
}

impl Pair {
    /// Creates an idle pair at time 0, whose batch is about to run.
    pub fn new(batch: Batch, control: Control) -> Self {
        let batch_state = match control {
            Control::NoBatch => BatchState::Absent,
            _ => BatchState::Wakes { at_ns: 0 },
        };
        Self {
            batch,
            control,
            state: State::default(),
            printed: PrintedState::default(),
            batch_state,
            polled_ns: 0,
            budget_ends_ns: u64::MAX,
            running: None,
            busy_since_ns: None,
            tally: Tally::default(),
        }
    }

    /// Simulates the time from `from_ns` until `to_ns`, in which the request lane idles.
    #[inline]
    pub fn idle(&mut self, from_ns: u64, to_ns: u64) {
        self.busy_since_ns = None;
        let (runs_ns, poll_ns) = match self.batch_state {
            BatchState::Absent => return,
            BatchState::Runs { .. } => (from_ns, self.next_poll_after(from_ns)),
            // The code of the nap polls the lane once more before it waits, and finds it idle.
            BatchState::Leaves { at_ns } => at(at_ns.max(from_ns) + self.batch.wake_ns),
            BatchState::Naps => at(from_ns + self.batch.wake_ns),
            BatchState::Wakes { at_ns } => at(at_ns.max(from_ns)),
        };
        if runs_ns >= to_ns {
            self.batch_state = BatchState::Wakes { at_ns: runs_ns };
            return;
        }
        self.tally.borrowed_ns += to_ns - runs_ns;
        self.batch_state = BatchState::Runs { poll_ns: u64::MAX };
        if poll_ns < to_ns {
            // Later polls in this idle period see the same lane, and do not change the result.
            self.decide(false, false, poll_ns);
        }
    }

    /// Starts a request that runs for `demand_ns` at full speed.
    #[inline]
    pub fn begin(&mut self, id: u64, now_ns: u64, demand_ns: u64) {
        let left = u128::from(demand_ns) * u128::from(self.batch.full_speed());
        self.running = Some(Running { id, started_ns: now_ns, now_ns, left });
        self.busy_since_ns.get_or_insert(now_ns);
        if matches!(self.batch_state, BatchState::Runs { .. }) {
            // The earlier poll is not used if it is at `now_ns`: such a poll has not yet seen the
            // request.
            self.batch_state = BatchState::Runs { poll_ns: self.next_poll_after(now_ns) };
        }
    }

    /// Runs the request to its end, and returns the time of this end. Returns `None` if no request
    /// runs.
    ///
    /// `waiting` returns whether other requests wait at a given time.
    #[inline]
    pub fn finish(&mut self, waiting: impl Fn(u64) -> bool) -> Option<u64> {
        self.advance(u64::MAX, waiting)
    }

    /// Like [`Self::finish`], but stops at `limit_ns` and returns `None` if the request has not
    /// ended by then.
    #[inline]
    pub fn advance(&mut self, limit_ns: u64, waiting: impl Fn(u64) -> bool) -> Option<u64> {
        let mut running = self.running?;
        loop {
            let batch = &self.batch;
            let (overlaps, speed, until_ns) = match self.batch_state {
                BatchState::Absent => (false, batch.full_speed(), u64::MAX),
                BatchState::Naps => (false, 1000 * batch.request_slowdown_milli, u64::MAX),
                BatchState::Wakes { at_ns } => (false, batch.full_speed(), at_ns),
                BatchState::Runs { poll_ns: at_ns } | BatchState::Leaves { at_ns } => {
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
                match self.batch_state {
                    BatchState::Leaves { .. } => self.batch_state = BatchState::Naps,
                    _ => self.decide(true, waiting(until_ns), until_ns),
                }
            } else {
                return None;
            }
        }
    }

    /// Records that the queue has changed, so that the next poll may decide differently.
    pub fn queue_changed(&mut self, now_ns: u64) {
        if let BatchState::Runs { poll_ns } = self.batch_state {
            let poll_ns = self.next_poll_after(now_ns).min(poll_ns);
            self.batch_state = BatchState::Runs { poll_ns };
        }
    }

    /// Whether the decision of the next polls depends on the queue. It does while the batch runs
    /// next to a request that has not received a budget yet.
    pub fn depends_on_queue(&self) -> bool {
        let Some(running) = self.running else { return false };
        let own = matches!(self.state, State::Sharing { request, .. } if request == running.id);
        matches!(self.batch_state, BatchState::Runs { .. }) && !own
    }

    /// Returns the time of the next poll after `now_ns`, if no event comes before it.
    fn next_poll_after(&mut self, now_ns: u64) -> u64 {
        match self.batch.polling {
            Polling::Checks { every_ns } => (now_ns / every_ns + 1) * every_ns,
            Polling::Guard { every_ns } => {
                if self.budget_ends_ns <= now_ns {
                    // A guard's poll at exactly `now_ns` has not seen the change either, so the
                    // next one counts.
                    self.polled_ns = std::mem::replace(&mut self.budget_ends_ns, u64::MAX);
                }
                let looks = (now_ns - self.polled_ns) / every_ns + 1;
                self.budget_ends_ns.min(self.polled_ns + looks * every_ns)
            }
        }
    }

    /// Returns the time of the poll that finds that a budget ended at `due_ns`.
    fn poll_at_or_after(&self, due_ns: u64) -> u64 {
        match self.batch.polling {
            Polling::Checks { every_ns } => due_ns.div_ceil(every_ns).saturating_mul(every_ns),
            Polling::Guard { .. } => due_ns,
        }
    }

    /// Returns the time of the first poll that knows the running request's IPC. If the IPC is known
    /// already, returns `u64::MAX`.
    fn first_poll_with_ipc(&self, now_ns: u64) -> u64 {
        let known_ns = self.running.map_or(0, |one| one.started_ns + self.batch.ipc_after_ns);
        match self.batch.polling {
            _ if known_ns <= now_ns => u64::MAX,
            Polling::Checks { every_ns } => known_ns.div_ceil(every_ns).saturating_mul(every_ns),
            Polling::Guard { every_ns } => {
                now_ns + (known_ns - now_ns).div_ceil(every_ns).saturating_mul(every_ns)
            }
        }
    }

    /// Simulates one poll, by a check of the batch thread or by a guard.
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
            Control::Printed(rule) => {
                let verdict;
                (self.printed, verdict) = rule.check(self.printed, &lane, now_ns);
                (verdict, rule.deadline_ns(self.printed, now_ns))
            }
        };
        self.polled_ns = now_ns;
        self.budget_ends_ns = u64::MAX;
        self.batch_state = match verdict {
            Verdict::Run => {
                let ends_ns = deadline_ns.map_or(u64::MAX, |due_ns| self.poll_at_or_after(due_ns));
                self.budget_ends_ns = ends_ns;
                BatchState::Runs { poll_ns: ends_ns.min(self.first_poll_with_ipc(now_ns)) }
            }
            Verdict::Nap => {
                self.tally.naps += 1;
                BatchState::Leaves { at_ns: now_ns + self.batch.sleep_ns }
            }
        };
    }

    /// Returns what a poll reads. Policies only test whether the queue is empty, so a length of 1
    /// stands for every length above 0.
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

/// Returns when a waking thread runs and when it polls first: both at the same time.
fn at(now_ns: u64) -> (u64, u64) {
    (now_ns, now_ns)
}

/// fixed-budget as in the code of Figure 5.9(b). Once a period has begun, every request shares its
/// core until the budget is used up.
///
/// The code of the figure and the text differ if several requests follow each other without an idle
/// period (see `elfen_rt::policy`). `elfen-rt` does what the text says. Together, both variants
/// explain the published utilisations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PrintedFixedBudget {
    pub budget_ns: u64,
}

/// The variables `lane_status` and `start_stamp` of the figure.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PrintedState {
    #[default]
    Normal,
    NewPeriod,
    CoRunning {
        start_ns: u64,
    },
}

impl PrintedFixedBudget {
    pub fn check(self, state: PrintedState, lane: &Sample, now_ns: u64) -> (PrintedState, Verdict) {
        let queue_len = lane.service.map_or(0, |service| service.queue_len);
        if !lane.busy {
            let next = if queue_len == 0 { PrintedState::NewPeriod } else { state };
            return (next, Verdict::Run);
        }
        match state {
            PrintedState::Normal => (PrintedState::Normal, Verdict::Nap),
            PrintedState::NewPeriod => (PrintedState::CoRunning { start_ns: now_ns }, Verdict::Run),
            PrintedState::CoRunning { start_ns }
                if now_ns.saturating_sub(start_ns) >= self.budget_ns =>
            {
                (PrintedState::Normal, Verdict::Run)
            }
            PrintedState::CoRunning { .. } => (state, Verdict::Run),
        }
    }

    /// Returns when the verdict changes if the lane's state does not. It changes one check after
    /// the check that finds the budget used up.
    pub fn deadline_ns(self, state: PrintedState, now_ns: u64) -> Option<u64> {
        match state {
            PrintedState::CoRunning { start_ns } => Some(start_ns.saturating_add(self.budget_ns)),
            PrintedState::Normal => Some(now_ns + 1),
            PrintedState::NewPeriod => None,
        }
    }
}
