//! What a run did, in figures: read from its lane page and from the task map's own count of busy time.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use elfen_rt::clock::monotonic_ns;
use elfen_rt::signal::histogram::{BUCKETS, Histogram, bucket_top_ns, quantile_ns};
use elfen_rt::signal::lane::LaneSlot;
use elfen_rt::signal::page::Page;
use serde::Serialize;

use super::channels::Channels;

/// A latency of many occasions; all `None` where there was none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Latency {
    pub(crate) median: Option<u64>,
    pub(crate) p99: Option<u64>,
    pub(crate) max: Option<u64>,
    pub(crate) n: u64,
}

impl Latency {
    /// Of several histograms taken together.
    fn of<'a>(histograms: impl Iterator<Item = &'a Histogram>) -> Self {
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

/// The lanes of a run, summed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Figures {
    pub(crate) borrowed_ns: u64,
    pub(crate) overlapped_ns: u64,
    pub(crate) napped_ns: u64,
    pub(crate) naps: u64,
    pub(crate) reaction_ns: Latency,
    pub(crate) wake_ns: Latency,
}

impl Figures {
    pub(crate) fn of(lanes: &Page<LaneSlot>) -> Self {
        let sum = |word: fn(&LaneSlot) -> &AtomicU64| {
            lanes.slots().map(|slot| word(slot).load(Relaxed)).sum()
        };
        Self {
            borrowed_ns: sum(|slot| &slot.borrowed_ns),
            overlapped_ns: sum(|slot| &slot.overlapped_ns),
            napped_ns: sum(|slot| &slot.napped_ns),
            naps: sum(|slot| &slot.naps),
            reaction_ns: Latency::of(lanes.slots().map(|slot| &slot.reaction)),
            wake_ns: Latency::of(lanes.slots().map(|slot| &slot.wake)),
        }
    }
}

/// How long the request lanes have been busy so far, all together; `None` without a task map.
pub(crate) fn request_busy_ns(channels: &Channels) -> Option<u64> {
    let busy = |request| channels.busy_ns(request, monotonic_ns());
    channels.requests().into_iter().map(busy).sum()
}
