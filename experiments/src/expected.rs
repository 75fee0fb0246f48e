//! Predicts the results of live runs: simulates the same service, load, batch and scenarios.
//!
//! The model of a live run of one pair is one core with a queue of its own. `elfen-load` sends
//! requests at exponentially distributed intervals, whether or not the service keeps up. One worker
//! serves them in the order of arrival.
//!
//! All scenarios of an invocation get the same requests at the same times. The simulation gets
//! exactly these requests too. With other random requests, two tails of some hundred requests
//! differ by chance, and this difference is far larger than the effect of a policy.
//!
//! The service time of each simulated request is the time that it worked in the measured run,
//! without what the emulated core added. So the prediction includes the speed of the machine in
//! this run. Between two runs, a virtual machine may be faster or slower by a fifth, whatever the
//! scenario is.
//!
//! The generator also measures its own way to the service and back, which the simulation leaves
//! out. So a measured ratio of two tails is closer to 1 than the simulated ratio. The shorter the
//! requests are, the larger this difference is.

use elfen_rt::policy::Policy;
use elfen_rt::policy::slo::Slo;
use serde::Serialize;

use crate::live::plan::Spec;
use crate::live::summary::{Foreseen, Row, figure};
use crate::record::{Line, Plan, Run, Scenario, Setup, runs};
use crate::report::timeline;
use simulator::batches::{CHECKS, GUARD};
use simulator::outcome::{Outcome, Summary};
use simulator::pair::{Batch, Control, REF_IPC_MILLI, Signal};
use simulator::plan;
use simulator::source::{Requests, Until};
use simulator::time::{MS, S, nanoseconds, real};
use simulator::trace::Served;
use simulator::windows::Watch;
use simulator::{Model, Queue};

/// The prediction for one scenario.
#[derive(Clone, Debug, Serialize)]
pub struct Expected {
    pub scenario: String,
    /// The p99, as a multiple of the p99 of the same requests without a batch.
    pub p99_to_none: f64,
    #[serde(flatten)]
    pub summary: Summary,
}

/// Simulates the requests of `service` in each scenario. Returns `None` if the model does not
/// support one of the scenarios.
pub fn expected(service: &Model, scenarios: &[Spec]) -> Option<Vec<Expected>> {
    let p99 = |outcome: &Outcome| real(outcome.quantile_ns(0.99));
    let alone = plan::run(service, Control::NoBatch);
    let beside = |scenario: &Spec| {
        let outcome = beside(service, scenario, REF_IPC_MILLI)?;
        Some(Expected {
            scenario: scenario.to_string(),
            p99_to_none: p99(&outcome) / p99(&alone),
            summary: outcome.summary(&service.batch),
        })
    };
    scenarios.iter().map(beside).collect()
}

/// Simulates the requests of `service` in a scenario, and returns the timeline of the first core.
///
/// Returns `None` if the model does not support the scenario.
pub fn timeline(
    service: &Model,
    scenario: &Spec,
    overlap: f64,
    (from, to): (u64, u64),
) -> Option<timeline::Row> {
    let model = model_beside(service, scenario, REF_IPC_MILLI)?;
    // The request before the first shown one decides when the batch may run.
    let (mut before, mut shown) = (None, Vec::new());
    model.run_into(&mut |served: &Served| match served {
        Served { core: 0, ended_ns, .. } if *ended_ns < from => before = Some(*served),
        Served { core: 0, started_ns, .. } if *started_ns < to => shown.push(*served),
        _ => {}
    });
    let served: Vec<Served> = before.into_iter().chain(shown).collect();
    Some(timeline::Row::of(&scenario.to_string(), overlap, &served, model.batch.wake_ns, to))
}

/// Adds the model's prediction to each row of an experiment on an emulated core. Only one pair with
/// one batch lane can be modelled.
pub fn foresee(rows: &mut [Row], lines: &[Line]) {
    let setup = lines.iter().find_map(|line| match line {
        Line::Setup(setup) => Some(setup),
        Line::Run(_) => None,
    });
    let Some(setup @ Setup { plan: Some(plan), lanes, .. }) = setup else { return };
    let Some(factor) = plan.emulate_smt else { return };
    let is_one_pair = lanes.split(':').count() == 2 && !lanes.contains([',', '-']);
    if !is_one_pair || plan.checks.is_some() {
        return;
    }
    let core = Core { batch: emulated(factor, plan), lent_to_helpers: setup.helpers_share_a_lane };
    let runs: Vec<&Run> = runs(lines).collect();
    for row in rows {
        let of_row = |run: &&&Run| row.is_of(run) && run.scenario != Scenario::None;
        row.expected = foreseen(runs.iter().filter(of_row).filter_map(|run| {
            let is_alone = |other: &&&Run| {
                other.scenario == Scenario::None && run.met_the_same_requests(other)
            };
            core.again(run, runs.iter().find(is_alone)?)
        }));
    }
}

/// Returns how programs slow each other on an emulated core, where naps cost nothing.
///
/// The IPC of a request is known after 1.5 polling intervals of the guard. On average, the guard's
/// first poll in a request comes half an interval after its start. This poll begins a measurement
/// of the counters, and the next poll ends it.
fn emulated(factor: f64, plan: &Plan) -> Batch {
    let milli = nanoseconds(factor * 1e3);
    Batch {
        request_slowdown_milli: milli,
        batch_slowdown_milli: milli,
        nap_slowdown_milli: 1000,
        polling: CHECKS,
        signal: if plan.source == "tasks" { Signal::Tasks } else { Signal::Service },
        sleep_ns: 0,
        wake_ns: 0,
        ipc_after_ns: GUARD.every_ns() * 3 / 2,
    }
}

/// A number from the model, and the same number from a run.
#[derive(Clone, Copy, Debug)]
struct Pairing {
    foreseen: f64,
    found: f64,
}

impl Pairing {
    fn off(self) -> f64 {
        self.found / self.foreseen - 1.0
    }
}

/// The core on which the runs were measured.
struct Core {
    batch: Batch,
    /// Whether the coordinator and the load generator run on the batch lane, and so take time from
    /// the batch.
    lent_to_helpers: bool,
}

impl Core {
    /// Simulates the requests of both runs: those of `alone` without a batch, and those of `run` in
    /// its scenario. Arrivals and service times are as measured. Returns the ratio of both p99 and
    /// the utilisation of both lanes, each with its measured value.
    fn again(&self, run: &Run, alone: &Run) -> Option<[Pairing; 2]> {
        let tail_ns = |outcome: &Outcome| real(outcome.quantile_ns(0.99));
        let scenario: Spec = run.asked.parse().ok()?;
        // Without a batch, the service publishes an IPC of 1. The scenario may name another
        // reference IPC.
        let ref_ipc_milli = scenario.ref_ipc().unwrap_or(1.0) * real(REF_IPC_MILLI);
        let in_scenario = beside(&self.service(run)?, &scenario, nanoseconds(ref_ipc_milli))?;
        let without = plan::run(&self.service(alone)?, Control::NoBatch);
        let helpers = if self.lent_to_helpers { run.helper_utilisation } else { 0.0 };
        let batch_lane = in_scenario.batch_lane_utilisation();
        Some([
            Pairing {
                foreseen: tail_ns(&in_scenario) / tail_ns(&without),
                found: run.p99_ms / alone.p99_ms,
            },
            Pairing {
                foreseen: in_scenario.request_lane_utilisation()
                    + batch_lane * (1.0 - helpers.min(1.0)),
                found: run.request_lane_utilisation + run.batch_lane_utilisation,
            },
        ])
    }

    /// Returns a model of this core with the requests of a run, or `None` if the run has no
    /// requests.
    fn service(&self, run: &Run) -> Option<Model> {
        let ns = |us: f64| nanoseconds(us.max(0.0) * 1e3);
        let requests: Vec<(u64, u64)> =
            run.served.iter().map(|one| (ns(one.due_us), ns(one.work_us).max(1))).collect();
        (!requests.is_empty()).then(|| Model {
            machines: 1,
            cores: 1,
            queue: Queue::PerCore,
            requests: Requests::Trace(requests.into()),
            until: Until::Time { ns: nanoseconds(run.duration_s * real(S)).max(MS) },
            batch: self.batch,
            control: Control::NoBatch,
            watch: None,
            seed: 1,
        })
    }
}

fn foreseen(runs: impl Iterator<Item = [Pairing; 2]>) -> Option<Foreseen> {
    let (ratios, lanes): (Vec<Pairing>, Vec<Pairing>) = runs.map(|[a, b]| (a, b)).unzip();
    let over = |pairings: &[Pairing], of: fn(&Pairing) -> f64| {
        figure(&pairings.iter().map(of).collect::<Vec<_>>())
    };
    (!ratios.is_empty()).then(|| Foreseen {
        p99_ratio: over(&ratios, |pairing| pairing.foreseen),
        p99_ratio_off: over(&ratios, |pairing| pairing.off()),
        utilisation: over(&lanes, |pairing| pairing.foreseen),
        utilisation_off: over(&lanes, |pairing| pairing.off()),
    })
}

/// Returns the rule that decides when the batch runs.
///
/// Returns `None` for scenarios that the model does not support, and for a policy without its
/// budget. dynamic-budget takes `ref_ipc_milli` as the IPC of the service without a batch.
pub fn control(scenario: Scenario, budget_ns: Option<u64>, ref_ipc_milli: u64) -> Option<Control> {
    let policy = match scenario {
        Scenario::None => return Some(Control::NoBatch),
        // The batch has a lane of its own, where its priority has no effect.
        Scenario::Unrestrained | Scenario::Nice19 | Scenario::SchedIdle => {
            return Some(Control::Unrestrained);
        }
        Scenario::CoreScheduling => return None,
        Scenario::BorrowIdle => Policy::BorrowIdle,
        Scenario::FixedBudget => Policy::FixedBudget { budget_ns: budget_ns? },
        Scenario::RefreshBudget => Policy::RefreshBudget { budget_ns: budget_ns? },
        Scenario::DynamicBudget => Policy::DynamicBudget { budget_ns: budget_ns?, ref_ipc_milli },
        // The budget is 0 until the first window ends.
        Scenario::SloBudget => Policy::SloBudget { budget_ns: 0, until_ns: 0 },
    };
    Some(Control::Policy(policy))
}

/// Simulates the service's requests in a scenario.
fn beside(service: &Model, scenario: &Spec, ref_ipc_milli: u64) -> Option<Outcome> {
    Some(model_beside(service, scenario, ref_ipc_milli)?.run())
}

/// Returns the model of the service's requests in a scenario.
fn model_beside(service: &Model, scenario: &Spec, ref_ipc_milli: u64) -> Option<Model> {
    let control = control(scenario.scenario, scenario.budget_ns(), ref_ipc_milli)?;
    let watch = match scenario.scenario {
        Scenario::SloBudget => {
            let slo: Slo = scenario.slo()?.parse().ok()?;
            // In a live run, the budget is also set once per second.
            Some(Watch { slo, judge_ns: 60 * S, control_ns: Some(S) })
        }
        _ => service.watch,
    };
    Some(Model { control, watch, ..service.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::summary;
    use crate::record::Served;

    /// Returns the rows of an experiment with requests of 1 ms, one every `apart_us`, without a
    /// batch and in three scenarios. In the second invocation, all runs are disturbed and p99 is 40
    /// ms higher. In the third invocation, the machine is half as fast under borrow-idle.
    fn measured(lanes: &str, emulate_smt: Option<f64>, apart_us: f64, helpers: f64) -> Vec<Row> {
        let plan = Plan { emulate_smt, ..Plan::default() };
        let setup = Setup {
            lanes: lanes.to_owned(),
            plan: Some(plan),
            helpers_share_a_lane: helpers > 0.0,
            ..Setup::default()
        };
        let run = |scenario, asked: &str, invocation: u32, p99_ms, batch_lane_utilisation| {
            let slow = if scenario == Scenario::BorrowIdle && invocation == 3 { 2.0 } else { 1.0 };
            let request = |at| Served::from((f64::from(at) * apart_us, 1000.0 * slow, 0.0));
            Line::Run(Run {
                scenario,
                asked: asked.to_owned(),
                rps: 1.0,
                invocation,
                seed: invocation.into(),
                p99_ms: if invocation == 2 { p99_ms + 40.0 } else { p99_ms * slow },
                duration_s: apart_us * 1e-3,
                request_lane_utilisation: 1e3 / apart_us,
                batch_lane_utilisation,
                helper_utilisation: helpers,
                served: (0..1000).map(request).collect(),
                ..Run::default()
            })
        };
        let mut lines = vec![Line::Setup(setup)];
        for invocation in 1..=3 {
            lines.extend([
                run(Scenario::None, "none", invocation, 1.0, 0.0),
                run(Scenario::Unrestrained, "unrestrained", invocation, 1.5, 1.0),
                run(Scenario::BorrowIdle, "borrow-idle", invocation, 1.2, 0.9),
                run(Scenario::SloBudget, "slo-budget:p99=20ms", invocation, 1.0, 0.99),
            ]);
        }
        let mut rows = summary::rows(&lines);
        foresee(&mut rows, &lines);
        rows
    }

    fn of(rows: &[Row], scenario: Scenario) -> Option<Foreseen> {
        rows.iter().find(|row| row.scenario == scenario).unwrap().expected
    }

    /// Goal: rows have a prediction if the model supports the core, and the prediction follows the
    /// machine's speed. Method: requests of 1 ms that never wait for each other, and take 1.5 times
    /// as long next to a batch.
    #[test]
    fn rows_of_an_emulated_core_are_foreseen() {
        let rows = measured("0:1", Some(1.5), 10_000.0, 0.0);
        assert_eq!(of(&rows, Scenario::None), None, "the others are compared with it");
        let unrestrained = of(&rows, Scenario::Unrestrained).unwrap();
        assert!((unrestrained.p99_ratio.median - 1.5).abs() < 0.01, "{unrestrained:?}");
        assert!((unrestrained.utilisation.median - 1.15).abs() < 0.01, "{unrestrained:?}");
        assert!(unrestrained.p99_ratio_off.median.abs() < 0.01, "{unrestrained:?}");
        let [low, _] = unrestrained.p99_ratio_off.ci95.expect("of three invocations");
        assert!(low < -0.3, "the bad moment is in the interval: {unrestrained:?}");
        for (scenario, off) in [(Scenario::BorrowIdle, 0.2), (Scenario::SloBudget, 0.0)] {
            let foreseen = of(&rows, scenario).unwrap();
            assert!((foreseen.p99_ratio.median - 1.0).abs() < 0.01, "{foreseen:?}");
            assert!((foreseen.p99_ratio_off.median - off).abs() < 0.01, "{foreseen:?}");
        }
        for rows in
            [measured("0:1", None, 10_000.0, 0.0), measured("0:1,2:3", Some(1.5), 10_000.0, 0.0)]
        {
            assert!(rows.iter().all(|row| row.expected.is_none()), "{rows:?}");
        }
    }

    /// Goal: the model simulates the requests as they arrived, not average ones. Method: requests
    /// every 1.2 ms. They wait for each other if they take 1.5 ms, and the last one waits for a
    /// thousand times 0.3 ms.
    #[test]
    fn the_very_requests_are_met_again() {
        let rows = measured("0:1", Some(1.5), 1_200.0, 0.0);
        let unrestrained = of(&rows, Scenario::Unrestrained).unwrap();
        assert!((unrestrained.p99_ratio.median - 298.5).abs() < 3.0, "{unrestrained:?}");
    }

    /// Goal: the time of the generator and the coordinator on the batch lane does not count as the
    /// batch's. Method: they use a tenth of the lane, or nothing because they have a lane of their
    /// own.
    #[test]
    fn helpers_on_the_batch_lane_are_no_batch() {
        let idle = |helpers| {
            let rows = measured("0:1", Some(1.5), 10_000.0, helpers);
            of(&rows, Scenario::BorrowIdle).unwrap()
        };
        assert!((idle(0.0).utilisation.median - 1.0).abs() < 0.001);
        let shared = idle(0.1);
        assert!((shared.utilisation.median - (0.1 + 0.9 * 0.9)).abs() < 0.001, "{shared:?}");
        assert!((shared.utilisation_off.median - 1.0 / 0.91 + 1.0).abs() < 0.001, "{shared:?}");
    }
}
