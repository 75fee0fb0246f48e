//! Figure 5.9 of the thesis by the letter: what `elfen-rt` deliberately does not do.
//!
//! The figure's code and its text differ where several requests follow each other without an idle
//! moment (see `elfen_rt::policy`). The published utilisations can only be understood with both at
//! hand.

use elfen_rt::policy::{Sample, Verdict};

/// Figure 5.9(b): once a period has begun, every request shares until the budget is over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FixedBudget {
    pub budget_ns: u64,
}

/// `lane_status` and `start_stamp`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum State {
    #[default]
    Normal,
    NewPeriod,
    CoRunning {
        start_ns: u64,
    },
}

impl FixedBudget {
    pub fn check(self, state: State, lane: &Sample, now_ns: u64) -> (State, Verdict) {
        let queue_len = lane.service.map_or(0, |service| service.queue_len);
        if !lane.busy {
            let next = if queue_len == 0 { State::NewPeriod } else { state };
            return (next, Verdict::Run);
        }
        match state {
            State::Normal => (State::Normal, Verdict::Nap),
            State::NewPeriod => (State::CoRunning { start_ns: now_ns }, Verdict::Run),
            State::CoRunning { start_ns } if now_ns.saturating_sub(start_ns) >= self.budget_ns => {
                (State::Normal, Verdict::Run)
            }
            State::CoRunning { .. } => (state, Verdict::Run),
        }
    }

    /// When the verdict changes if the lane does not: the check after the one that finds the budget
    /// spent.
    pub fn deadline_ns(self, state: State, now_ns: u64) -> Option<u64> {
        match state {
            State::CoRunning { start_ns } => Some(start_ns.saturating_add(self.budget_ns)),
            State::Normal => Some(now_ns + 1),
            State::NewPeriod => None,
        }
    }
}
