//! Rates: the change of a counter from sample to sample, divided by that of the clock or of another
//! counter.
//!
//! The rates under each tag of the thread form one distribution. All tables are allocated before
//! the first sample. `filter.rs` decides which rates to keep.

use std::collections::BTreeMap;

use crate::clock::Clock;
use crate::filter;
use crate::histogram::bucket_at;
use crate::recording::{Dte, RateFigure};

/// The number of distributions of one rate. Tags beyond this number share the last one.
const TAGS: usize = 256;
/// The powers of two that the buckets cover: from 2^-20 to 2^20.
const OCTAVES: u64 = 40;
/// 16 buckets per power of two, after one bucket for zero.
const BUCKETS: usize = 16 * 40 + 1;
/// The upper bits of the lowest bucket's f64: its exponent, and four bits of its mantissa.
const LOWEST: u64 = (1023 - OCTAVES / 2) << 4;

/// One rate, and its distribution under each tag.
#[derive(Debug)]
pub struct Rate {
    pub name: String,
    /// Index of the word with the counter.
    pub counter: usize,
    /// Index of the word with the divisor; `None` for the clock.
    pub divisor: Option<usize>,
    /// The unit of time in ticks, if the divisor is the clock.
    pub ticks_per_unit: f64,
    floor_ticks: u64,
    tags: Vec<u64>,
    counts: Vec<[u32; BUCKETS]>,
    seen: Vec<u64>,
    kept: u64,
    discarded: u64,
    shrunk: u64,
}

/// The part of a sample that one rate needs.
#[derive(Clone, Copy, Debug)]
pub struct RatePoint {
    pub start: u64,
    pub end: u64,
    pub counter: u64,
    pub divisor: u64,
}

impl Rate {
    pub fn new(
        name: String,
        counter: usize,
        divisor: Option<usize>,
        ticks_per_unit: f64,
        floor_ticks: u64,
    ) -> Self {
        Self {
            name,
            counter,
            divisor,
            ticks_per_unit,
            floor_ticks,
            tags: Vec::with_capacity(TAGS),
            counts: vec![[0; BUCKETS]; TAGS],
            seen: vec![0; TAGS],
            kept: 0,
            discarded: 0,
            shrunk: 0,
        }
    }

    /// Adds the rate between two samples to the distribution of a tag.
    pub fn add(&mut self, tag: u64, last: &RatePoint, now: &RatePoint) {
        let index = self.index_of(tag);
        self.seen[index] += 1;
        let (starts, ends) = (now.start - last.start, now.end - last.end);
        let Some(counter) = now.counter.checked_sub(last.counter) else {
            self.shrunk += 1;
            return;
        };
        let Some(divisor) = now.divisor.checked_sub(last.divisor) else {
            self.shrunk += 1;
            return;
        };
        if !filter::keep(starts, ends, self.floor_ticks) {
            self.discarded += 1;
            return;
        }
        self.kept += 1;
        let divisor = match self.divisor {
            None => float(starts) / self.ticks_per_unit,
            Some(_) if divisor == 0 => return,
            Some(_) => float(divisor),
        };
        self.counts[index][bucket(float(counter) / divisor)] += 1;
    }

    fn index_of(&mut self, tag: u64) -> usize {
        if let Some(index) = self.tags.iter().position(|&known| known == tag) {
            return index;
        }
        if self.tags.len() < TAGS - 1 {
            self.tags.push(tag);
            return self.tags.len() - 1;
        }
        TAGS - 1
    }

    /// The distributions, sorted by number of samples, largest first.
    pub fn figures(&self, mut name_of: impl FnMut(u64) -> String) -> Vec<RateFigure> {
        // A function may have several addresses with the same name.
        let mut by_name: BTreeMap<String, (u64, [u32; BUCKETS])> = BTreeMap::new();
        for (index, counts) in self.counts.iter().enumerate().filter(|(i, _)| self.seen[*i] > 0) {
            let tag = self.tags.get(index).map_or_else(|| "(others)".to_owned(), |&t| name_of(t));
            let (seen, sum) = by_name.entry(tag).or_insert((0, [0; BUCKETS]));
            *seen += self.seen[index];
            sum.iter_mut().zip(counts).for_each(|(sum, count)| *sum = sum.saturating_add(*count));
        }
        let mut all: Vec<(u64, RateFigure)> = Vec::new();
        for (tag, (seen, counts)) in by_name {
            let kept: u64 = counts.iter().map(|&count| u64::from(count)).sum();
            let buckets = (0..).zip(counts.iter().map(|&count| u64::from(count)));
            let at = |percent| {
                bucket_at(buckets.clone(), percent).map_or(0.0, |bucket| rate_of(bucket as usize))
            };
            let kept_percent = 100.0 * float(kept) / float(seen);
            let (name, median) = (self.name.clone(), at(50));
            let figure = RateFigure { name, tag, median, p10: at(10), p90: at(90), kept_percent };
            all.push((seen, figure));
        }
        all.sort_by_key(|(seen, _)| std::cmp::Reverse(*seen));
        all.into_iter().map(|(_, figure)| figure).collect()
    }

    pub fn dte(&self, clock: &Clock) -> Dte {
        Dte {
            tolerance_percent: filter::TOLERANCE_PERCENT,
            floor_ns: clock.exact_ns(self.floor_ticks),
            kept: self.kept,
            discarded: self.discarded,
            shrunk: self.shrunk,
        }
    }
}

fn float(value: u64) -> f64 {
    elfen_console::duration::number(value)
}

fn bucket(rate: f64) -> usize {
    if rate <= 0.0 {
        return 0;
    }
    let at = (rate.to_bits() >> 48).saturating_sub(LOWEST);
    usize::try_from(at).map_or(BUCKETS - 1, |at| (at + 1).min(BUCKETS - 1))
}

/// The middle of a bucket.
fn rate_of(bucket: usize) -> f64 {
    match bucket {
        0 => 0.0,
        at => f64::from_bits((LOWEST + at as u64 - 1) << 48 | 1 << 47),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: hardware counts give the right rate. Samples in which the observer was delayed or the
    /// counter decreased give no rate. Method: the counts of a core that executes 1.6 instructions
    /// per cycle, with one sample of each kind among them.
    #[test]
    fn hardware_counts_yield_the_ipc() {
        let counts = [
            (0, 30, 0, 0),
            (1_000, 1_030, 1_600, 1_000),
            (2_000, 2_030, 3_200, 2_000),
            (3_000, 29_000, 46_400, 29_000), // interrupted between its two ends
            (30_000, 30_030, 48_000, 30_000),
            (31_000, 31_030, 49_600, 31_000),
            (32_000, 32_030, 7, 32_000), // the counter was reset
            (33_000, 33_030, 1_607, 33_000),
        ];
        let point = |(start, end, counter, divisor)| RatePoint { start, end, counter, divisor };
        let mut ipc = Rate::new("instructions/cycles".into(), 0, Some(1), 1.0, 52);
        for pair in counts.windows(2) {
            ipc.add(5, &point(pair[0]), &point(pair[1]));
        }
        let [figure] = &ipc.figures(|tag| format!("tag {tag}"))[..] else { panic!("one tag") };
        assert!((figure.median - 1.6).abs() < 0.05, "{figure:?}");
        assert!((figure.p90 / figure.p10 - 1.0).abs() < 0.05, "{figure:?}");
        assert_eq!(figure.tag, "tag 5");
        let dte =
            ipc.dte(&Clock { ticks_per_second: 2_600_000_000, step_ticks: 26, unit_ticks: 0 });
        assert_eq!((dte.kept, dte.discarded, dte.shrunk, dte.floor_ns), (4, 2, 1, 20.0));
    }

    #[test]
    fn buckets_are_within_six_percent() {
        for rate in [1e-5, 0.03, 0.59, 1.0, 1.6, 37.0, 9e5] {
            assert!((rate_of(bucket(rate)) / rate - 1.0).abs() < 0.06, "{rate}");
        }
        assert_eq!((rate_of(bucket(0.0)), bucket(f64::INFINITY)), (0.0, BUCKETS - 1));
    }

    #[test]
    fn tags_beyond_the_table_share_one_distribution() {
        let mut rate = Rate::new("calls".into(), 0, None, 1.0, 1);
        let point = |at: u64| RatePoint { start: at, end: at, counter: at, divisor: 0 };
        for tag in 0..1000 {
            rate.add(tag, &point(0), &point(100));
        }
        let figures = rate.figures(|tag| tag.to_string());
        assert_eq!(figures.len(), TAGS);
        assert_eq!((figures[0].tag.as_str(), figures[0].kept_percent), ("(others)", 100.0));
    }
}
