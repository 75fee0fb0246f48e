//! How long the last requests took.

use std::collections::VecDeque;

const REMEMBERED: usize = 1_000;
/// With fewer there is no 95 % to speak of.
const FEWEST: usize = 100;
/// Sorting a thousand numbers for each request would be the largest part of its cost.
const REFRESH_EVERY: u32 = 100;

#[derive(Clone, Debug, Default)]
pub(super) struct Recent {
    latencies: VecDeque<u64>,
    since: u32,
    p95_ns: Option<u64>,
}

impl Recent {
    pub(super) fn add(&mut self, latency_ns: u64) {
        if self.latencies.len() == REMEMBERED {
            self.latencies.pop_front();
        }
        self.latencies.push_back(latency_ns);
        self.since += 1;
        if self.since >= REFRESH_EVERY && self.latencies.len() >= FEWEST {
            self.since = 0;
            let mut sorted: Vec<u64> = self.latencies.iter().copied().collect();
            sorted.sort_unstable();
            let rank = (sorted.len() * 95).div_ceil(100);
            self.p95_ns = Some(sorted[rank - 1]);
        }
    }

    pub(super) fn p95(&self) -> Option<u64> {
        self.p95_ns
    }
}
