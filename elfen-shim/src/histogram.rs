//! Histograms with logarithmic buckets: of the lengths of runs, and of the times between samples.
//!
//! [`Histogram`] allocates buckets as it needs them. The sampling loop must not allocate, so
//! [`IntervalHistogram`] has all its buckets from the start.

use std::collections::BTreeMap;

/// Lengths of runs. It has 32 buckets per power of two, so a quantile is off by 3 % at most.
#[derive(Clone, Debug, Default)]
pub struct Histogram {
    buckets: BTreeMap<u32, u64>,
    count: u64,
    max: u64,
}

impl Histogram {
    pub fn add(&mut self, value: u64) {
        *self.buckets.entry(bucket(value)).or_default() += 1;
        self.count += 1;
        self.max = self.max.max(value);
    }

    pub(crate) fn add_all(&mut self, other: &Self) {
        for (&bucket, count) in &other.buckets {
            *self.buckets.entry(bucket).or_default() += count;
        }
        self.count += other.count;
        self.max = self.max.max(other.max);
    }

    pub fn count(&self) -> u64 {
        self.count
    }

    pub fn max(&self) -> u64 {
        self.max
    }

    pub fn quantile(&self, percent: u64) -> u64 {
        let rank = (self.count * percent).div_ceil(100).max(1);
        let mut below = 0;
        let reached = self.buckets.iter().find(|(_, count)| {
            below += **count;
            below >= rank
        });
        reached.map_or(0, |(&bucket, _)| middle(bucket).min(self.max))
    }

    /// Lower bound, upper bound and count of each bucket that is not empty.
    pub fn columns(&self) -> impl Iterator<Item = (u64, u64, u64)> {
        self.buckets.iter().map(|(&bucket, &count)| (lowest(bucket), lowest(bucket + 1), count))
    }
}

fn bucket(value: u64) -> u32 {
    let power = 63 - (value | 1).leading_zeros();
    if power < 5 {
        return u32::try_from(value).unwrap_or(0);
    }
    let below = u32::try_from(value >> (power - 5) & 31).unwrap_or(0);
    (power - 4) * 32 + below
}

fn lowest(bucket: u32) -> u64 {
    match bucket {
        0..32 => bucket.into(),
        bucket => (32 + u64::from(bucket % 32)).checked_shl(bucket / 32 - 1).unwrap_or(u64::MAX),
    }
}

fn middle(bucket: u32) -> u64 {
    let (low, high) = (lowest(bucket), lowest(bucket.saturating_add(1)));
    low + high.saturating_sub(low) / 2
}

/// Buckets of an [`IntervalHistogram`]: 16 per power of two of ticks.
const INTERVAL_BUCKETS: usize = 64 * 16;

/// Ticks between samples, counted without allocating.
#[derive(Debug)]
pub(crate) struct IntervalHistogram(Vec<u32>);

impl IntervalHistogram {
    pub(crate) fn new() -> Self {
        Self(vec![0; INTERVAL_BUCKETS])
    }

    #[inline(always)]
    pub(crate) fn add(&mut self, ticks: u64) {
        self.0[interval_bucket(ticks)] += 1;
    }

    /// The smallest value that `percent` of all intervals do not exceed.
    pub(crate) fn quantile(&self, percent: u64) -> u64 {
        let total: u64 = self.0.iter().map(|&count| u64::from(count)).sum();
        let rank = (total * percent).div_ceil(100).max(1);
        let mut below = 0;
        for (index, &count) in self.0.iter().enumerate() {
            below += u64::from(count);
            if below >= rank {
                return lowest_ticks(index);
            }
        }
        0
    }
}

fn interval_bucket(ticks: u64) -> usize {
    let power = 63 - (ticks | 1).leading_zeros();
    let below = if power >= 4 { ticks >> (power - 4) & 15 } else { ticks & 15 };
    let power = usize::try_from(power).unwrap_or(0);
    (power * 16 + usize::try_from(below).unwrap_or(0)).min(INTERVAL_BUCKETS - 1)
}

fn lowest_ticks(bucket: usize) -> u64 {
    let (power, below) = (bucket / 16, bucket as u64 % 16);
    match power {
        0..4 => below,
        power => (16 + below) << (power - 4),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use elfen_console::duration::number;

    #[test]
    fn interval_quantiles_are_within_a_sixteenth() {
        let mut intervals = IntervalHistogram::new();
        (1..=1_000).for_each(|ticks| intervals.add(ticks * 100));
        for (percent, expected) in [(1, 1_000), (50, 50_000), (99, 99_000)] {
            let found = intervals.quantile(percent);
            assert!((expected - expected / 16..=expected).contains(&found), "{percent}: {found}");
        }
        assert_eq!(IntervalHistogram::new().quantile(50), 0);
    }

    #[test]
    fn lengths_are_within_three_percent() {
        let mut histogram = Histogram::default();
        (1..=1000).for_each(|value| histogram.add(value * 1000));
        for (percent, expected) in [(50, 500_000.0), (99, 990_000.0)] {
            let found = number(histogram.quantile(percent));
            assert!((found / expected - 1.0).abs() < 0.035, "{percent}: {found}");
        }
        assert_eq!((histogram.max(), Histogram::default().quantile(50)), (1_000_000, 0));
        for value in [0, 1, 31, 32, 33, 1 << 20, u64::MAX] {
            let at = bucket(value);
            assert!(
                lowest(at) <= value && (value < lowest(at + 1) || value == u64::MAX),
                "{value}"
            );
        }
    }
}
