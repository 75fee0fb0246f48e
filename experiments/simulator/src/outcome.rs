//! The outcome of a simulation: sums and a histogram of latencies, without a list of requests.
//! Outcomes can be added in any order.

use elfen_rt::policy::slo::Slo;
use hdrhistogram::Histogram;
use serde::Serialize;

use super::pair::{Batch, Tally};
use super::time::{milliseconds, real};

/// The longest latency that the histogram distinguishes: three hours.
const HIGHEST_NS: u64 = 3 * 3600 * 1_000_000_000;

/// The counts of a simulation.
#[derive(Clone, Debug)]
pub struct Outcome {
    latencies: Histogram<u64>,
    latency_sum_ns: u128,
    wait_sum_ns: u128,
    pub requests: u64,
    pub tally: Tally,
    /// Simulated time, summed over all cores.
    pub core_ns: u128,
    /// Windows with at least one request. `windows_held` counts those in which the SLO was met.
    pub windows: u64,
    pub windows_held: u64,
}

/// The numbers of an outcome that commands print.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    pub requests: u64,
    pub p50_ms: f64,
    pub p95_ms: f64,
    pub p99_ms: f64,
    pub p999_ms: f64,
    pub mean_ms: f64,
    pub mean_wait_ms: f64,
    pub utilisation: f64,
    pub request_lane_utilisation: f64,
    pub batch_lane_utilisation: f64,
    pub borrowed_fraction: f64,
    pub overlapped_fraction: f64,
    /// The batch's time next to requests, as a part of the time in which requests ran.
    pub overlapped: f64,
    /// The batch's work, as a part of the work that it would do on cores of its own.
    pub batch_work: f64,
    pub naps: u64,
}

impl Default for Outcome {
    fn default() -> Self {
        let latencies = Histogram::new_with_bounds(1, HIGHEST_NS, 3);
        Self {
            latencies: latencies.expect("the bounds and the digits are in range"),
            latency_sum_ns: 0,
            wait_sum_ns: 0,
            requests: 0,
            tally: Tally::default(),
            core_ns: 0,
            windows: 0,
            windows_held: 0,
        }
    }
}

impl Outcome {
    #[inline]
    pub fn record(&mut self, arrived_ns: u64, started_ns: u64, ended_ns: u64) {
        self.requests += 1;
        self.latency_sum_ns += u128::from(ended_ns - arrived_ns);
        self.wait_sum_ns += u128::from(started_ns - arrived_ns);
        // Latencies above the bound are counted as the bound: in an overloaded queue, latencies
        // grow without limit.
        self.latencies.saturating_record(ended_ns - arrived_ns);
    }

    /// Adds the counts of one core, which was simulated until `end_ns`.
    pub fn close_core(&mut self, tally: &Tally, end_ns: u64) {
        self.tally.busy_ns += tally.busy_ns;
        self.tally.borrowed_ns += tally.borrowed_ns;
        self.tally.overlapped_ns += tally.overlapped_ns;
        self.tally.naps += tally.naps;
        self.tally.finished += tally.finished;
        self.core_ns += u128::from(end_ns);
    }

    pub fn add(&mut self, other: &Self) {
        self.latencies.add(&other.latencies).expect("both have the same bounds");
        self.latency_sum_ns += other.latency_sum_ns;
        self.wait_sum_ns += other.wait_sum_ns;
        self.requests += other.requests;
        self.close_core(&other.tally, 0);
        self.core_ns += other.core_ns;
        self.windows += other.windows;
        self.windows_held += other.windows_held;
    }

    /// Returns the latency that this share of the requests does not exceed, or 0 without requests.
    pub fn quantile_ns(&self, share: f64) -> u64 {
        self.latencies.value_at_quantile(share)
    }

    pub fn tail_ns(&self, slo: &Slo) -> u64 {
        self.quantile_ns(f64::from(slo.per_million) / 1e6)
    }

    pub fn quantile_ms(&self, share: f64) -> f64 {
        milliseconds(self.quantile_ns(share))
    }

    pub fn mean_ms(&self) -> f64 {
        part(self.latency_sum_ns, u128::from(self.requests)) / 1e6
    }

    pub fn mean_wait_ns(&self) -> f64 {
        part(self.wait_sum_ns, u128::from(self.requests))
    }

    /// Returns the simulated time, summed over all cores.
    pub fn core_seconds(&self) -> f64 {
        part(self.core_ns, 1_000_000_000)
    }

    /// Returns the part of the time in which a request runs.
    pub fn request_lane_utilisation(&self) -> f64 {
        part(u128::from(self.tally.busy_ns), self.core_ns)
    }

    /// Returns the part of the time in which the batch runs while the request lane idles.
    pub fn borrowed_fraction(&self) -> f64 {
        part(u128::from(self.tally.borrowed_ns), self.core_ns)
    }

    /// Returns the part of the time in which a request and the batch run at the same time.
    pub fn overlapped_fraction(&self) -> f64 {
        part(u128::from(self.tally.overlapped_ns), self.core_ns)
    }

    /// Returns the part of the time in which the batch runs.
    pub fn batch_lane_utilisation(&self) -> f64 {
        self.borrowed_fraction() + self.overlapped_fraction()
    }

    /// Returns the utilisation of a core: 2.0 if both lanes are always busy.
    pub fn utilisation(&self) -> f64 {
        self.request_lane_utilisation() + self.borrowed_fraction() + self.overlapped_fraction()
    }

    /// Returns the batch's work, as a part of the work that it would do on cores of its own.
    pub fn batch_work(&self, batch: &Batch) -> f64 {
        let slowdown = real(batch.batch_slowdown_milli) / 1000.0;
        self.borrowed_fraction() + self.overlapped_fraction() / slowdown
    }

    pub fn summary(&self, batch: &Batch) -> Summary {
        Summary {
            requests: self.requests,
            p50_ms: self.quantile_ms(0.5),
            p95_ms: self.quantile_ms(0.95),
            p99_ms: self.quantile_ms(0.99),
            p999_ms: self.quantile_ms(0.999),
            mean_ms: self.mean_ms(),
            mean_wait_ms: self.mean_wait_ns() / 1e6,
            utilisation: self.utilisation(),
            request_lane_utilisation: self.request_lane_utilisation(),
            batch_lane_utilisation: self.batch_lane_utilisation(),
            borrowed_fraction: self.borrowed_fraction(),
            overlapped_fraction: self.overlapped_fraction(),
            overlapped: part(self.tally.overlapped_ns.into(), self.tally.busy_ns.into()),
            batch_work: self.batch_work(batch),
            naps: self.tally.naps,
        }
    }

    /// Returns the part of the windows in which the SLO was met, or 1 without windows.
    pub fn held_fraction(&self) -> f64 {
        if self.windows == 0 { 1.0 } else { real(self.windows_held) / real(self.windows) }
    }
}

/// Divides `some` by `of`, and returns 0 if `of` is 0.
fn part(some: u128, of: u128) -> f64 {
    if of == 0 { 0.0 } else { some as f64 / of as f64 }
}
