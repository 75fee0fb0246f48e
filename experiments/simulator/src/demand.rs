//! Service times: how long requests run when no other thread shares their core.
//!
//! The demand of the thesis's search service (Figure 5.1) is built in. The thesis prints no numbers
//! for this figure. [`Demand::Search`] is the simplest distribution that agrees with the published
//! numbers, which its documentation lists.

use std::io::{self, BufRead};

use rand::RngExt;
use rand_distr::{Distribution, Exp1, LogNormal};

use super::random::Random;
use super::time::{DAY, nanoseconds, real};

/// A distribution of service times.
#[derive(Clone, Debug)]
pub enum Demand {
    Fixed {
        ns: u64,
    },
    Exponential {
        mean_ns: f64,
    },
    LogNormal {
        mu: f64,
        sigma: f64,
    },
    /// The demand of the thesis's Lucene, as far as it is published:
    ///
    /// - "Most requests are short, a few very long", by one to two orders of magnitude (Figure
    ///   5.1). Here the median is 4.7 ms and the longest request takes 56 ms.
    /// - One lane is busy for 70 to 71 % of the time at 120 RPS (Figures 5.2 and 5.5). Here the
    ///   mean is 5.8 ms, which gives 69.6 %.
    /// - p99 is 60 ms at 70 RPS, 76 ms at 100 RPS, and 100 ms just above 120 RPS (sections 5.2 and
    ///   5.5). The other parameters are fitted to these numbers.
    ///
    /// These three values of p99 leave little choice. In a queue with one worker, they require that
    /// short requests differ little, and that the demand itself has a p99 above 50 ms. `elfen lab
    /// thesis` prints how well the distribution fits.
    Search,
    /// Each request takes one of these times. All of them have the same probability.
    Recorded {
        service_ns: Vec<u64>,
    },
}

/// Why a file of service times is invalid.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    #[error("{0}")]
    Read(#[from] io::Error),
    #[error("line {line} is not a valid service time: {text:?}")]
    Line { line: usize, text: String },
    #[error("the file has no service times")]
    Empty,
    #[error("the header has no column service_us or service_ns")]
    NoColumn,
}

/// One request in 87 is long and takes 51 to 56 ms. The service times of the others are lognormal
/// around 4.6 ms.
const LONG_SHARE: f64 = 0.0115;
const LONG_FROM_NS: f64 = 51e6;
const LONG_TO_NS: f64 = 56e6;
const SHORT_SIGMA: f64 = 0.5;
const MEAN_NS: f64 = 5.8e6;

impl Demand {
    /// Returns a lognormal demand with this mean. `sigma` is the standard deviation of its
    /// logarithm.
    pub fn log_normal(mean_ns: f64, sigma: f64) -> Self {
        Self::LogNormal { mu: mean_ns.ln() - sigma * sigma / 2.0, sigma }
    }

    /// Reads one service time in microseconds per line, or a CSV with a column `service_us` or
    /// `service_ns`, as `elfen-load` writes it.
    ///
    /// Empty fields are skipped: they belong to requests without a reported service time.
    pub fn recorded(mut lines: impl BufRead) -> Result<Self, RecordError> {
        let mut first = String::new();
        lines.read_line(&mut first)?;
        let heading: Vec<&str> = first.trim().split(',').collect();
        let mut service_ns = Vec::new();
        let (column, unit_ns) = match column(&heading) {
            Some(column) => column,
            None if heading.len() == 1 => (0, 1e3),
            None => return Err(RecordError::NoColumn),
        };
        let alone = heading.len() == 1 && heading[0].parse::<f64>().is_ok();
        let rest = lines.lines();
        let all = alone.then_some(Ok(first.clone())).into_iter().chain(rest);
        for (index, line) in all.enumerate() {
            let line = line?;
            let wrong =
                || RecordError::Line { line: index + 2 - usize::from(alone), text: line.clone() };
            let field = line.trim().split(',').nth(column).ok_or_else(wrong)?;
            if !field.is_empty() {
                let time: f64 = field.parse().map_err(|_| wrong())?;
                if !(time.is_finite() && time >= 0.0) {
                    return Err(wrong());
                }
                service_ns.push(nanoseconds(time * unit_ns));
            }
        }
        if service_ns.is_empty() {
            return Err(RecordError::Empty);
        }
        Ok(Self::Recorded { service_ns })
    }

    /// Draws the service time of the next request, at most a day.
    pub fn sample(&self, random: &mut Random) -> u64 {
        let ns = match self {
            Self::Fixed { ns } => *ns,
            Self::Exponential { mean_ns } => {
                let e: f64 = Exp1.sample(random);
                nanoseconds(e * mean_ns)
            }
            Self::LogNormal { mu, sigma } => log_normal(*mu, *sigma, random),
            Self::Search => search(random),
            Self::Recorded { service_ns } => service_ns[random.random_range(0..service_ns.len())],
        };
        ns.min(DAY)
    }

    /// Returns the longest service time, or the mean if the distribution has no upper bound.
    pub(super) fn longest_ns(&self) -> u64 {
        match self {
            Self::Recorded { service_ns } => service_ns.iter().copied().max().unwrap_or(0),
            Self::Search => nanoseconds(LONG_TO_NS),
            _ => nanoseconds(self.mean_ns()),
        }
    }

    /// Returns the mean service time in nanoseconds.
    pub fn mean_ns(&self) -> f64 {
        match self {
            Self::Fixed { ns } => real(*ns),
            Self::Exponential { mean_ns } => *mean_ns,
            Self::LogNormal { mu, sigma } => (mu + sigma * sigma / 2.0).exp(),
            Self::Search => MEAN_NS,
            Self::Recorded { service_ns } => {
                service_ns.iter().map(|&ns| real(ns)).sum::<f64>() / real(service_ns.len() as u64)
            }
        }
    }
}

fn column(heading: &[&str]) -> Option<(usize, f64)> {
    let of = |name: &str| heading.iter().position(|field| *field == name);
    of("service_us").map(|at| (at, 1e3)).or_else(|| of("service_ns").map(|at| (at, 1.0)))
}

fn log_normal(mu: f64, sigma: f64, random: &mut Random) -> u64 {
    let distribution = LogNormal::new(mu, sigma).expect("a deviation is finite");
    nanoseconds(distribution.sample(random))
}

fn search(random: &mut Random) -> u64 {
    if random.random_bool(LONG_SHARE) {
        return nanoseconds(random.random_range(LONG_FROM_NS..LONG_TO_NS));
    }
    let short_mean =
        (MEAN_NS - LONG_SHARE * (LONG_FROM_NS + LONG_TO_NS) / 2.0) / (1.0 - LONG_SHARE);
    let mu = short_mean.ln() - SHORT_SIGMA * SHORT_SIGMA / 2.0;
    log_normal(mu, SHORT_SIGMA, random).min(nanoseconds(LONG_FROM_NS))
}
