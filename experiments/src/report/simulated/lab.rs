//! What all figures of the simulator share: their simulations, and how they say what they were made
//! with.

use elfen_rt::policy::slo::Slo;

use super::parameters::{Impossible, MOST_REQUESTS, Parameters, Simulation};
use super::sweep::Sweep;
use crate::report::figure::{
    Across, Axis, Figure, Mark, Panel, Point, Rule, Series, Source, Style,
};
use simulator::pair::Batch;
use simulator::time::{MS, milliseconds, real};

/// The simulations that several figures share.
pub(super) struct Lab<'a> {
    pub(super) simulation: &'a Simulation,
    /// One core, and seven that share a queue.
    pub(super) one: Sweep<'a>,
    pub(super) seven: Sweep<'a>,
}

impl<'a> Lab<'a> {
    pub(super) fn new(simulation: &'a Simulation) -> Result<Self, Impossible> {
        if simulation.parameters.batches.is_empty() {
            return Err(Impossible::NoBatch);
        }
        if simulation.requests > MOST_REQUESTS {
            return Err(Impossible::Requests);
        }
        Ok(Self {
            simulation,
            one: Sweep::new(simulation, 1, 13, 0.78)?,
            seven: Sweep::new(simulation, 7, 11, 0.93)?,
        })
    }

    pub(super) fn parameters(&self) -> &Parameters {
        &self.simulation.parameters
    }

    /// The batch program that policies are shown with.
    pub(super) fn batch(&self) -> &(String, Batch) {
        &self.parameters().batches[0]
    }

    pub(super) fn slo(&self) -> Slo {
        Slo { per_million: 990_000, latency_ns: self.parameters().slo_ms * MS }
    }

    pub(super) fn slo_rule(&self) -> Rule {
        let slo_ms = self.parameters().slo_ms;
        Rule { y: real(slo_ms), name: format!("SLO {slo_ms} ms") }
    }

    /// Numbers that the thesis prints, if they belong here.
    pub(super) fn rings(&self, points: &[(f64, f64)]) -> Option<Series> {
        let points = points.iter().map(|&(x, y)| Point::at(x, y)).collect();
        let rings = Series::new("published in the thesis", Mark::Rings, Style::Ink, points);
        self.parameters().are_of_thesis.then_some(rings)
    }

    pub(super) fn made_with(&self) -> String {
        let Simulation { parameters, requests, seed, .. } = self.simulation;
        let (_, batch) = self.batch();
        let slower: Vec<String> = parameters.batches.iter().map(slowdown).collect();
        format!(
            "Simulated with {}: a request takes {}, and {} times as long beside a nap; a batch \
             beside a request takes {} times as long; {} µs to nap, {} µs to wake, a check every \
             {} µs. {requests} requests a point, seed {seed}.",
            parameters.origin,
            slower.join(", "),
            real(batch.nap_slowdown_milli) / 1e3,
            real(batch.batch_slowdown_milli) / 1e3,
            real(batch.sleep_ns) / 1e3,
            real(batch.wake_ns) / 1e3,
            real(batch.polling.every_ns()) / 1e3,
        )
    }

    /// The report's command and, below it, one that makes a single point.
    pub(super) fn command(&self, point: &str) -> String {
        let Simulation { command, requests, seed, .. } = self.simulation;
        let options = match self.parameters().options.as_str() {
            "" => String::new(),
            options => format!(" {options}"),
        };
        format!(
            "{command}\n# one of its points:\n\
             elfen lab simulate {point}{options} --requests {requests} --seed {seed}"
        )
    }

    pub(super) fn figure(&self, id: &str, title: &str, x: Across) -> Figure {
        Figure {
            id: format!("simulated-{id}"),
            title: title.to_owned(),
            reading: String::new(),
            source: Source::Simulated,
            made_with: self.made_with(),
            command: self.simulation.command.clone(),
            x,
            panels: Vec::new(),
        }
    }
}

fn slowdown((name, batch): &(String, Batch)) -> String {
    format!("{} times as long beside {name:?}", real(batch.request_slowdown_milli) / 1e3)
}

pub(super) fn panel(y: Axis, series: Vec<Series>) -> Panel {
    Panel { y, series, rules: Vec::new() }
}

pub(super) fn ms(ns: u64) -> f64 {
    milliseconds(ns)
}
