//! A row of simulations that differ in their load.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use elfen_rt::policy::Policy;
use elfen_rt::policy::slo::Slo;

use super::parameters::Simulation;
use crate::record::Scenario;
use simulator::load::Load;
use simulator::outcome::Outcome;
use simulator::pair::{Batch, Control};
use simulator::plan::Budgeted;
use simulator::source::{Requests, Until};
use simulator::time::{MS, S, real};
use simulator::windows::Watch;
use simulator::{Model, ModelError, Queue};

/// Loads at round distances, and what a service alone makes of them.
pub(super) struct Sweep<'a> {
    simulation: &'a Simulation,
    cores: u64,
    pub(super) rates: Vec<f64>,
    pub(super) alone: Vec<Outcome>,
}

/// A line ends where its tail is beyond this many SLOs: what follows would press the rest flat.
const TAIL_SLOS: u64 = 2;

impl<'a> Sweep<'a> {
    /// `steps` loads up to about `part` of what the cores can serve.
    pub(super) fn new(
        simulation: &'a Simulation,
        cores: u64,
        steps: u32,
        part: f64,
    ) -> Result<Self, ModelError> {
        let capacity = real(cores) * 1e9 / simulation.parameters.demand.mean_ns();
        let step = one_digit(capacity * part / f64::from(steps));
        let rates: Vec<f64> = (1..=steps).map(|index| step * f64::from(index)).collect();
        let mut sweep = Self { simulation, cores, rates, alone: Vec::new() };
        for (_, batch) in &simulation.parameters.batches {
            let model = |&rps: &f64| sweep.model(rps, batch, Control::NoBatch);
            sweep.rates.iter().try_for_each(|rps| model(rps).validate())?;
        }
        let (_, batch) = &simulation.parameters.batches[0];
        sweep.alone = sweep.run(batch, |_| Control::NoBatch);
        Ok(sweep)
    }

    pub(super) fn model(&self, rps: f64, batch: &Batch, control: Control) -> Model {
        let demand = self.simulation.parameters.demand.clone();
        Model {
            machines: 1,
            cores: self.cores,
            queue: Queue::Shared,
            requests: Requests::Drawn { load: Load::steady(rps), demand },
            until: Until::Requests(self.simulation.requests),
            batch: *batch,
            control,
            watch: None,
            seed: self.simulation.seed,
        }
    }

    /// The rates under one hand, on as many threads as there are.
    pub(super) fn run(&self, batch: &Batch, control: impl Fn(usize) -> Control) -> Vec<Outcome> {
        let model = |(index, &rps)| self.model(rps, batch, control(index));
        all(&self.rates.iter().enumerate().map(model).collect::<Vec<_>>())
    }

    /// The rates beside a batch under a policy, or none. Budgets are the thesis's: the SLO less the
    /// tail of the service alone.
    pub(super) fn with(&self, scenario: Scenario, batch: &Batch, slo: Slo) -> Vec<Outcome> {
        let headroom_ns =
            |index: usize| slo.latency_ns.saturating_sub(self.alone[index].tail_ns(&slo));
        let budgeted = |kind: Budgeted| move |index| Control::Policy(kind.with(headroom_ns(index)));
        match scenario {
            Scenario::None => self.alone.clone(),
            Scenario::FixedBudget => self.run(batch, budgeted(Budgeted::Fixed)),
            Scenario::RefreshBudget => self.run(batch, budgeted(Budgeted::Refresh)),
            Scenario::DynamicBudget => self.run(batch, budgeted(Budgeted::Dynamic)),
            Scenario::SloBudget => self.steered(batch, slo),
            Scenario::BorrowIdle => self.run(batch, |_| Control::Policy(Policy::BorrowIdle)),
            Scenario::Unrestrained
            | Scenario::Nice19
            | Scenario::SchedIdle
            | Scenario::CoreScheduling => self.run(batch, |_| Control::Unrestrained),
        }
    }

    /// Judged every minute, steered every second, as `elfen lab simulate` does unless told
    /// otherwise.
    fn steered(&self, batch: &Batch, slo: Slo) -> Vec<Outcome> {
        let watch = Watch { slo, judge_ns: 60 * S, control_ns: Some(S) };
        let start = Control::Policy(Policy::SloBudget { budget_ns: 0, until_ns: 0 });
        let model = |&rps: &f64| Model { watch: Some(watch), ..self.model(rps, batch, start) };
        all(&self.rates.iter().map(model).collect::<Vec<_>>())
    }

    /// How many of the outcomes can be drawn beside each other.
    pub(super) fn drawable(&self, outcomes: &[Outcome]) -> usize {
        let most_ns = self.simulation.parameters.slo_ms * MS * TAIL_SLOS;
        let fits = |outcome: &&Outcome| outcome.quantile_ns(0.99) <= most_ns;
        outcomes.iter().take_while(fits).count()
    }
}

/// Runs models that each need one thread, in parallel; the outcomes are in the order of the models.
fn all(models: &[Model]) -> Vec<Outcome> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        // Relaxed: the counter hands out numbers and publishes nothing.
        while let Some((index, model)) = {
            let index = next.fetch_add(1, Ordering::Relaxed);
            models.get(index).map(|model| (index, model))
        } {
            done.push((index, model.run_on(1)));
        }
        done
    };
    let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let mut outcomes = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let done = workers
            .into_iter()
            .flat_map(|worker| worker.join().expect("a simulation does not panic"));
        done.collect::<Vec<_>>()
    });
    outcomes.sort_by_key(|(index, _)| *index);
    outcomes.into_iter().map(|(_, outcome)| outcome).collect()
}

/// The nearest number with one digit that isn't 0.
fn one_digit(value: f64) -> f64 {
    let power = 10_f64.powf(value.log10().floor());
    (value / power).round() * power
}
