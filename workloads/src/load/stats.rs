//! What many invocations say together, and whether one of them held still.
//!
//! Percentiles of several invocations are summarised by their median, and how far that median can
//! be trusted by a bootstrap over the invocations: requests within one invocation wait behind each
//! other and are no independent sample, invocations are.

use super::record::{WINDOWS, Window};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

const RESAMPLES: usize = 10_000;

/// A trend this improbable by chance is reported.
const SIGNIFICANT: f64 = 0.01;
/// And only if latency moved by this much from the first to the last quarter of the run.
const NOTABLE_SHIFT: f64 = 0.10;

/// `None` for no values.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    let upper = *sorted.get(middle)?;
    Some(if sorted.len() % 2 == 1 { upper } else { (sorted[middle - 1] + upper) / 2.0 })
}

/// The 95 % confidence interval of the median, by percentile bootstrap; `None` below three values,
/// which say nothing about their spread.
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

/// The probability that a series without a trend looks at least as trended as this one (Mann and
/// Kendall's test, two sided, normal approximation with ties): it looks at the order alone, so one
/// slow window proves nothing.
pub(crate) fn trend_p_value(series: &[f64]) -> f64 {
    let n = series.len() as f64;
    let mut score: f64 = 0.0;
    for (at, earlier) in series.iter().enumerate() {
        for later in &series[at + 1..] {
            score += match later.total_cmp(earlier) {
                std::cmp::Ordering::Greater => 1.0,
                std::cmp::Ordering::Less => -1.0,
                std::cmp::Ordering::Equal => 0.0,
            };
        }
    }
    let mut sorted = series.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let ties: f64 = sorted
        .chunk_by(|a, b| a == b)
        .map(|tied| tied.len() as f64)
        .map(|t| t * (t - 1.0) * (2.0 * t + 5.0))
        .sum();
    let variance = (n * (n - 1.0) * (2.0 * n + 5.0) - ties) / 18.0;
    if variance <= 0.0 || score == 0.0 {
        return 1.0;
    }
    // The score moves in steps of two: take one step less, so that the normal curve fits.
    let z = (score.abs() - 1.0).max(0.0) / variance.sqrt();
    complementary_error(z / std::f64::consts::SQRT_2)
}

/// erfc for arguments >= 0, by its continued fraction or its series: absolute error below 1e-9.
fn complementary_error(x: f64) -> f64 {
    if x > 2.5 {
        let mut fraction = 0.0;
        for k in (1..=60).rev() {
            fraction = f64::from(k) / 2.0 / (x + fraction);
        }
        return (-x * x).exp() / std::f64::consts::PI.sqrt() / (x + fraction);
    }
    let (mut term, mut sum) = (x, x);
    for k in 1..60 {
        let k = f64::from(k);
        term *= -x * x / k;
        sum += term / (2.0 * k + 1.0);
    }
    1.0 - sum * 2.0 / std::f64::consts::PI.sqrt()
}

/// How latency moved over one invocation, if it did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Drift {
    pub(crate) first_quarter_us: f64,
    pub(crate) last_quarter_us: f64,
    pub(crate) p_value: f64,
}

/// Whether the windows' mean latencies rise or fall over the invocation: a queue that is still
/// filling, a cache that is still warming, a neighbour that came or went.
pub(crate) fn drift(windows: &[Window; WINDOWS]) -> Option<Drift> {
    let means: Vec<f64> = windows
        .iter()
        .filter(|window| window.answers > 0)
        .map(|window| window.sum_ns as f64 / window.answers as f64 / 1e3)
        .collect();
    if means.len() < WINDOWS {
        return None;
    }
    let p_value = trend_p_value(&means);
    let first_quarter_us = median(&means[..WINDOWS / 4])?;
    let last_quarter_us = median(&means[WINDOWS - WINDOWS / 4..])?;
    let shift = (last_quarter_us - first_quarter_us).abs();
    (p_value < SIGNIFICANT && shift > NOTABLE_SHIFT * first_quarter_us.min(last_quarter_us))
        .then_some(Drift { first_quarter_us, last_quarter_us, p_value })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rand_distr::Exp1;

    /// Goal: medians of odd and even counts. Method: by hand.
    #[test]
    fn medians() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }

    /// Goal: the interval covers the true median about 95 times in 100. Method: 400 samples of 20
    /// exponential values (median ln 2); between 90 % and 99 % of the intervals hold it (the
    /// bootstrap of a median is known to be rough).
    #[test]
    fn confidence_intervals_cover() {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(11);
        let covered = (0..400u64)
            .filter(|round| {
                let values: Vec<f64> = (0..20).map(|_| rng.sample::<f64, _>(Exp1)).collect();
                let [low, high] = bootstrap_median(&values, *round, 1_000).expect("20 values");
                (low..=high).contains(&std::f64::consts::LN_2)
            })
            .count();
        assert!((360..=396).contains(&covered), "{covered} of 400 intervals cover");
    }

    /// Goal: the error function is right on both sides of its switch. Method: tabulated values.
    #[test]
    fn error_function_is_right() {
        for (x, expected) in
            [(0.0, 1.0), (0.5, 0.479_500_122), (2.4, 6.885_138_967e-4), (2.6, 2.360_344_165e-4)]
        {
            assert!((complementary_error(x) - expected).abs() < 1e-9, "erfc({x})");
        }
    }

    /// Goal: the trend test alarms as rarely as it says where there is none. Method: 2,000 series
    /// of random order; below 1 % of them, plus five standard errors, are significant.
    #[test]
    fn no_trend_is_seldom_reported() {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(12);
        let alarms = (0..2_000)
            .filter(|_| {
                let series: Vec<f64> = (0..WINDOWS).map(|_| rng.sample::<f64, _>(Exp1)).collect();
                trend_p_value(&series) < SIGNIFICANT
            })
            .count();
        assert!((4..43).contains(&alarms), "{alarms} alarms in 2000");
    }

    fn windows(mean_us: impl Fn(usize) -> u32) -> [Window; WINDOWS] {
        std::array::from_fn(|at| Window { answers: 10, sum_ns: u128::from(mean_us(at)) * 10_000 })
    }

    /// Goal: a drifting run is found, a steady one and one with a single slow window are not.
    /// Method: each.
    #[test]
    fn drift_is_found() {
        let rising =
            drift(&windows(|at| 100 + u32::try_from(at).expect("small"))).expect("rises 18 %");
        assert_eq!((rising.first_quarter_us, rising.last_quarter_us), (102.0, 117.0));
        assert_eq!(drift(&windows(|at| 100 + u32::try_from(at % 3).expect("small"))), None);
        assert_eq!(drift(&windows(|at| if at == 19 { 9_000 } else { 100 })), None);
        assert_eq!(drift(&windows(|at| 1_000 + u32::try_from(at).expect("small"))), None, "2 %");
    }

    proptest! {
        /// Goal: an interval is ordered, holds only what was measured, and is the same for the same
        /// seed. Method: any values.
        #[test]
        fn intervals_are_sane(values in proptest::collection::vec(-1e9f64..1e9, 3..30), seed: u64) {
            let interval = bootstrap_median(&values, seed, 400).expect("three values or more");
            let [low, high] = interval;
            prop_assert!(low <= high);
            prop_assert!(values.iter().any(|v| *v <= low) && values.iter().any(|v| *v >= high));
            prop_assert_eq!(Some(interval), bootstrap_median(&values, seed, 400));
        }
    }
}
