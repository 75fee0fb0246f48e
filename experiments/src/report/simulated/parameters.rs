//! The simulation that a report is made of, and its parameters.

use simulator::ModelError;
use simulator::batches::KINDS;
use simulator::demand::Demand;
use simulator::pair::Batch;

/// The parameters that the model is fed with.
#[derive(Clone, Debug)]
pub struct Parameters {
    /// Where they come from, as every figure says it.
    pub origin: String,
    pub demand: Demand,
    /// Batch programs by name, the first of which the policies are shown with.
    pub batches: Vec<(String, Batch)>,
    /// Of the 99th percentile.
    pub slo_ms: u64,
    /// The options that make `elfen lab simulate` use them; empty for its defaults.
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
pub(super) const MOST_REQUESTS: u64 = 10_000_000;

/// Why a report cannot be simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Impossible {
    #[error("there is no batch program among the parameters")]
    NoBatch,
    #[error("a figure shows no more of {MOST_REQUESTS} requests a point than of fewer")]
    Requests,
    #[error(transparent)]
    Model(#[from] ModelError),
}
