//! The figures of the thesis's chapter 5, from the simulator.
//!
//! Each figure is made anew from the parameters and the seed; the same two give the same figures.
//! Numbers that the thesis prints stand beside them as rings, as long as the parameters are its.

mod borrowing;
mod histograms;
mod overhead;
mod sweep;

use elfen_rt::policy::slo::Slo;

use super::figure::{Figure, Mark, Panel, Point, Rule, Series, Source, Style};
use super::{Report, Table};
use crate::simulate::ModelError;
use crate::simulate::batches::KINDS;
use crate::simulate::demand::Demand;
use crate::simulate::pair::Batch;
use crate::simulate::time::{MS, milliseconds, real};
use crate::thesis;
use sweep::Sweep;

/// What the model is fed with.
#[derive(Clone, Debug)]
pub struct Parameters {
    /// Where they come from, as every figure says it.
    pub origin: String,
    pub demand: Demand,
    /// Batch programs by name, the first of which the policies are shown with.
    pub batches: Vec<(String, Batch)>,
    /// Of the 99th percentile.
    pub slo_ms: u64,
    /// What makes `elfen simulate` use them; empty for its defaults.
    pub options: String,
    /// Whether the thesis's published numbers belong beside them.
    pub are_of_thesis: bool,
}

impl Default for Parameters {
    fn default() -> Self {
        let batches = KINDS.iter().map(|kind| (kind.name.to_owned(), kind.batch())).collect();
        Self {
            origin: "the thesis's parameters, as far as it prints them".to_owned(),
            demand: Demand::Search,
            batches,
            slo_ms: 100,
            options: String::new(),
            are_of_thesis: true,
        }
    }
}

/// A report to be simulated.
#[derive(Clone, Debug)]
pub struct Simulation {
    pub parameters: Parameters,
    /// Of each point of each figure.
    pub requests: u64,
    pub seed: u64,
    /// The command that makes the report.
    pub command: String,
}

/// The figures of single requests keep them all in memory.
const MOST_REQUESTS: u64 = 10_000_000;

/// What cannot be simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Impossible {
    #[error("there is no batch program among the parameters")]
    NoBatch,
    #[error("a figure shows no more of {MOST_REQUESTS} requests a point than of fewer")]
    Requests,
    #[error(transparent)]
    Model(#[from] ModelError),
}

impl Simulation {
    /// All figures that can be simulated, and how near the model is to the thesis.
    pub fn report(&self) -> Result<Report, Impossible> {
        let lab = Lab::new(self)?;
        let mut figures = vec![histograms::demand(&lab), borrowing::percentiles(&lab)];
        figures.push(borrowing::unrestrained(&lab));
        figures.push(histograms::pauses(&lab));
        figures.extend(borrowing::borrow_idle(&lab));
        figures.push(borrowing::policies(&lab));
        figures.push(overhead::figure(&lab));
        let tables = if self.parameters.are_of_thesis { vec![published(self)] } else { Vec::new() };
        Ok(Report {
            title: "Elfen: the thesis's figures, simulated".to_owned(),
            command: self.command.clone(),
            notes: vec![lab.made_with()],
            tables,
            figures,
            appendix: Vec::new(),
        })
    }
}

/// The simulations that several figures share.
struct Lab<'a> {
    simulation: &'a Simulation,
    /// One core, and seven that share a queue.
    one: Sweep<'a>,
    seven: Sweep<'a>,
}

impl<'a> Lab<'a> {
    fn new(simulation: &'a Simulation) -> Result<Self, Impossible> {
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

    fn parameters(&self) -> &Parameters {
        &self.simulation.parameters
    }

    /// The batch program that policies are shown with.
    fn batch(&self) -> &(String, Batch) {
        &self.parameters().batches[0]
    }

    fn slo(&self) -> Slo {
        Slo { per_million: 990_000, latency_ns: self.parameters().slo_ms * MS }
    }

    fn slo_rule(&self) -> Rule {
        let slo_ms = self.parameters().slo_ms;
        Rule { y: real(slo_ms), name: format!("SLO {slo_ms} ms") }
    }

    /// Numbers that the thesis prints, if they belong here.
    fn rings(&self, points: &[(f64, f64)]) -> Option<Series> {
        let points = points.iter().map(|&(x, y)| Point::at(x, y)).collect();
        let rings = Series::new("published in the thesis", Mark::Rings, Style::Ink, points);
        self.parameters().are_of_thesis.then_some(rings)
    }

    fn made_with(&self) -> String {
        let Simulation { parameters, requests, seed, .. } = self.simulation;
        let (_, batch) = self.batch();
        let slower: Vec<String> = parameters.batches.iter().map(slowdown).collect();
        format!(
            "Simulated with {}: a request takes {}; a batch beside a request takes {} times as \
             long; {} µs to nap, {} µs to wake, a check every {} µs. {requests} requests a point, \
             seed {seed}.",
            parameters.origin,
            slower.join(", "),
            real(batch.batch_slowdown_milli) / 1e3,
            real(batch.sleep_ns) / 1e3,
            real(batch.wake_ns) / 1e3,
            real(batch.check_ns) / 1e3,
        )
    }

    /// The report's command and, below it, one that makes a single point.
    fn command(&self, point: &str) -> String {
        let Simulation { command, requests, seed, .. } = self.simulation;
        let options = match self.parameters().options.as_str() {
            "" => String::new(),
            options => format!(" {options}"),
        };
        format!(
            "{command}\n# one of its points:\n\
             elfen simulate {point}{options} --requests {requests} --seed {seed}"
        )
    }

    fn figure(&self, id: &str, title: &str, x: super::figure::Across) -> Figure {
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

/// Every number that the thesis prints, against the model's.
fn published(simulation: &Simulation) -> Table {
    let Simulation { requests, seed, .. } = *simulation;
    let row = |row: thesis::Row| {
        let claim = match row.claim {
            thesis::Claim::About => "",
            thesis::Claim::AtLeast => "≥ ",
            thesis::Claim::AtMost => "≤ ",
        };
        let star = if row.fitted { "*" } else { "" };
        vec![
            row.place.to_owned(),
            row.what.clone(),
            format!("{claim}{} {}", row.published, row.unit).trim_end().to_owned(),
            super::scale::short(row.simulated) + star,
            format!("{:+.1} %", row.error() * 100.0),
            row.remark.to_owned(),
        ]
    };
    let head = ["place", "what", "thesis", "simulated", "error", "remark"];
    Table {
        title: "Published and simulated".to_owned(),
        head: head.map(str::to_owned).to_vec(),
        rows: thesis::rows(requests, seed).into_iter().map(row).collect(),
        note: format!(
            "* A parameter of the model was fitted to it. Made by elfen simulate --check-thesis \
             --requests {requests} --seed {seed}, which says more."
        ),
    }
}

fn panel(y: super::figure::Axis, series: Vec<Series>) -> Panel {
    Panel { y, series, rules: Vec::new() }
}

fn ms(ns: u64) -> f64 {
    milliseconds(ns)
}
