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
use crate::live::summary::{Foreseen, Row};
use crate::record::{Company, Line, Plan, Run, Setup};
use simulator::batches::CHECKS;
use simulator::demand::Demand;
use simulator::load::Load;
use simulator::outcome::Outcome;
use simulator::pair::{Batch, Control, Signal};
use simulator::plan::{self, Budgeted};
use simulator::source::{Requests, Until};
use simulator::time::{MS, S, nanoseconds, real};
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

/// Beside each row of an experiment on an emulated core, what the model makes of it. Only one pair
/// of one batch lane is a core of the model.
pub fn foresee(rows: &mut [Row], lines: &[Line]) {
    let setup = lines.iter().find_map(|line| match line {
        Line::Setup(setup) => Some(setup),
        Line::Run(_) => None,
    });
    let Some(Setup { plan: Some(plan), lanes, .. }) = setup else { return };
    let Some(factor) = plan.emulate_smt else { return };
    let is_one_pair = lanes.split(':').count() == 2 && !lanes.contains([',', '-']);
    if !is_one_pair || plan.inject.is_some() {
        return;
    }
    for row in rows {
        let of_its_rate = |line: &Line| match line {
            Line::Run(run) if (run.rps - row.rps).abs() <= row.rps * 1e-9 => times_ns(run),
            _ => Vec::new(),
        };
        let service_ns: Vec<u64> = lines.iter().flat_map(of_its_rate).collect();
        row.expected = match service_ns.is_empty() {
            true => None,
            false => foreseen(row, plan, service(service_ns, row.rps, emulated(factor, plan))),
        };
    }
}

fn times_ns(run: &Run) -> Vec<u64> {
    run.service_us.iter().map(|us| nanoseconds(us * 1e3)).collect()
}

/// What programs on an emulated core do to each other: naps cost nothing there.
fn emulated(factor: f64, plan: &Plan) -> Batch {
    let milli = nanoseconds(factor * 1e3);
    Batch {
        request_slowdown_milli: milli,
        batch_slowdown_milli: milli,
        nap_slowdown_milli: 1000,
        looks: CHECKS,
        signal: if plan.signal == "tasks" { Signal::Tasks } else { Signal::Service },
        sleep_ns: 0,
        wake_ns: 0,
    }
}

fn foreseen(row: &Row, plan: &Plan, mut service: Model) -> Option<Foreseen> {
    let company: Spec = row.asked.parse().ok()?;
    if company.company == Company::SloBudget {
        // It begins without a budget, and a run ends long before it has learned one.
        service.machines = 200;
        let ns = nanoseconds((plan.warmup_s + plan.duration_s) * real(S));
        service.until = Until::Time { ns: ns.max(MS) };
    }
    let expected = expected(&service, &[company])?;
    let [Expected { p99_to_none, outcome, .. }] = expected.as_slice() else { return None };
    Foreseen::new(*p99_to_none, outcome.utilisation(), row)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::summary;

    fn measured(lanes: &str, emulate_smt: Option<f64>) -> Vec<Row> {
        let plan = Plan { emulate_smt, duration_s: 4.0, ..Plan::default() };
        let setup = Setup { lanes: lanes.to_owned(), plan: Some(plan), ..Setup::default() };
        let run = |company, asked: &str, p99_ms, batch_lane_utilisation| {
            let service_us = match company {
                Company::None => vec![1000.0; 1000],
                _ => Vec::new(),
            };
            Line::Run(Run {
                company,
                asked: asked.to_owned(),
                rps: 1.0,
                p99_ms,
                request_lane_utilisation: 0.001,
                batch_lane_utilisation,
                service_us,
                ..Run::default()
            })
        };
        let lines = [
            Line::Setup(setup),
            run(Company::None, "none", 1.0, 0.0),
            run(Company::Unrestrained, "unrestrained", 1.5, 1.0),
            run(Company::BorrowIdle, "borrow-idle", 1.2, 0.99),
            run(Company::SloBudget, "slo-budget:p99=20ms", 1.0, 0.99),
        ];
        let mut rows = summary::rows(&lines);
        foresee(&mut rows, &lines);
        rows
    }

    /// Goal: what the model says stands beside what was measured, where the model knows the core.
    /// Method: requests of 1 ms that hardly ever meet, by hand 1.5 times as long beside a batch.
    #[test]
    fn rows_of_an_emulated_core_are_foreseen() {
        let rows = measured("0:1", Some(1.5));
        let of = |company| rows.iter().find(|row| row.company == company).unwrap().expected;
        assert_eq!(of(Company::None), None, "it is what the others are held against");
        let unrestrained = of(Company::Unrestrained).unwrap();
        assert!((unrestrained.p99_ratio - 1.5).abs() < 0.03, "{unrestrained:?}");
        assert!((unrestrained.utilisation - 1.0015).abs() < 0.005, "{unrestrained:?}");
        assert!(unrestrained.p99_ratio_off.abs() < 0.03, "{unrestrained:?}");
        for (company, off) in [(Company::BorrowIdle, 0.2), (Company::SloBudget, 0.0)] {
            let foreseen = of(company).unwrap();
            assert!((foreseen.p99_ratio - 1.0).abs() < 0.01, "{foreseen:?}");
            assert!((foreseen.p99_ratio_off - off).abs() < 0.01, "{foreseen:?}");
        }
        for rows in [measured("0:1", None), measured("0:1,2:3", Some(1.5))] {
            assert!(rows.iter().all(|row| row.expected.is_none()), "{rows:?}");
        }
    }
}
