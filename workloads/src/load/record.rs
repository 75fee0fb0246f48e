//! The measurements of one run: all latencies from the intended send time, and the lateness of the
//! sends.
//!
//! Recording happens between two sends, so it only increments counters. Whole requests are stored
//! only on request.
//!
//! Percentiles of several runs are summarized by their median. A bootstrap over the runs gives its
//! confidence interval. Runs are independent samples, but requests of the same run are not, because
//! they wait for each other.

use super::protocol::{Fault, Timing};
use crate::units::Nanos;
use hdrhistogram::Histogram;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use std::collections::BTreeMap;

/// Three digits: the error of a recorded value is below 0.1 %.
const DIGITS: u8 = 3;
/// Longer latencies are recorded as this value. All runs are shorter.
const LONGEST_NS: Nanos = 24 * 3600 * 1_000_000_000;
const RESAMPLES: usize = 10_000;

/// One finished request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sample {
    pub(crate) index: u64,
    pub(crate) query: u32,
    /// The connection on which it was sent; `None` if it was never sent.
    pub(crate) connection: Option<usize>,
    pub(crate) intended_ns: Nanos,
    /// When its first byte was passed to the kernel; `None` if it was never sent.
    pub(crate) sent_ns: Option<Nanos>,
    pub(crate) done_ns: Nanos,
    pub(crate) result: Result<(), Fault>,
    pub(crate) timing: Timing,
}

impl Sample {
    pub(crate) fn latency_ns(&self) -> Nanos {
        self.done_ns.saturating_sub(self.intended_ns)
    }

    pub(crate) fn late_ns(&self) -> Option<Nanos> {
        self.sent_ns.map(|sent| sent.saturating_sub(self.intended_ns))
    }
}

/// A histogram with the exact sum and maximum.
#[derive(Clone, Debug)]
pub(crate) struct Distribution {
    histogram: Histogram<u64>,
    sum_ns: u128,
    max_ns: Nanos,
}

impl Default for Distribution {
    fn default() -> Self {
        let histogram = Histogram::new_with_bounds(1, LONGEST_NS, DIGITS)
            .expect("the bounds are constants that hdrhistogram accepts");
        Self { histogram, sum_ns: 0, max_ns: 0 }
    }
}

impl Distribution {
    pub(crate) fn record(&mut self, ns: Nanos) {
        self.histogram.saturating_record(ns);
        self.sum_ns += u128::from(ns);
        self.max_ns = self.max_ns.max(ns);
    }

    pub(crate) fn count(&self) -> u64 {
        self.histogram.len()
    }

    pub(crate) fn quantile_ns(&self, quantile: f64) -> Nanos {
        self.histogram.value_at_quantile(quantile).min(self.max_ns)
    }

    pub(crate) fn max_ns(&self) -> Nanos {
        self.max_ns
    }

    pub(crate) fn mean_ns(&self) -> f64 {
        if self.count() == 0 { 0.0 } else { self.sum_ns as f64 / self.count() as f64 }
    }

    pub(crate) fn sum_ns(&self) -> u128 {
        self.sum_ns
    }

    /// The number of values that are at most `ns`.
    pub(crate) fn count_up_to(&self, ns: Nanos) -> u64 {
        if ns >= self.max_ns { self.count() } else { self.histogram.count_between(0, ns) }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Recorder {
    /// Requests whose intended time is earlier are sent but not recorded.
    pub(crate) warmup_ns: Nanos,
    every_request: bool,
    /// Latency of the successful requests.
    pub(crate) latency: Distribution,
    /// Actual minus intended send time of all requests that were sent.
    pub(crate) late: Distribution,
    pub(crate) queue: Distribution,
    pub(crate) service: Distribution,
    pub(crate) errors: BTreeMap<Fault, u64>,
    /// Requests that waited because no connection had room.
    pub(crate) waited: u64,
    pub(crate) last_intended_ns: Nanos,
    pub(crate) last_done_ns: Nanos,
    pub(crate) samples: Vec<Sample>,
}

impl Recorder {
    pub(crate) fn new(warmup_ns: Nanos, every_request: bool) -> Self {
        Self {
            warmup_ns,
            every_request,
            latency: Distribution::default(),
            late: Distribution::default(),
            queue: Distribution::default(),
            service: Distribution::default(),
            errors: BTreeMap::new(),
            waited: 0,
            last_intended_ns: 0,
            last_done_ns: 0,
            samples: Vec::new(),
        }
    }

    pub(crate) fn measures(&self, intended_ns: Nanos) -> bool {
        intended_ns >= self.warmup_ns
    }

    pub(crate) fn record(&mut self, sample: &Sample) {
        if !self.measures(sample.intended_ns) {
            return;
        }
        self.last_intended_ns = self.last_intended_ns.max(sample.intended_ns);
        self.last_done_ns = self.last_done_ns.max(sample.done_ns);
        if let Some(late) = sample.late_ns() {
            self.late.record(late);
        }
        if self.every_request {
            self.samples.push(*sample);
        }
        if let Err(failure) = sample.result {
            *self.errors.entry(failure).or_default() += 1;
            return;
        }
        let latency = sample.latency_ns();
        self.latency.record(latency);
        if let Some(queue) = sample.timing.queue_ns {
            self.queue.record(queue);
        }
        if let Some(service) = sample.timing.service_ns {
            self.service.record(service);
        }
    }

    pub(crate) fn errors(&self) -> u64 {
        self.errors.values().sum()
    }

    /// The number of requests that ended, successfully or not.
    pub(crate) fn requests(&self) -> u64 {
        self.latency.count() + self.errors()
    }
}

/// The median. `None` for an empty slice.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    let upper = *sorted.get(middle)?;
    Some(if sorted.len() % 2 == 1 { upper } else { (sorted[middle - 1] + upper) / 2.0 })
}

/// The 95 % confidence interval of the median, by percentile bootstrap. Fewer than three values
/// have no interval, because they do not show their spread.
pub(crate) fn median_ci95(values: &[f64], seed: u64) -> Option<[f64; 2]> {
    bootstrap_median(values, seed, RESAMPLES)
}

fn bootstrap_median(values: &[f64], seed: u64, resamples: usize) -> Option<[f64; 2]> {
    if values.len() < 3 {
        return None;
    }
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut resample = vec![0.0; values.len()];
    let mut medians: Vec<f64> = (0..resamples)
        .filter_map(|_| {
            resample.iter_mut().for_each(|slot| *slot = values[rng.random_range(0..values.len())]);
            median(&resample)
        })
        .collect();
    medians.sort_unstable_by(f64::total_cmp);
    Some([medians[resamples / 40], medians[resamples - 1 - resamples / 40]])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rand_distr::Exp1;

    fn sample(intended_ns: Nanos, latency: Nanos, result: Result<(), Fault>) -> Sample {
        Sample {
            index: intended_ns,
            query: 0,
            connection: Some(0),
            intended_ns,
            sent_ns: Some(intended_ns + 5),
            done_ns: intended_ns + latency,
            result,
            timing: Timing { queue_ns: Some(latency / 4), ..Timing::default() },
        }
    }

    /// Goal: the warm-up is not recorded. Failures are counted, and do not contribute to latencies.
    /// Method: one request each.
    #[test]
    fn warmup_and_failures_are_kept_apart() {
        let mut recorder = Recorder::new(1_000, true);
        recorder.record(&sample(999, 1 << 40, Ok(())));
        recorder.record(&sample(1_000, 100, Ok(())));
        recorder.record(&sample(2_000, 1 << 40, Err(Fault::Timeout)));
        assert_eq!((recorder.latency.count(), recorder.latency.max_ns()), (1, 100));
        assert_eq!((recorder.errors(), recorder.requests()), (1, 2));
        assert_eq!((recorder.late.count(), recorder.late.max_ns()), (2, 5));
        assert_eq!((recorder.queue.max_ns(), recorder.service.count()), (25, 0));
        assert_eq!(recorder.samples.len(), 2);
    }

    /// Goal: medians are correct for odd and even counts, and intervals contain the true median in
    /// about 95 of 100 cases. Method: small examples; 400 samples of 20 exponential values (median
    /// ln 2). Between 90 % and 99 % of the intervals must contain it, because the bootstrap of a
    /// median is imprecise.
    #[test]
    fn confidence_intervals_cover() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(11);
        let covered = (0..400u64)
            .filter(|round| {
                let values: Vec<f64> = (0..20).map(|_| rng.sample::<f64, _>(Exp1)).collect();
                let interval = bootstrap_median(&values, *round, 1_000).expect("20 values");
                assert!(interval[0] <= interval[1]);
                (interval[0]..=interval[1]).contains(&std::f64::consts::LN_2)
            })
            .count();
        assert!((360..=396).contains(&covered), "{covered} of 400 intervals cover");
    }

    proptest! {
        // A recorder has a megabyte of histograms.
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Goal: the error of quantiles is below 0.1 %, for any values. Method: comparison with the
        /// sorted list.
        #[test]
        fn quantiles_are_right(
            mut values in proptest::collection::vec(1u64..10_000_000_000, 1..400),
            quantile in 0.0f64..=1.0,
        ) {
            let mut distribution = Distribution::default();
            values.iter().for_each(|value| distribution.record(*value));
            values.sort_unstable();
            let rank = (quantile * values.len() as f64).ceil().max(1.0);
            let ranked = values.iter().zip(1u32..).find(|(_, n)| f64::from(*n) >= rank);
            let (exact, _) = ranked.expect("a quantile has a rank");
            let got = distribution.quantile_ns(quantile) as f64;
            prop_assert!((got / *exact as f64 - 1.0).abs() < 0.001, "{got} instead of {exact}");
            let mean = values.iter().sum::<u64>() as f64 / values.len() as f64;
            prop_assert!((distribution.mean_ns() / mean - 1.0).abs() < 1e-9);
        }
    }
}
