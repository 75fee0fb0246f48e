//! What a policy is handed, what it remembers, and what it decides.

/// What a check sees of its request lane. All of it comes from other processes: any value is
/// possible.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sample {
    pub busy: bool,
    /// When the lane turned busy, by the kernel's clock; `None` while it idles, or if it is not
    /// timed.
    pub busy_since_ns: Option<u64>,
    /// `None` if no service publishes its requests on this lane, or the one that did is dead.
    pub service: Option<Service>,
    /// Instructions per thousand cycles of the running request, lately; `None` if nothing counts
    /// them.
    pub ipc_milli: Option<u64>,
}

/// What the service publishes about a request lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Service {
    pub queue_len: u64,
    /// 0 if none runs; different for any two requests in a row.
    pub running_request: u64,
    /// When it started; 0 if the service does not say.
    pub request_started_ns: u64,
    /// Requests finished on this lane so far; constant if the service does not count.
    pub finished: u64,
}

/// What one batch lane remembers from check to check: the figure's `lane_status`, `start_stamp` and
/// `last_request`.
///
/// The same for all policies, so that the policy can change between two checks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum State {
    /// NORMAL: no budget until the lane has been idle with an empty queue.
    #[default]
    Spent,
    /// NEW_PERIOD: at `idle_ns` the lane was idle and the queue empty.
    Fresh { idle_ns: u64, finished: u64 },
    /// CO_RUNNING: the budget counts from `since_ns`, and was given for `request` (0: not begun
    /// yet), which started after `finished` others.
    Sharing { request: u64, since_ns: u64, finished: u64 },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    Run,
    Nap,
}

/// The state as four words, for memory that several batch threads share: the figure keeps it per
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

/// Any words are a state: nonsense is one without a budget.
impl From<[u64; 4]> for State {
    fn from(words: [u64; 4]) -> Self {
        match words {
            [1, idle_ns, finished, _] => Self::Fresh { idle_ns, finished },
            [2, since_ns, finished, request] => Self::Sharing { request, since_ns, finished },
            _ => Self::Spent,
        }
    }
}
