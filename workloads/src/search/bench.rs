//! Measures one worker without a network: the demand of each query, queries per second, and the
//! cost of publishing to the service page.

use super::index::SearchIndex;
use crate::load::Distribution;
use crate::load::report::Latency;
use crate::units::{seconds, show_us};
use elfen_rt::clock::monotonic_ns;
use elfen_rt::service::{Service, Worker};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_xoshiro::Xoshiro256PlusPlus;
use serde::Serialize;
use std::fmt::Write;
use std::{fs, io};

const PUBLISHES: u64 = 1_000_000;
const HITS: usize = 10;

#[derive(Debug, Serialize)]
pub(super) struct SearchBenchReport {
    documents: u64,
    queries: usize,
    passes: u32,
    searches: u64,
    /// The time of one search, in microseconds.
    demand_us: Latency,
    /// Searches by their time in milliseconds: `[0]` counts searches below 1 ms.
    histogram_ms: Vec<u64>,
    queries_per_second: f64,
    /// The same of the fastest pass. Other programs and other machines only make passes slower, so
    /// it varies less.
    fastest_queries_per_second: f64,
    /// The cost of publishing one request, in a loop that does nothing else, and its share of the
    /// mean time of a search.
    publish_ns: f64,
    publish_share: f64,
    /// Anonymous memory after the first pass and after the last, in KiB. The index is not part of
    /// it.
    anonymous_kib_first: u64,
    anonymous_kib_last: u64,
}

/// Runs all queries once in each pass, in an order that is shuffled from `seed`.
pub(super) fn run(
    index: &SearchIndex,
    queries: &[String],
    passes: u32,
    seed: u64,
    service: &Service,
    worker: &mut Worker<'_>,
) -> io::Result<SearchBenchReport> {
    let mut seeker = index.seeker();
    let mut order: Vec<&String> = queries.iter().collect();
    order.shuffle(&mut Xoshiro256PlusPlus::seed_from_u64(seed));
    let mut demand = Distribution::default();
    let mut histogram_ms: Vec<u64> = Vec::new();
    let mut search = |query: &str| {
        let begin = monotonic_ns();
        let found = seeker.search(query, HITS, None);
        let took = monotonic_ns() - begin;
        std::hint::black_box(&found);
        demand.record(took);
        let bucket = usize::try_from(took / 1_000_000).unwrap_or(usize::MAX).min(999);
        if bucket >= histogram_ms.len() {
            histogram_ms.resize(bucket + 1, 0);
        }
        histogram_ms[bucket] += 1;
    };
    // The first pass reads the index into memory, and lets the allocator reach its size.
    order.iter().for_each(|query| search(query));
    let anonymous_kib_first = anonymous_kib()?;
    let begin = monotonic_ns();
    let mut fastest_ns = u64::MAX;
    for _ in 0..passes {
        let begin = monotonic_ns();
        order.iter().for_each(|query| search(query));
        fastest_ns = fastest_ns.min(monotonic_ns() - begin);
    }
    let passes_ns = monotonic_ns() - begin;
    let begin = monotonic_ns();
    (1..=PUBLISHES).for_each(|id| publish(service, worker, id));
    let publish_ns = (monotonic_ns() - begin) as f64 / PUBLISHES as f64;
    let searches = u64::from(passes) * order.len() as u64;
    Ok(SearchBenchReport {
        documents: index.manifest.documents,
        queries: queries.len(),
        passes,
        searches: demand.count(),
        demand_us: Latency::of(&demand),
        histogram_ms,
        queries_per_second: searches as f64 / seconds(passes_ns),
        fastest_queries_per_second: order.len() as f64 / seconds(fastest_ns),
        publish_ns,
        publish_share: publish_ns / demand.mean_ns(),
        anonymous_kib_first,
        anonymous_kib_last: anonymous_kib()?,
    })
}

/// Publishes what the server publishes for one request: the queue before and after it, its begin
/// and its end.
fn publish(service: &Service, worker: &mut Worker<'_>, id: u64) {
    let arrived_ns = monotonic_ns();
    service.set_queue_len(0, 1);
    service.set_queue_len(0, 0);
    worker.begin_arrived(id, arrived_ns);
    worker.end();
}

/// Resident memory of this process that is not backed by a file.
fn anonymous_kib() -> io::Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse().ok());
    kib.ok_or_else(|| io::Error::other("/proc/self/status has no RssAnon"))
}

/// The text has this many rows, one per millisecond. The JSON has all of them.
const ROWS: usize = 20;
/// The length of the longest bar of the histogram.
const BAR: usize = 50;

impl SearchBenchReport {
    pub(super) fn text(&self) -> String {
        let mut out = String::new();
        self.write(&mut out).expect("a String takes everything");
        out
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        let [p50, p90, p99, p999, max, mean] = self.demand_us.figures().map(show_us);
        writeln!(
            out,
            "{} documents, {} queries, {} searches\n\
             demand: p50 {p50}, p90 {p90}, p99 {p99}, p99.9 {p999}, max {max}, mean {mean}",
            self.documents, self.queries, self.searches
        )?;
        let most = self.histogram_ms.iter().max().copied().unwrap_or(1).max(1);
        let shown = self.histogram_ms.len().min(ROWS);
        let (rows, beyond) = self.histogram_ms.split_at(shown);
        for (ms, count) in rows.iter().enumerate() {
            let share = *count as f64 / self.searches as f64;
            let bar = usize::try_from(count * BAR as u64 / most).unwrap_or(BAR);
            writeln!(out, "{ms:4} ms {:7.3} % {}", share * 100.0, "#".repeat(bar))?;
        }
        let beyond = beyond.iter().sum::<u64>() as f64 / self.searches as f64;
        writeln!(out, "  more  {:7.3} %", beyond * 100.0)?;
        writeln!(
            out,
            "one worker: {:.0} queries/s\n\
             publishing one request: {:.0} ns, {:.3} % of a mean search\n\
             memory without the index: {} KiB after the first pass, {} KiB after the last",
            self.queries_per_second,
            self.publish_ns,
            self.publish_share * 100.0,
            self.anonymous_kib_first,
            self.anonymous_kib_last
        )
    }
}
