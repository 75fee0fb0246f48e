//! The input, the state and the output of a policy.

/// A check's sample of its request lane. All values come from other processes, so any value is
/// possible.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sample {
    pub busy: bool,
    /// When the lane turned busy, by the kernel's clock. `None` while the lane idles, or if it is
    /// not timed.
    pub busy_since_ns: Option<u64>,
    /// `None` if no living service publishes its requests on this lane.
    pub service: Option<Service>,
    /// Recent instructions per thousand cycles of the running request; `None` if nothing counts
    /// them.
    pub ipc_milli: Option<u64>,
}

/// The words that a service publishes about a request lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Service {
    pub queue_len: u64,
    /// 0 if no request runs; different for any two consecutive requests.
    pub running_request: u64,
    /// When the running request started; 0 if the service does not publish this.
    pub request_started_ns: u64,
    /// Requests finished on this lane so far; constant if the service does not count.
    pub finished: u64,
}

/// A batch lane's state between checks: the figure's `lane_status`, `start_stamp` and
/// `last_request`.
///
/// All policies have the same state, so that the policy can change between two checks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum State {
    /// NORMAL: no budget until the lane has been idle with an empty queue.
    #[default]
    Spent,
    /// NEW_PERIOD: at `idle_ns` the lane was idle and the queue empty.
    Fresh { idle_ns: u64, finished: u64 },
    /// CO_RUNNING: the budget counts from `since_ns` and belongs to `request` (0: no request has
    /// begun yet), which started after `finished` other requests.
    Sharing { request: u64, since_ns: u64, finished: u64 },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    Run,
    Nap,
}

/// The state as four words, for memory that several batch threads share. The figure keeps it per
/// CPU.
impl From<State> for [u64; 4] {
    fn from(state: State) -> Self {
        match state {
            State::Spent => [0; 4],
            State::Fresh { idle_ns, finished } => [1, idle_ns, finished, 0],
            State::Sharing { request, since_ns, finished } => [2, since_ns, finished, request],
        }
    }
}

/// Any words are a state. Invalid words are a state without a budget.
impl From<[u64; 4]> for State {
    fn from(words: [u64; 4]) -> Self {
        match words {
            [1, idle_ns, finished, _] => Self::Fresh { idle_ns, finished },
            [2, since_ns, finished, request] => Self::Sharing { request, since_ns, finished },
            _ => Self::Spent,
        }
    }
}
