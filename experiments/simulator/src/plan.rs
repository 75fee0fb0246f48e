//! Plans batch work for machines that are only simulated.
//!
//! For each policy, this module searches for the highest budget that meets the SLO. All candidates
//! get the same requests, from the same seed. So their outcomes differ because of the budget, not
//! because of chance.

use elfen_rt::policy::Policy;
use elfen_rt::policy::slo::Slo;

use crate::Model;
use crate::outcome::Outcome;
use crate::pair::{Control, REF_IPC_MILLI, Signal};
use crate::source::Requests;
use crate::time::{nanoseconds, real};
use crate::windows::Watch;

/// The condition that an outcome has to meet.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Goal {
    /// The SLO holds over the whole simulation.
    Overall(Slo),
    /// The SLO holds in at least this part of the windows.
    Windows { slo: Slo, part: f64 },
}

impl Goal {
    pub fn slo(&self) -> Slo {
        match *self {
            Self::Overall(slo) | Self::Windows { slo, .. } => slo,
        }
    }

    pub fn is_met(&self, outcome: &Outcome) -> bool {
        match *self {
            Self::Overall(slo) => outcome.tail_ns(&slo) <= slo.latency_ns,
            Self::Windows { part, .. } => outcome.held_fraction() >= part,
        }
    }
}

/// The policies whose budget the user sets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Budgeted {
    Fixed,
    Refresh,
    Dynamic,
}

impl Budgeted {
    pub const ALL: [Self; 3] = [Self::Fixed, Self::Refresh, Self::Dynamic];

    /// Whether the policy can lend more than borrow-idle with this signal. Without a service's
    /// page, only fixed-budget can.
    pub fn works_by(self, signal: Signal) -> bool {
        signal == Signal::Service || self == Self::Fixed
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Fixed => "fixed-budget",
            Self::Refresh => "refresh-budget",
            Self::Dynamic => "dynamic-budget",
        }
    }

    pub fn with(self, budget_ns: u64) -> Policy {
        match self {
            Self::Fixed => Policy::FixedBudget { budget_ns },
            Self::Refresh => Policy::RefreshBudget { budget_ns },
            Self::Dynamic => Policy::DynamicBudget { budget_ns, ref_ipc_milli: REF_IPC_MILLI },
        }
    }
}

/// The search ends when it knows the budget to within the SLO's latency divided by this number.
const RESOLUTION: u64 = 128;

/// Returns the highest budget with which `policy` meets the goal, and its outcome. Returns `None`
/// if even a budget of 0 does not meet the goal.
///
/// Budgets above the SLO's latency are not tried, because a request that has run for this long is
/// late already.
pub fn highest_safe_budget(model: &Model, policy: Budgeted, goal: &Goal) -> Option<(u64, Outcome)> {
    let outcome_of = |budget_ns| run(model, Control::Policy(policy.with(budget_ns)));
    let most_ns = goal.slo().latency_ns;
    let most = outcome_of(most_ns);
    if goal.is_met(&most) {
        return Some((most_ns, most));
    }
    let (mut safe, mut unsafe_ns) = ((0, outcome_of(0)), most_ns);
    if !goal.is_met(&safe.1) {
        return None;
    }
    while unsafe_ns - safe.0 > most_ns.div_ceil(RESOLUTION) {
        let middle_ns = safe.0 + (unsafe_ns - safe.0) / 2;
        let outcome = outcome_of(middle_ns);
        if goal.is_met(&outcome) {
            safe = (middle_ns, outcome);
        } else {
            unsafe_ns = middle_ns;
        }
    }
    Some(safe)
}

/// Simulates the requests of the model with another control.
pub fn run(model: &Model, control: Control) -> Outcome {
    let mut model = model.clone();
    model.control = control;
    model.run()
}

/// Searches for the highest factor on the model's rates, up to `most`, with which `is_met` accepts
/// the outcome. The result is exact to a thousandth of `most`. Returns `None` for a trace, whose
/// arrivals are fixed.
pub fn highest_load(model: &Model, most: f64, is_met: impl Fn(&Outcome) -> bool) -> Option<f64> {
    let Requests::Drawn { load, demand } = &model.requests else { return None };
    let met_at = |factor: f64| {
        let mut model = model.clone();
        model.requests = Requests::Drawn { load: load.scaled(factor), demand: demand.clone() };
        is_met(&model.run())
    };
    // Above this factor, the queue would grow without limit, and with it the simulator's memory.
    let saturated = real(model.cores) * 1e9 / (load.mean_rps() * demand.mean_ns());
    let most = most.min(saturated);
    let (mut low, mut high) = (0.0, most);
    while high - low > most / 1000.0 {
        let middle = (low + high) / 2.0;
        if met_at(middle) { low = middle } else { high = middle }
    }
    Some(low)
}

/// Returns how many machines a batch load needs in addition to the capacity that the service's
/// machines lend under `outcome`.
///
/// `load_cores` is the batch load: the number of cores that it would keep busy all the time, with
/// one lane of each.
pub fn machines_besides(model: &Model, outcome: &Outcome, load_cores: f64) -> u64 {
    let cores = real(model.cores);
    let lent = outcome.batch_work(&model.batch) * cores * real(model.machines);
    nanoseconds(((load_cores - lent) / cores).max(0.0).ceil())
}

/// Simulates the same requests under the slo-budget controller.
pub fn steered(model: &Model, watch: Watch) -> Outcome {
    let mut model = model.clone();
    model.watch = Some(watch);
    model.control = Control::Policy(Policy::SloBudget { budget_ns: 0, until_ns: 0 });
    model.run()
}
