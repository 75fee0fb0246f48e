//! What a simulation counts: sums and a histogram, but no list of requests. Outcomes can be added
//! in any order.

use elfen_rt::policy::slo::Slo;
use hdrhistogram::Histogram;

use super::pair::{Batch, Tally};
use super::time::{milliseconds, real};

/// The longest latency of the histogram: three hours.
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
    /// Windows with at least one request, and those of them that met the SLO.
    pub windows: u64,
    pub windows_held: u64,
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
        // Longer latencies count as the longest: an overloaded queue grows without bound.
        self.latencies.saturating_record(ended_ns - arrived_ns);
    }

    /// Adds the counts of one core up to `end_ns`.
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

    /// The latency that this share of the requests does not exceed; 0 without requests.
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

    /// Simulated time, summed over all cores.
    pub fn core_seconds(&self) -> f64 {
        part(self.core_ns, 1_000_000_000)
    }

    /// The part of the time in which a request runs.
    pub fn request_lane_utilisation(&self) -> f64 {
        part(u128::from(self.tally.busy_ns), self.core_ns)
    }

    /// The part of the time in which the batch runs next to an idle lane.
    pub fn borrowed_fraction(&self) -> f64 {
        part(u128::from(self.tally.borrowed_ns), self.core_ns)
    }

    /// The part of the time in which both lanes run.
    pub fn overlapped_fraction(&self) -> f64 {
        part(u128::from(self.tally.overlapped_ns), self.core_ns)
    }

    /// The utilisation of a core: 2.0 is both lanes always busy.
    pub fn utilisation(&self) -> f64 {
        self.request_lane_utilisation() + self.borrowed_fraction() + self.overlapped_fraction()
    }

    /// The work of the batch, relative to cores of its own.
    pub fn batch_work(&self, batch: &Batch) -> f64 {
        let slowdown = real(batch.batch_slowdown_milli) / 1000.0;
        self.borrowed_fraction() + self.overlapped_fraction() / slowdown
    }

    /// The part of the windows that met the SLO; 1 without windows.
    pub fn held_fraction(&self) -> f64 {
        if self.windows == 0 { 1.0 } else { real(self.windows_held) / real(self.windows) }
    }
}

/// The quotient; 0 if `of` is 0.
fn part(some: u128, of: u128) -> f64 {
    if of == 0 { 0.0 } else { some as f64 / of as f64 }
}
