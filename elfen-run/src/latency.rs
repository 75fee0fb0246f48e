//! Latencies as reports show them.

use elfen_rt::signal::histogram::{BUCKETS, Histogram, bucket_top_ns, quantile_ns};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The distribution of a latency.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Latency {
    /// The median. `null` without samples.
    #[serde(deserialize_with = "Option::deserialize")]
    pub median: Option<u64>,
    /// The 99th percentile. `null` without samples.
    #[serde(deserialize_with = "Option::deserialize")]
    pub p99: Option<u64>,
    /// The maximum. `null` without samples.
    #[serde(deserialize_with = "Option::deserialize")]
    pub max: Option<u64>,
    /// The number of samples.
    pub n: u64,
}

impl Latency {
    /// The sum of several histograms.
    pub(super) fn of<'a>(histograms: impl Iterator<Item = &'a Histogram>) -> Self {
        let mut counts = [0; BUCKETS];
        let mut max = 0;
        for histogram in histograms {
            max = max.max(histogram.max_ns());
            counts.iter_mut().zip(histogram.counts()).for_each(|(sum, count)| *sum += count);
        }
        let n = counts.iter().sum();
        let quantile = |per_million| {
            quantile_ns(counts.iter().copied(), per_million).map(|value_ns| value_ns.min(max))
        };
        Self {
            median: quantile(500_000),
            p99: quantile(990_000),
            max: (n > 0).then_some(max.min(bucket_top_ns(BUCKETS - 1))),
            n,
        }
    }
}
