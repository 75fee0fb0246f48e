//! What live runs should show if the model is right: the same service, load, batch and companies,
//! simulated.
//!
//! A live run of one pair is one core with a queue of its own: `elfen-load` sends requests at
//! exponentially distributed intervals whether or not the service keeps up, one worker serves them
//! in the order of arrival, and how long each runs alone is what the service said of a run without
//! company. What the generator sees besides (its own way to the service and back) is not in there,
//! so a live ratio of two tails is nearer to 1 than the simulated one, the more the shorter
//! requests are.

use elfen_rt::policy::Policy;
use elfen_rt::policy::slo::Slo;

use crate::live::plan::Spec;
use crate::record::Company;
use simulator::demand::Demand;
use simulator::load::Load;
use simulator::outcome::Outcome;
use simulator::pair::{Batch, Control};
use simulator::plan::{self, Budgeted};
use simulator::source::{Requests, Until};
use simulator::time::{S, real};
use simulator::windows::Watch;
use simulator::{Model, Queue};

/// One company's share of what was expected.
#[derive(Clone, Debug)]
pub struct Expected {
    pub company: Spec,
    pub outcome: Outcome,
    /// p99 as a multiple of what the same requests have alone.
    pub p99_to_none: f64,
}

impl Expected {
    /// Of the time in which requests run, the part in which the batch ran as well.
    pub fn overlapped(&self) -> f64 {
        match self.outcome.request_lane_utilisation() {
            0.0 => 0.0,
            busy => self.outcome.overlapped_fraction() / busy,
        }
    }

    /// Of the time of the batch lane, the part in which the batch ran.
    pub fn batch_lane(&self) -> f64 {
        self.outcome.borrowed_fraction() + self.outcome.overlapped_fraction()
    }
}

/// The service of a live run: one pair, requests at this rate, and the service times of a run
/// without company, of which each request takes one by chance.
pub fn service(service_ns: Vec<u64>, rps: f64, batch: Batch) -> Model {
    Model {
        machines: 1,
        cores: 1,
        queue: Queue::PerCore,
        requests: Requests::Drawn {
            load: Load::steady(rps),
            demand: Demand::Recorded { service_ns },
        },
        until: Until::Requests(1_000_000),
        batch,
        control: Control::NoBatch,
        watch: None,
        seed: 1,
    }
}

/// The requests of `service` in each company; `None` for one that the model has no rule for.
pub fn expected(service: &Model, companies: &[Spec]) -> Option<Vec<Expected>> {
    let p99 = |outcome: &Outcome| real(outcome.quantile_ns(0.99));
    let alone = plan::run(service, Control::NoBatch);
    let beside = |company: &Spec| {
        let outcome = beside(service, company)?;
        let p99_to_none = p99(&outcome) / p99(&alone);
        Some(Expected { company: company.clone(), outcome, p99_to_none })
    };
    companies.iter().map(beside).collect()
}

fn beside(service: &Model, company: &Spec) -> Option<Outcome> {
    let budgeted = |policy: Budgeted| {
        let budget_ns = company.budget_ns()?;
        Some(plan::run(service, Control::Policy(policy.with(budget_ns))))
    };
    match company.company {
        Company::None => Some(plan::run(service, Control::NoBatch)),
        // On a lane of its own no priority keeps a batch from anything.
        Company::Unrestrained | Company::Nice19 | Company::SchedIdle => {
            Some(plan::run(service, Control::Unrestrained))
        }
        Company::CoreScheduling => None,
        Company::BorrowIdle => Some(plan::run(service, Control::Policy(Policy::BorrowIdle))),
        Company::FixedBudget => budgeted(Budgeted::Fixed),
        Company::RefreshBudget => budgeted(Budgeted::Refresh),
        Company::DynamicBudget => budgeted(Budgeted::Dynamic),
        Company::SloBudget => {
            let slo: Slo = company.slo()?.parse().ok()?;
            // The keeper of a run sets the budget once a second.
            let watch = Watch { slo, judge_ns: 60 * S, control_ns: Some(S) };
            Some(plan::steered(service, watch))
        }
    }
}
