//! The policies of Figure 5.9: they decide at a check whether the batch thread runs or naps.
//!
//! Each policy is a pure function `(state, lane, now) -> (state, Run | Nap)`: no clock, no I/O, no
//! unsafe, no floating point, and no panic on any input. The same code runs in the slow path of
//! checks inside other people's processes, in the simulator, and under property tests. Module
//! `lane` samples, and module `nap` naps.
//!
//! Where the figure leaves a choice, or its code and its text differ, this code decides as follows:
//!
//! - Budget expired: the check that finds this naps; in the figure the next check does. Checks can
//!   be milliseconds apart, and this way a budget of 0 is `borrow-idle`.
//! - Start of a budget: it counts from the published start of the request, but not from before the
//!   last idle check. The lanes have shared the core since the start, so a thread that checks late
//!   has less left. If no start is published, the budget counts from the first check that sees the
//!   request, as in the figure.
//! - `fixed-budget` gives a budget only to the first request after an idle moment, as the thesis's
//!   text says. In the figure's code, the next request continues the budget. But that request has
//!   waited, so it would pay for the first request's delay as well as for its own.
//! - Requests came and went between an idle check and the first busy check (the finished counter
//!   shows this): the running request may have waited. It gets no budget under `fixed-budget`.
//!   Under `refresh-budget` it gets a budget if the queue is empty.
//! - `refresh-budget` sees a new request while others queue, and the queue drains later (several
//!   workers serve one queue): the new budget counts from the start of that request. If it counted
//!   from the drain, as in the figure, one request could be shared for almost two budgets.
//! - An IPC at or above the reference, and a reference of 0: see [`dynamic`].
//! - The lane idles but the queue is not empty: the batch runs and the state stays, as in the
//!   figure. The next request has waited.
//! - The lane is busy but no request runs (a kernel thread runs, or a worker is between two
//!   requests): this begins no period and ends none.
//! - No service publishes a queue: the policy is `borrow-idle`, because an empty queue would be a
//!   guess. Only `fixed-budget` gives each busy period of the lane one budget: see [`fixed`].
//! - A verdict to nap holds until the lane idles, under every policy: a spent budget is not renewed
//!   while the lane is busy. So a thread that naps has only one word to wait for.
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

/// A policy with its parameters, as the control page holds them at this check.
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
    /// The budget that [`slo::Controller`] has set. It is 0 from `until_ns` on, so that a
    /// controller that dies leaves no budget behind.
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

    /// When a batch thread that runs on a busy lane must check again, if nothing changes until
    /// then. `None` if no budget is running.
    ///
    /// Timers use this, and the simulator, which jumps to that time.
    #[inline]
    pub fn deadline_ns(&self, state: State, lane: &Sample, now_ns: u64) -> Option<u64> {
        let State::Sharing { since_ns, .. } = state else { return None };
        let spent_ns = since_ns.saturating_add(self.budget_ns(lane, now_ns));
        Some(match *self {
            Self::SloBudget { until_ns, .. } => spent_ns.min(until_ns),
            _ => spent_ns,
        })
    }

    /// How long a batch thread may share the core with a request, as far as known now.
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
