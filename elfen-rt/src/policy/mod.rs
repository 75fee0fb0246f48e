//! The policies of Figure 5.9: at a check, does the batch thread run or nap?
//!
//! Each is a pure function `(state, lane, now) -> (state, Run | Nap)`: no clock, no I/O, no unsafe,
//! no floating point, and no panic on any input, because the same code runs in the check's slow
//! path inside other people's processes, in the simulator, and under property tests. Module `lane`
//! samples, module `nap` naps.
//!
//! Where the figure leaves a choice, or its code and its text differ, this is what we do, and why:
//!
//! - The check that finds the budget expired naps; in the figure it is the next one. Checks can be
//!   milliseconds apart, and a budget of 0 is `borrow-idle` this way.
//! - A budget counts from the start of the request as published, but not from before the last idle
//!   check: the lanes have shared since then, and a thread that looks late only has less left.
//!   Where no start is published it counts from the first check that sees the request, as in the
//!   figure.
//! - `fixed-budget` lends to the first request after the idle moment alone, as the thesis's text
//!   says. The figure's code goes on with the next request while the budget lasts; but that one has
//!   waited, and pays for what the first suffered besides its own share.
//! - Requests came and went between an idle check and the first busy one (the finished counter
//!   tells): the running one may have waited. No budget under `fixed-budget`; under
//!   `refresh-budget` one if the queue is empty.
//! - `refresh-budget` sees a new request while others queue, and the queue drains later (several
//!   workers on one queue): the new budget counts from the start of that request. From the drain,
//!   as in the figure, one request could be shared for almost two budgets.
//! - An IPC at or above the reference, and a reference of 0: see [`dynamic`].
//! - The lane idles but the queue is not empty: run and change nothing, as in the figure. The next
//!   request has waited.
//! - The lane is busy but no request runs (a kernel thread, a worker between two requests): 0 is no
//!   request, so it begins no period and ends none.
//! - No service publishes a queue: `borrow-idle`, as "the queue is empty" would be a guess. Not so
//!   `fixed-budget`, which then gives each busy period of the lane one budget: see [`fixed`].
//! - A verdict to nap holds until the lane idles, under every policy: a spent budget is not given
//!   back while the lane is busy. So a thread that naps has one word to wait for.
//! - Time goes backwards: the period then counts from the earlier time.
#![forbid(unsafe_code)]

pub mod borrow_idle;
pub mod dynamic;
pub mod fixed;
mod period;
pub mod refresh;
pub mod slo;
mod state;

#[cfg(test)]
mod history;
#[cfg(test)]
mod laws;

pub use state::{Sample, Service, State, Verdict};

/// A policy with its parameters, as the control page has them at this check.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Policy {
    BorrowIdle,
    FixedBudget {
        budget_ns: u64,
    },
    RefreshBudget {
        budget_ns: u64,
    },
    DynamicBudget {
        budget_ns: u64,
        /// Instructions per thousand cycles of a request that has the core to itself.
        ref_ipc_milli: u64,
    },
    /// The budget as [`slo::Controller`] has set it, and until when that counts: a controller that
    /// died must not leave a budget behind.
    SloBudget {
        budget_ns: u64,
        until_ns: u64,
    },
}

impl Policy {
    /// The decision of one check.
    #[inline]
    pub fn check(&self, state: State, lane: &Sample, now_ns: u64) -> (State, Verdict) {
        let budget_ns = self.budget_ns(lane, now_ns);
        match self {
            Self::BorrowIdle => (State::Spent, borrow_idle::check(lane)),
            Self::FixedBudget { .. } => fixed::check(state, budget_ns, lane, now_ns),
            Self::RefreshBudget { .. } | Self::DynamicBudget { .. } | Self::SloBudget { .. } => {
                refresh::check(state, budget_ns, lane, now_ns)
            }
        }
    }

    /// When a batch thread that was told to run on a busy lane must look again, if it sees nothing
    /// change until then.
    ///
    /// For timers, and for the simulator, which jumps there. `None` if the budget is not running.
    #[inline]
    pub fn deadline_ns(&self, state: State, lane: &Sample, now_ns: u64) -> Option<u64> {
        let State::Sharing { since_ns, .. } = state else { return None };
        let spent_ns = since_ns.saturating_add(self.budget_ns(lane, now_ns));
        Some(match *self {
            Self::SloBudget { until_ns, .. } => spent_ns.min(until_ns),
            _ => spent_ns,
        })
    }

    /// How long a batch thread may share with a request, by what is known now.
    #[inline]
    fn budget_ns(&self, lane: &Sample, now_ns: u64) -> u64 {
        match *self {
            Self::BorrowIdle => 0,
            Self::FixedBudget { budget_ns } | Self::RefreshBudget { budget_ns } => budget_ns,
            Self::DynamicBudget { budget_ns, ref_ipc_milli } => {
                dynamic::real_budget_ns(budget_ns, ref_ipc_milli, lane.ipc_milli)
            }
            Self::SloBudget { budget_ns, until_ns } if now_ns < until_ns => budget_ns,
            Self::SloBudget { .. } => 0,
        }
    }
}
