//! Histograms of the lengths of runs, and of the times between samples. Both have 32 buckets per
//! power of two, so the error of a quantile is at most 3 %.
//!
//! [`Histogram`] allocates buckets as it needs them. The sampling loop must not allocate, so
//! [`IntervalHistogram`] has all its buckets from the start.

use std::collections::BTreeMap;

/// Lengths of runs.
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
        let buckets = self.buckets.iter().map(|(&bucket, &count)| (bucket, count));
        bucket_at(buckets, percent).map_or(0, |bucket| middle(bucket).min(self.max))
    }

    /// Lower bound, upper bound and count of each bucket that is not empty.
    pub fn columns(&self) -> impl Iterator<Item = (u64, u64, u64)> {
        self.buckets.iter().map(|(&bucket, &count)| (lowest(bucket), lowest(bucket + 1), count))
    }
}

/// Finds the bucket at which `percent` of all values are reached. Buckets are passed in order.
pub(crate) fn bucket_at(
    mut buckets: impl Iterator<Item = (u32, u64)> + Clone,
    percent: u64,
) -> Option<u32> {
    let total: u64 = buckets.clone().map(|(_, count)| count).sum();
    let rank = (total * percent).div_ceil(100).max(1);
    let mut below = 0;
    let reached = buckets.find(|(_, count)| {
        below += count;
        below >= rank
    });
    reached.map(|(bucket, _)| bucket)
}

#[inline(always)]
fn bucket(value: u64) -> u32 {
    let power = 63 - (value | 1).leading_zeros();
    if power < 5 {
        return (value & 31) as u32;
    }
    (power - 4) * 32 + (value >> (power - 5) & 31) as u32
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

/// The buckets of all numbers of 64 bits.
const BUCKETS: usize = 60 * 32;

/// Times between samples in ticks, counted without allocations.
#[derive(Debug)]
pub(crate) struct IntervalHistogram(Box<[u32; BUCKETS]>);

impl IntervalHistogram {
    pub(crate) fn new() -> Self {
        Self(Box::new([0; BUCKETS]))
    }

    #[inline(always)]
    pub(crate) fn add(&mut self, ticks: u64) {
        self.0[bucket(ticks) as usize] += 1;
    }

    /// The lower bound of the bucket at which `percent` of all intervals are reached.
    pub(crate) fn quantile(&self, percent: u64) -> u64 {
        let buckets = (0..).zip(self.0.iter().map(|&count| u64::from(count)));
        bucket_at(buckets, percent).map_or(0, lowest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use elfen_console::duration::number;

    #[test]
    fn interval_quantiles_are_within_three_percent() {
        let mut intervals = IntervalHistogram::new();
        (1..=1_000).for_each(|ticks| intervals.add(ticks * 100));
        for (percent, expected) in [(1, 1_000), (50, 50_000), (99, 99_000)] {
            let found = intervals.quantile(percent);
            assert!((expected - expected / 32..=expected).contains(&found), "{percent}: {found}");
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
            assert!((at as usize) < BUCKETS, "{value}");
            assert!(
                lowest(at) <= value && (value < lowest(at + 1) || value == u64::MAX),
                "{value}"
            );
        }
    }
}
