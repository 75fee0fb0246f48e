//! A latency histogram in shared memory, with 16 buckets for every power of two: no value is off by
//! more than 6 %.
//!
//! Values are nanoseconds up to 2^40 (18 minutes); longer values count in the last bucket. The size
//! is fixed, because the histogram lies in a page. Readers copy nothing: they compute a quantile
//! from the buckets while the writer continues.

use core::mem::size_of;
use core::sync::atomic::{AtomicU64, Ordering::*};

const BUCKETS_PER_OCTAVE_LOG2: u32 = 4;
const VALUE_BITS: u32 = 40;
/// 16 exact buckets, then 16 for each octave up to 2^40.
pub const BUCKETS: usize =
    ((VALUE_BITS - BUCKETS_PER_OCTAVE_LOG2 + 1) << BUCKETS_PER_OCTAVE_LOG2) as usize;

/// A histogram with one writer, or with several through [`Histogram::record_shared`].
#[repr(C, align(128))]
#[derive(Debug)]
pub struct Histogram {
    counts: [AtomicU64; BUCKETS],
    sum_ns: AtomicU64,
    max_ns: AtomicU64,
    reserved: [AtomicU64; 14],
}

const _: () = assert!(BUCKETS == 592 && size_of::<Histogram>() == 4864);

/// The bucket that `ns` counts in.
#[inline]
pub const fn bucket_of(ns: u64) -> usize {
    let ns = if ns >> VALUE_BITS == 0 { ns } else { (1 << VALUE_BITS) - 1 };
    let top_bit = 63 - (ns | 1).leading_zeros();
    let shift = top_bit.saturating_sub(BUCKETS_PER_OCTAVE_LOG2);
    // At most 592: `ns` has at most 40 bits.
    #[expect(clippy::cast_possible_truncation, reason = "below BUCKETS")]
    let bucket = ((shift << BUCKETS_PER_OCTAVE_LOG2) as u64 + (ns >> shift)) as usize;
    bucket
}

/// The highest value that counts in `bucket`; every value there is at least 15/16 of it.
pub const fn bucket_top_ns(bucket: usize) -> u64 {
    let octave = bucket >> BUCKETS_PER_OCTAVE_LOG2;
    if octave < 2 {
        return bucket as u64;
    }
    let shift = octave - 1;
    let step = (bucket - (shift << BUCKETS_PER_OCTAVE_LOG2)) as u64;
    ((step + 1) << shift) - 1
}

impl Histogram {
    /// Counts a value. The caller is the only writer, so a load and a store suffice.
    #[inline]
    pub fn record(&self, ns: u64) {
        // `bucket_of` is below BUCKETS for every value. `get` avoids code that panics in other
        // people's processes.
        if let Some(count) = self.counts.get(bucket_of(ns)) {
            add(count, 1);
        }
        add(&self.sum_ns, ns);
        if ns > self.max_ns.load(Relaxed) {
            self.max_ns.store(ns, Relaxed);
        }
    }

    /// Counts a value where several threads write.
    #[inline]
    pub fn record_shared(&self, ns: u64) {
        if let Some(count) = self.counts.get(bucket_of(ns)) {
            count.fetch_add(1, Relaxed);
        }
        self.sum_ns.fetch_add(ns, Relaxed);
        self.max_ns.fetch_max(ns, Relaxed);
    }

    /// Values counted so far.
    pub fn count(&self) -> u64 {
        self.counts.iter().fold(0, |sum, count| sum.wrapping_add(count.load(Relaxed)))
    }

    pub fn max_ns(&self) -> u64 {
        self.max_ns.load(Relaxed)
    }

    /// The sum of all values.
    pub fn sum_ns(&self) -> u64 {
        self.sum_ns.load(Relaxed)
    }

    /// The mean of all values; `None` while the histogram is empty.
    pub fn mean_ns(&self) -> Option<u64> {
        self.sum_ns.load(Relaxed).checked_div(self.count())
    }

    /// The current counts, bucket by bucket. A window is the difference of two readings.
    pub fn counts(&self) -> impl Iterator<Item = u64> + Clone + '_ {
        self.counts.iter().map(|count| count.load(Relaxed))
    }

    /// The value that `per_million` of a million values do not exceed, rounded up to the top of its
    /// bucket; `None` while the histogram is empty.
    pub fn quantile_ns(&self, per_million: u32) -> Option<u64> {
        quantile_ns(self.counts(), per_million).map(|value_ns| value_ns.min(self.max_ns()))
    }
}

/// The quantile of counts in the order of the buckets: for windows, and for the sum of several
/// histograms.
pub fn quantile_ns(counts: impl Iterator<Item = u64> + Clone, per_million: u32) -> Option<u64> {
    let count: u128 = counts.clone().map(u128::from).sum();
    if count == 0 {
        return None;
    }
    let rank = (count * u128::from(per_million.min(1_000_000))).div_ceil(1_000_000).max(1);
    let mut below = 0u128;
    let mut counts = counts;
    let last = counts.position(|count| {
        below += u128::from(count);
        below >= rank
    });
    // Counts that grow meanwhile only end the search earlier.
    Some(bucket_top_ns(last.unwrap_or(BUCKETS - 1)))
}

/// Adds to a word that has one writer, without a locked instruction.
#[inline]
fn add(word: &AtomicU64, amount: u64) {
    word.store(word.load(Relaxed).wrapping_add(amount), Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::boxed::Box;
    use std::vec::Vec;

    fn empty() -> Box<Histogram> {
        Box::new(Histogram {
            counts: [const { AtomicU64::new(0) }; BUCKETS],
            sum_ns: AtomicU64::new(0),
            max_ns: AtomicU64::new(0),
            reserved: [const { AtomicU64::new(0) }; 14],
        })
    }

    #[test]
    fn buckets_join_without_gap_or_overlap() {
        let mut next = 0;
        for bucket in 0..BUCKETS {
            assert_eq!(bucket_of(next), bucket, "first value of bucket {bucket}");
            assert_eq!(bucket_of(bucket_top_ns(bucket)), bucket, "last value of bucket {bucket}");
            next = bucket_top_ns(bucket) + 1;
        }
        assert_eq!(next, 1 << VALUE_BITS);
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn an_empty_histogram_has_no_quantile() {
        let histogram = empty();
        assert_eq!((histogram.quantile_ns(990_000), histogram.mean_ns()), (None, None));
    }

    proptest! {
        /// Compared with the sorted values, a quantile is never too low, and at most one sixteenth
        /// too high.
        #[test]
        fn quantiles_match_the_sorted_values(
            mut values in prop::collection::vec(0u64..1 << 36, 1..400),
            per_million in 0u32..=1_000_000,
        ) {
            let histogram = empty();
            for &value in &values {
                histogram.record(value);
            }
            values.sort_unstable();
            let rank = (values.len() as u64 * u64::from(per_million)).div_ceil(1_000_000).max(1);
            let truth = values[usize::try_from(rank).unwrap() - 1];
            let found = histogram.quantile_ns(per_million).unwrap();
            prop_assert!(found >= truth && found <= truth + truth / 16, "{found} for {truth}");
            prop_assert_eq!(histogram.count(), values.len() as u64);
            prop_assert_eq!(histogram.max_ns(), *values.last().unwrap());
            prop_assert_eq!(histogram.sum_ns(), values.iter().sum::<u64>());
        }

        #[test]
        fn both_ways_of_recording_agree(values: Vec<u64>) {
            let (alone, shared) = (empty(), empty());
            for &value in &values {
                alone.record(value);
                shared.record_shared(value);
            }
            prop_assert!(alone.counts().eq(shared.counts()));
            prop_assert_eq!(alone.max_ns(), shared.max_ns());
            prop_assert_eq!(alone.mean_ns(), shared.mean_ns());
        }
    }
}
