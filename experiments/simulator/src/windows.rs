//! Splits a simulation into time windows. In each window, the SLO is either met or missed. After
//! each window, the controller of `slo-budget` sets the budget.
//!
//! The controller gets the same input as from the service's page: the requests that finished in the
//! window, in the buckets of that page's histogram. A new budget applies from the next request on.
//! In a live run, a batch thread applies it immediately, possibly in the middle of a request.

use elfen_rt::policy::Policy;
use elfen_rt::policy::slo::{Controller, Slo, Window};
use elfen_rt::signal::histogram::{BUCKETS, bucket_of};

use super::outcome::Outcome;

/// The SLO and the lengths of the windows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Watch {
    pub slo: Slo,
    /// The length of the windows that are counted as met or missed.
    pub judge_ns: u64,
    /// The length of the controller's windows; `None` without a controller.
    pub control_ns: Option<u64>,
}

/// After this many windows without a request, the controller has forgotten all earlier requests.
/// More such windows change nothing.
const SILENT_WINDOWS: u64 = 64;

/// A budget expires if the controller does not update it within this many windows.
const BUDGET_WINDOWS: u64 = 3;

#[derive(Debug)]
pub(super) struct Windows {
    watch: Watch,
    judged_until_ns: u64,
    finished: u64,
    late: u64,
    control: Option<Controlling>,
}

#[derive(Debug)]
struct Controlling {
    controller: Controller,
    window_ns: u64,
    until_ns: u64,
    counts: Box<Window>,
}

impl Windows {
    pub(super) fn new(watch: Watch) -> Self {
        let control = watch.control_ns.map(|window_ns| Controlling {
            controller: Controller::new(watch.slo),
            window_ns,
            until_ns: window_ns,
            counts: Box::new([0; BUCKETS]),
        });
        Self { watch, judged_until_ns: watch.judge_ns, finished: 0, late: 0, control }
    }

    /// Counts a finished request. Requests are passed in the order in which they end.
    #[inline]
    pub(super) fn finished(&mut self, ended_ns: u64, latency_ns: u64, outcome: &mut Outcome) {
        if ended_ns >= self.judged_until_ns {
            // Windows in between have no request, and are not counted.
            self.judge(outcome);
            self.judged_until_ns = (ended_ns / self.watch.judge_ns + 1) * self.watch.judge_ns;
        }
        self.finished += 1;
        self.late += u64::from(latency_ns > self.watch.slo.latency_ns);
        if let Some(control) = &mut self.control {
            control.counts[bucket_of(latency_ns)] += 1;
        }
    }

    /// Counts the window that has ended, and whether it met the SLO.
    pub(super) fn judge(&mut self, outcome: &mut Outcome) {
        let allowed =
            u128::from(1_000_000 - self.watch.slo.per_million) * u128::from(self.finished);
        outcome.windows += u64::from(self.finished > 0);
        let held = u128::from(self.late) * 1_000_000 <= allowed;
        outcome.windows_held += u64::from(self.finished > 0 && held);
        (self.finished, self.late) = (0, 0);
    }

    /// Returns the new policy, if a window has ended since the last call.
    #[inline]
    pub(super) fn policy_at(&mut self, now_ns: u64) -> Option<Policy> {
        let control = self.control.as_mut().filter(|control| now_ns >= control.until_ns)?;
        let mut budget_ns = control.controller.window(Some(&control.counts));
        control.counts.fill(0);
        control.until_ns += control.window_ns;
        let more = |past_ns: u64| past_ns / control.window_ns + 1;
        let silent = now_ns.checked_sub(control.until_ns).map_or(0, more);
        for _ in 0..silent.min(SILENT_WINDOWS) {
            budget_ns = control.controller.window(Some(&control.counts));
        }
        control.until_ns = (now_ns / control.window_ns + 1) * control.window_ns;
        let until_ns = control.until_ns + BUDGET_WINDOWS * control.window_ns;
        Some(Policy::SloBudget { budget_ns, until_ns })
    }
}
