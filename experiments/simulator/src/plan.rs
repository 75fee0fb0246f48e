//! Plans batch work for machines that are only simulated.
//!
//! For each policy, the highest budget that meets the SLO is searched. All candidates get the same
//! requests, from the same seed, so that outcomes differ by the budget and not by chance.

use elfen_rt::policy::Policy;
use elfen_rt::policy::slo::Slo;

use crate::Model;
use crate::outcome::Outcome;
use crate::pair::{Control, REF_IPC_MILLI, Signal};
use crate::source::Requests;
use crate::time::{nanoseconds, real};
use crate::windows::Watch;

/// What an outcome has to meet.
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

/// The policies with a fixed budget from the user.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Budgeted {
    Fixed,
    Refresh,
    Dynamic,
}

impl Budgeted {
    pub const ALL: [Self; 3] = [Self::Fixed, Self::Refresh, Self::Dynamic];

    /// Whether it can lend more than borrow-idle with this signal. Without a service's page, only
    /// fixed-budget can.
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

/// The search ends once the budget is known to this fraction of the SLO's latency.
const RESOLUTION: u64 = 128;

/// The highest budget with which `policy` meets the goal, and its outcome; `None` if even a budget
/// of 0 does not meet it.
///
/// Budgets above the SLO's latency are not tried: a request that has run that long is late already.
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

/// Simulates the model's requests under another control.
pub fn run(model: &Model, control: Control) -> Outcome {
    let mut model = model.clone();
    model.control = control;
    model.run()
}

/// The highest factor on the model's rates, up to `most`, with which the outcome meets `is_met`; to
/// a thousandth of `most`. `None` for a trace, which has fixed arrivals.
pub fn highest_load(model: &Model, most: f64, is_met: impl Fn(&Outcome) -> bool) -> Option<f64> {
    let Requests::Drawn { load, demand } = &model.requests else { return None };
    let met_at = |factor: f64| {
        let mut model = model.clone();
        model.requests = Requests::Drawn { load: load.scaled(factor), demand: demand.clone() };
        is_met(&model.run())
    };
    // Above this factor the queue grows without bound, also in the simulator's memory.
    let saturated = real(model.cores) * 1e9 / (load.mean_rps() * demand.mean_ns());
    let most = most.min(saturated);
    let (mut low, mut high) = (0.0, most);
    while high - low > most / 1000.0 {
        let middle = (low + high) / 2.0;
        if met_at(middle) { low = middle } else { high = middle }
    }
    Some(low)
}

/// The machines that a batch load needs in addition to the capacity lent by the service's machines
/// under `outcome`.
///
/// `load_cores` is the batch load in cores that it would keep busy all the time, with one lane
/// each.
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
