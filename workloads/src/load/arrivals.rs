//! When each request is meant to be sent, and which query it asks: the whole plan of an invocation,
//! from one seed.
//!
//! The plan never looks at the service: that is what makes the loop open. The same seed gives the
//! same plan, so that an invocation can be run again. Arrival times and the order of the queries
//! come from separate streams of the seed: changing the query set does not move the arrivals.

use crate::units::{Nanos, nanos_from_f64, seconds, show_nanos};
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_distr::Exp1;
use rand_xoshiro::Xoshiro256PlusPlus;
use std::fmt;
use std::sync::Arc;

/// How arrivals are spread over time.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Arrivals {
    /// Exponential gaps: a Poisson process, as in the thesis.
    Exponential,
    /// Equal gaps.
    Uniform,
    /// A Poisson process that is on for `on_ns`, off for `off_ns`, and again; its mean over both is
    /// the rate.
    Bursts { on_ns: Nanos, off_ns: Nanos },
    /// The moments of a recorded run, from its start.
    Trace(Arc<[TraceEntry]>),
}

impl fmt::Display for Arrivals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exponential => f.write_str("exponential"),
            Self::Uniform => f.write_str("uniform"),
            Self::Bursts { on_ns, off_ns } => {
                write!(f, "bursts of {} every {}", show_nanos(*on_ns), show_nanos(on_ns + off_ns))
            }
            Self::Trace(entries) => write!(f, "trace of {}", entries.len()),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TraceEntry {
    pub(crate) at_ns: Nanos,
    /// Which query, where the recording says.
    pub(crate) query: Option<u32>,
}

/// Where the plan ends; a trace also ends with its last entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Requests(u64),
    At(Nanos),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Arrival {
    pub(crate) index: u64,
    /// Nanoseconds from the start of the invocation: the intended send time.
    pub(crate) at_ns: Nanos,
    /// Index into the query set.
    pub(crate) query: u32,
}

/// The plan of one invocation, made as it is consumed.
#[derive(Debug)]
pub(crate) struct Plan {
    gaps: Gaps,
    end: End,
    /// The query set in the order asked, round and round: shuffled once, as the thesis does.
    order: Vec<u32>,
    next: u64,
}

#[derive(Debug)]
enum Gaps {
    Random { clock: f64, mean_gap_ns: f64, rng: Xoshiro256PlusPlus },
    Equal { gap_ns: f64 },
    Bursts { on_clock: f64, mean_gap_ns: f64, on_ns: f64, off_ns: f64, rng: Xoshiro256PlusPlus },
    Trace { entries: Arc<[TraceEntry]>, scale: f64 },
}

impl Plan {
    /// `rps` is the mean rate; a trace is stretched to it.
    pub(crate) fn new(arrivals: &Arrivals, rps: f64, end: End, queries: u32, seed: u64) -> Self {
        let rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let mut order_rng = rng.clone();
        order_rng.jump();
        let mut order: Vec<u32> = (0..queries).collect();
        order.shuffle(&mut order_rng);
        let mean_gap_ns = 1e9 / rps;
        let gaps = match arrivals {
            Arrivals::Exponential => Gaps::Random { clock: 0.0, mean_gap_ns, rng },
            Arrivals::Uniform => Gaps::Equal { gap_ns: mean_gap_ns },
            Arrivals::Bursts { on_ns, off_ns } => {
                let (on_ns, off_ns) = (*on_ns as f64, *off_ns as f64);
                let mean_gap_ns = mean_gap_ns * on_ns / (on_ns + off_ns);
                Gaps::Bursts { on_clock: 0.0, mean_gap_ns, on_ns, off_ns, rng }
            }
            Arrivals::Trace(entries) => {
                let scale = trace_rps(entries).map_or(1.0, |own| own / rps);
                Gaps::Trace { entries: entries.clone(), scale }
            }
        };
        Self { gaps, end, order, next: 0 }
    }

    /// How many requests the plan will make, where that is known beforehand, else how many it makes
    /// on average.
    pub(crate) fn expected_requests(&self, rps: f64) -> u64 {
        let by_end = match self.end {
            End::Requests(n) => n,
            End::At(ns) => nanos_from_f64(rps * seconds(ns)).unwrap_or(u64::MAX),
        };
        match &self.gaps {
            Gaps::Trace { entries, .. } => by_end.min(entries.len() as u64),
            _ => by_end,
        }
    }

    fn at(&mut self) -> Option<Nanos> {
        let at = match &mut self.gaps {
            Gaps::Random { clock, mean_gap_ns, rng } => {
                *clock += *mean_gap_ns * rng.sample::<f64, _>(Exp1);
                *clock
            }
            Gaps::Equal { gap_ns } => *gap_ns * (self.next + 1) as f64,
            Gaps::Bursts { on_clock, mean_gap_ns, on_ns, off_ns, rng } => {
                *on_clock += *mean_gap_ns * rng.sample::<f64, _>(Exp1);
                // The clock that runs in on-periods alone, with the off-periods put back in
                // between.
                *on_clock + (*on_clock / *on_ns).floor() * *off_ns
            }
            Gaps::Trace { entries, scale } => {
                let entry = entries.get(usize::try_from(self.next).ok()?)?;
                entry.at_ns as f64 * *scale
            }
        };
        nanos_from_f64(at)
    }

    fn query(&self) -> u32 {
        if let Gaps::Trace { entries, .. } = &self.gaps
            && let Some(TraceEntry { query: Some(query), .. }) =
                usize::try_from(self.next).ok().and_then(|next| entries.get(next))
            // A trace of another query set may name a query that this one hasn't.
            && (*query as usize) < self.order.len()
        {
            return *query;
        }
        let round = self.next % self.order.len().max(1) as u64;
        usize::try_from(round).ok().and_then(|at| self.order.get(at)).copied().unwrap_or(0)
    }
}

impl Iterator for Plan {
    type Item = Arrival;

    fn next(&mut self) -> Option<Arrival> {
        if let End::Requests(n) = self.end
            && self.next >= n
        {
            return None;
        }
        let at_ns = self.at()?;
        if let End::At(end) = self.end
            && at_ns >= end
        {
            return None;
        }
        let arrival = Arrival { index: self.next, at_ns, query: self.query() };
        self.next += 1;
        Some(arrival)
    }
}

/// The mean rate of a trace, over the time to its last entry; `None` where that is no time at all.
pub(crate) fn trace_rps(entries: &[TraceEntry]) -> Option<f64> {
    let last = entries.last().filter(|last| last.at_ns > 0)?;
    Some(entries.len() as f64 / seconds(last.at_ns))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn plan(arrivals: &Arrivals, rps: f64, end: End, seed: u64) -> Vec<Arrival> {
        Plan::new(arrivals, rps, end, 7, seed).collect()
    }

    /// Goal: equal gaps are equal and don't drift. Method: the millionth arrival of a rate whose
    /// gap is no whole number.
    #[test]
    fn uniform_does_not_drift() {
        let all = plan(&Arrivals::Uniform, 3_000.0, End::Requests(1_000_000), 1);
        assert_eq!(all[0].at_ns, 333_333);
        assert_eq!(all[999_999].at_ns, 333_333_333_333);
    }

    /// Goal: exponential gaps have the mean and the spread of a Poisson process. Method: 200,000
    /// gaps; both moments within five standard errors.
    #[test]
    fn exponential_gaps_have_their_moments() {
        let all = plan(&Arrivals::Exponential, 1_000.0, End::Requests(200_000), 42);
        let gaps: Vec<f64> =
            all.windows(2).map(|pair| (pair[1].at_ns - pair[0].at_ns) as f64 / 1e6).collect();
        let n = gaps.len() as f64;
        let mean = gaps.iter().sum::<f64>() / n;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / n;
        assert!((mean - 1.0).abs() < 5.0 / n.sqrt(), "mean gap {mean} ms");
        // The standard error of an exponential's sample variance is sqrt(8 / n).
        assert!((variance - 1.0).abs() < 5.0 * (8.0 / n).sqrt(), "variance {variance} ms^2");
    }

    /// Goal: bursts stay in their on-periods and keep the mean rate. Method: every arrival's place
    /// in its period; the count over many periods.
    #[test]
    fn bursts_are_on_when_on() {
        let arrivals = Arrivals::Bursts { on_ns: 10_000_000, off_ns: 40_000_000 };
        let all = plan(&arrivals, 2_000.0, End::At(100_000_000_000), 3);
        assert!(all.iter().all(|arrival| arrival.at_ns % 50_000_000 <= 10_000_000));
        let n = all.len() as f64;
        assert!((n - 200_000.0).abs() < 5.0 * n.sqrt(), "{n} arrivals instead of 200000");
    }

    /// Goal: the thesis's query order: every query once a round, all rounds alike, and each seed
    /// another order. Method: five rounds of 50 queries for two seeds.
    #[test]
    fn queries_are_shuffled_once_and_repeated() {
        let queries = |seed| -> Vec<u32> {
            Plan::new(&Arrivals::Uniform, 1.0, End::Requests(250), 50, seed)
                .map(|a| a.query)
                .collect()
        };
        let all = queries(9);
        let mut first = all[..50].to_vec();
        for round in all.chunks(50) {
            assert_eq!(round, &all[..50]);
        }
        assert_ne!(queries(10), all);
        first.sort_unstable();
        assert_eq!(first, (0..50).collect::<Vec<_>>());
    }

    /// Goal: the query set's size leaves the arrival times alone. Method: the same seed with two
    /// sizes.
    #[test]
    fn arrivals_do_not_depend_on_queries() {
        let times = |queries| -> Vec<Nanos> {
            Plan::new(&Arrivals::Exponential, 50.0, End::Requests(500), queries, 4)
                .map(|arrival| arrival.at_ns)
                .collect()
        };
        assert_eq!(times(1), times(1141));
    }

    /// Goal: a trace is replayed as recorded, at its own rate or stretched to another. Method:
    /// three entries.
    #[test]
    fn trace_is_replayed_and_stretched() {
        let entries: Arc<[TraceEntry]> = [(100, Some(3)), (200, None), (300, Some(99))]
            .map(|(ms, query)| TraceEntry { at_ns: ms * 1_000_000, query })
            .into();
        let own = trace_rps(&entries).expect("the trace takes 300 ms");
        assert!((own - 10.0).abs() < 1e-9);
        let arrivals = Arrivals::Trace(entries);
        let all = plan(&arrivals, own, End::Requests(u64::MAX), 1);
        assert_eq!(all.iter().map(|a| a.at_ns / 1_000_000).collect::<Vec<_>>(), [100, 200, 300]);
        assert_eq!(all[0].query, 3);
        assert!(all[2].query < 7, "a query that the set hasn't is replaced");
        let slow = plan(&arrivals, own / 2.0, End::At(500_000_000), 1);
        assert_eq!(slow.iter().map(|a| a.at_ns / 1_000_000).collect::<Vec<_>>(), [200, 400]);
    }

    proptest! {
        /// Goal: the same seed gives the same plan, in order, within its end. Method: any process,
        /// rate, end and seed.
        #[test]
        fn plans_are_replayable(
            kind in 0..3, rps in 0.1f64..1e6, n in 0u64..300, end_ms in 1u64..100, by_count: bool,
            seed: u64,
        ) {
            let arrivals = match kind {
                0 => Arrivals::Exponential,
                1 => Arrivals::Uniform,
                _ => Arrivals::Bursts { on_ns: 1_000_000, off_ns: 3_000_000 },
            };
            let end = if by_count { End::Requests(n) } else { End::At(end_ms * 1_000_000) };
            let once = || Plan::new(&arrivals, rps, end, 5, seed).take(1_000).collect::<Vec<_>>();
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
