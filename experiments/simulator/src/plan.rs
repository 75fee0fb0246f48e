//! What is safe on machines one does not have, and what it is worth.
//!
//! For each policy the highest budget that keeps the SLO is searched in the simulator. All
//! candidates meet the same requests (the seed is the same), so that two budgets differ by the
//! budget and not by chance.

use elfen_rt::policy::Policy;
use elfen_rt::policy::slo::Slo;

use crate::Model;
use crate::outcome::Outcome;
use crate::pair::{Control, REF_IPC_MILLI, Signal};
use crate::source::Requests;
use crate::time::{nanoseconds, real};
use crate::windows::Watch;

/// When an outcome is good enough.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Goal {
    /// The SLO holds over the whole simulation.
    Overall(Slo),
    /// The SLO holds in this part of the windows that the model watches.
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

/// The policies that take a budget from the user.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Budgeted {
    Fixed,
    Refresh,
    Dynamic,
}

impl Budgeted {
    pub const ALL: [Self; 3] = [Self::Fixed, Self::Refresh, Self::Dynamic];

    /// Whether it does more than borrow-idle where no service publishes requests.
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

/// The search ends when it knows the budget to this part of the SLO's latency.
const RESOLUTION: u64 = 128;

/// The highest budget with which `policy` meets the goal, and the outcome; `None` if even a budget
/// of 0 does not.
///
/// A budget above the SLO's latency is not tried: a request that has run for that long is late
/// already.
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

/// The model's requests under another hand.
pub fn run(model: &Model, control: Control) -> Outcome {
    let mut model = model.clone();
    model.control = control;
    model.run()
}

/// The highest factor on the model's rates at which `is_met` still holds, between 0 and `most`; to
/// a thousandth of that.
///
/// `None` for a trace, whose rates are what they are.
pub fn highest_load(model: &Model, most: f64, is_met: impl Fn(&Outcome) -> bool) -> Option<f64> {
    let Requests::Drawn { load, demand } = &model.requests else { return None };
    let met_at = |factor: f64| {
        let mut model = model.clone();
        model.requests = Requests::Drawn { load: load.scaled(factor), demand: demand.clone() };
        is_met(&model.run())
    };
    // Beyond that the queue grows without end, in the simulator's memory too.
    let saturated = real(model.cores) * 1e9 / (load.mean_rps() * demand.mean_ns());
    let most = most.min(saturated);
    let (mut low, mut high) = (0.0, most);
    while high - low > most / 1000.0 {
        let middle = (low + high) / 2.0;
        if met_at(middle) { low = middle } else { high = middle }
    }
    Some(low)
}

/// Machines of its own that a batch load needs besides what it gets done under `outcome` on the
/// service's machines.
///
/// `load_cores` is the load in cores that it would keep busy all the time, with one lane each.
pub fn machines_besides(model: &Model, outcome: &Outcome, load_cores: f64) -> u64 {
    let cores = real(model.cores);
    let lent = outcome.batch_work(&model.batch) * cores * real(model.machines);
    nanoseconds(((load_cores - lent) / cores).max(0.0).ceil())
}

/// The slo-budget controller over the same requests.
pub fn steered(model: &Model, watch: Watch) -> Outcome {
    let mut model = model.clone();
    model.watch = Some(watch);
    model.control = Control::Policy(Policy::SloBudget { budget_ns: 0, until_ns: 0 });
    model.run()
}
