//! The plan of a run: when each request is due, and which query it sends.
//!
//! The plan does not depend on the service, which makes the loop open. Equal seeds give equal
//! plans, so a run can be repeated. Arrival times and the order of the queries use separate random
//! streams, so another query set does not change the arrivals.

use crate::units::{Nanos, nanos_from_f64, seconds};
use clap::ValueEnum;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_distr::Exp1;
use rand_xoshiro::Xoshiro256PlusPlus;

/// How arrivals are spread over time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Arrivals {
    /// Exponential gaps: a Poisson process, as in the thesis
    Exponential,
    /// Equal gaps
    Uniform,
}

impl Arrivals {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Exponential => "exponential",
            Self::Uniform => "uniform",
        }
    }
}

/// Where the plan ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Requests(u64),
    At(Nanos),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Arrival {
    pub(crate) index: u64,
    /// Nanoseconds from the start of the run: the intended send time.
    pub(crate) at_ns: Nanos,
    /// Index into the query set.
    pub(crate) query: u32,
}

/// The plan of one run, computed while it is consumed.
#[derive(Debug)]
pub(crate) struct Plan {
    arrivals: Arrivals,
    rps: f64,
    end: End,
    rng: Xoshiro256PlusPlus,
    /// When the latest request is due.
    clock_ns: f64,
    /// The order of the queries. They are shuffled once and then repeated, as in the thesis.
    order: Vec<u32>,
    next: u64,
}

impl Plan {
    /// `rps` is the mean rate.
    pub(crate) fn new(arrivals: Arrivals, rps: f64, end: End, queries: u32, seed: u64) -> Self {
        let rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let mut order_rng = rng.clone();
        order_rng.jump();
        let mut order: Vec<u32> = (0..queries).collect();
        order.shuffle(&mut order_rng);
        Self { arrivals, rps, end, rng, clock_ns: 0.0, order, next: 0 }
    }

    /// The number of requests in the plan. If the plan ends at a time, this is the average number.
    pub(crate) fn expected_requests(&self) -> u64 {
        match self.end {
            End::Requests(n) => n,
            End::At(ns) => nanos_from_f64(self.rps * seconds(ns)).unwrap_or(u64::MAX),
        }
    }
}

impl Iterator for Plan {
    type Item = Arrival;

    fn next(&mut self) -> Option<Arrival> {
        let index = self.next;
        if self.end == End::Requests(index) {
            return None;
        }
        self.clock_ns = match self.arrivals {
            Arrivals::Exponential => {
                self.clock_ns + 1e9 / self.rps * self.rng.sample::<f64, _>(Exp1)
            }
            // Adding up gaps would drift.
            Arrivals::Uniform => 1e9 / self.rps * (index + 1) as f64,
        };
        let at_ns = nanos_from_f64(self.clock_ns)?;
        if matches!(self.end, End::At(end) if at_ns >= end) {
            return None;
        }
        self.next += 1;
        let round = usize::try_from(index % self.order.len().max(1) as u64).ok()?;
        Some(Arrival { index, at_ns, query: self.order.get(round).copied().unwrap_or(0) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn plan(arrivals: Arrivals, rps: f64, end: End, seed: u64) -> Vec<Arrival> {
        Plan::new(arrivals, rps, end, 7, seed).collect()
    }

    /// Goal: equal gaps do not drift. Method: the millionth arrival at a rate whose gap is not a
    /// whole number of nanoseconds.
    #[test]
    fn uniform_does_not_drift() {
        let all = plan(Arrivals::Uniform, 3_000.0, End::Requests(1_000_000), 1);
        assert_eq!(all[0].at_ns, 333_333);
        assert_eq!(all[999_999].at_ns, 333_333_333_333);
    }

    /// Goal: exponential gaps have the mean and the spread of a Poisson process. Method: 200,000
    /// gaps; both moments within five standard errors.
    #[test]
    fn exponential_gaps_have_their_moments() {
        let all = plan(Arrivals::Exponential, 1_000.0, End::Requests(200_000), 42);
        let gaps: Vec<f64> =
            all.windows(2).map(|pair| (pair[1].at_ns - pair[0].at_ns) as f64 / 1e6).collect();
        let n = gaps.len() as f64;
        let mean = gaps.iter().sum::<f64>() / n;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / n;
        assert!((mean - 1.0).abs() < 5.0 / n.sqrt(), "mean gap {mean} ms");
        // The standard error of an exponential's sample variance is sqrt(8 / n).
        assert!((variance - 1.0).abs() < 5.0 * (8.0 / n).sqrt(), "variance {variance} ms^2");
    }

    /// Goal: the order of the queries is the thesis's. Each round has every query once, all rounds
    /// are equal, and other seeds give other orders. The size of the query set does not change the
    /// arrival times. Method: five rounds of 50 queries for two seeds; the same seed with two
    /// sizes.
    #[test]
    fn queries_are_shuffled_once_and_repeated() {
        let all = |queries, seed| {
            Plan::new(Arrivals::Exponential, 1.0, End::Requests(250), queries, seed)
        };
        let queries = |seed| all(50, seed).map(|arrival| arrival.query).collect::<Vec<_>>();
        let asked = queries(9);
        let mut first = asked[..50].to_vec();
        assert!(asked.chunks(50).all(|round| round == first));
        assert_ne!(queries(10), asked);
        first.sort_unstable();
        assert_eq!(first, (0..50).collect::<Vec<_>>());
        assert!(all(1, 4).map(|a| a.at_ns).eq(all(1141, 4).map(|a| a.at_ns)));
    }

    proptest! {
        /// Goal: equal seeds give equal plans, sorted by time, which respect their end. Method: any
        /// process, rate, end and seed.
        #[test]
        fn plans_are_replayable(
            uniform: bool, rps in 0.1f64..1e6, n in 0u64..300, end_ms in 1u64..100, by_count: bool,
            seed: u64,
        ) {
            let arrivals = if uniform { Arrivals::Uniform } else { Arrivals::Exponential };
            let end = if by_count { End::Requests(n) } else { End::At(end_ms * 1_000_000) };
            let once = || Plan::new(arrivals, rps, end, 5, seed).take(1_000).collect::<Vec<_>>();
            let all = once();
            prop_assert_eq!(&all, &once());
            prop_assert!(all.windows(2).all(|pair| pair[0].at_ns <= pair[1].at_ns));
            match end {
                End::Requests(n) => prop_assert_eq!(all.len() as u64, n),
                End::At(end) => prop_assert!(all.iter().all(|arrival| arrival.at_ns < end)),
            }
        }
    }
}
