//! The counts of the service, and their Prometheus format.

use crate::beside::{Slowdown, Tally};
use crate::load::Distribution;
use crate::units::{Nanos, seconds};
use hyper::StatusCode;
use parking_lot::Mutex;
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// The upper bounds of the buckets are 62.5 us, 125 us and so on, up to 8 s.
const BUCKETS: usize = 18;
const FIRST_BUCKET_NS: Nanos = 62_500;

/// The statuses of answers. Prometheus recommends that all counters exist from the start.
const STATUSES: [u16; 7] = [200, 400, 404, 405, 413, 500, 503];

// Relaxed throughout: the counts are independent, and the coordinator reads them for `/metrics`.
#[derive(Debug)]
pub(super) struct Metrics {
    answers: Mutex<BTreeMap<u16, u64>>,
    latency: Mutex<Distribution>,
    service: Mutex<Distribution>,
    pub(super) connections: AtomicU64,
    pub(super) accepted: AtomicU64,
    slowdown: Option<Slowdown>,
    /// Sums over all request lanes, on an emulated core.
    beside_ns: AtomicU64,
    added_ns: AtomicU64,
}

impl Metrics {
    /// `slowdown` is that of the emulated core, if any.
    pub(super) fn new(slowdown: Option<Slowdown>) -> Self {
        Self {
            answers: Mutex::new(STATUSES.map(|status| (status, 0)).into()),
            latency: Mutex::default(),
            service: Mutex::default(),
            connections: AtomicU64::new(0),
            accepted: AtomicU64::new(0),
            slowdown,
            beside_ns: AtomicU64::new(0),
            added_ns: AtomicU64::new(0),
        }
    }

    /// The answer of `/health`: the service runs, and its emulated core, if any.
    pub(super) fn health(&self) -> Vec<u8> {
        let health = match self.slowdown {
            None => json!({}),
            Some(slowdown) => json!({ "emulated_core": { "slowdown": slowdown.factor() } }),
        };
        (health.to_string() + "\n").into_bytes()
    }

    /// Adds the difference between two tallies of a worker.
    pub(super) fn count_slowdown(&self, before: Tally, after: Tally) {
        self.beside_ns.fetch_add(after.all.beside_ns - before.all.beside_ns, Relaxed);
        self.added_ns.fetch_add(after.added_ns - before.added_ns, Relaxed);
    }

    pub(super) fn count_answer(&self, status: StatusCode) {
        *self.answers.lock().entry(status.as_u16()).or_default() += 1;
    }

    pub(super) fn count_search(&self, latency_ns: Nanos, service_ns: Nanos) {
        self.latency.lock().record(latency_ns);
        self.service.lock().record(service_ns);
    }

    /// The metrics in Prometheus's text format.
    pub(super) fn text(&self, queue_len: usize) -> String {
        let mut out = String::new();
        self.write(&mut out, queue_len).expect("a String takes everything");
        out
    }

    fn write(&self, out: &mut String, queue_len: usize) -> std::fmt::Result {
        write_head(out, "answers_total", "counter", "Answers by HTTP status.")?;
        for (status, count) in &*self.answers.lock() {
            writeln!(out, "elfen_search_answers_total{{status=\"{status}\"}} {count}")?;
        }
        let mut scalars = vec![
            ("queue_length", "gauge", "Requests that wait for a worker.", queue_len as f64),
            ("connections", "gauge", "Open connections.", count(&self.connections)),
            ("accepted_total", "counter", "Connections opened so far.", count(&self.accepted)),
        ];
        if let Some(slowdown) = self.slowdown {
            let help = "Emulated slowdown of a request next to a batch, as a factor.";
            scalars.push(("emulated_slowdown", "gauge", help, slowdown.factor()));
            let help = "Time that requests ran next to a batch.";
            scalars.push(("beside_seconds_total", "counter", help, count(&self.beside_ns) / 1e9));
            let help = "Time that the emulation added to requests.";
            scalars.push(("added_seconds_total", "counter", help, count(&self.added_ns) / 1e9));
        }
        for (name, kind, help, value) in scalars {
            write_head(out, name, kind, help)?;
            writeln!(out, "elfen_search_{name} {value}")?;
        }
        let help = "Time from the arrival to the end of the search.";
        write_histogram(out, "latency_seconds", help, &self.latency.lock())?;
        write_histogram(out, "service_seconds", "Time of the search only.", &self.service.lock())
    }
}

fn count(of: &AtomicU64) -> f64 {
    of.load(Relaxed) as f64
}

fn write_head(out: &mut String, name: &str, kind: &str, help: &str) -> std::fmt::Result {
    writeln!(out, "# HELP elfen_search_{name} {help}\n# TYPE elfen_search_{name} {kind}")
}

fn write_histogram(
    out: &mut String,
    name: &str,
    help: &str,
    distribution: &Distribution,
) -> std::fmt::Result {
    write_head(out, name, "histogram", help)?;
    let name = format!("elfen_search_{name}");
    for end_ns in (0..BUCKETS).map(|bucket| FIRST_BUCKET_NS << bucket) {
        let below = distribution.count_up_to(end_ns);
        writeln!(out, "{name}_bucket{{le=\"{}\"}} {below}", seconds(end_ns))?;
    }
    let (count, sum) = (distribution.count(), distribution.sum_ns() as f64 / 1e9);
    writeln!(out, "{name}_bucket{{le=\"+Inf\"}} {count}\n{name}_sum {sum}\n{name}_count {count}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: values are counted in the correct buckets, and the text has Prometheus's format.
    /// Method: values on both sides of a bound, and a value beyond the last bound.
    #[test]
    fn buckets_are_cumulative() {
        let metrics = Metrics::new(None);
        for ns in [1, 62_500, 62_700, 20_000_000_000] {
            metrics.count_search(ns, 1);
        }
        metrics.count_answer(StatusCode::SERVICE_UNAVAILABLE);
        let text = metrics.text(7);
        for line in [
            "elfen_search_answers_total{status=\"503\"} 1",
            "elfen_search_answers_total{status=\"200\"} 0",
            "elfen_search_queue_length 7",
            "elfen_search_latency_seconds_bucket{le=\"0.0000625\"} 2",
            "elfen_search_latency_seconds_bucket{le=\"0.000125\"} 3",
            "elfen_search_latency_seconds_bucket{le=\"8.192\"} 3",
            "elfen_search_latency_seconds_bucket{le=\"+Inf\"} 4",
            "elfen_search_latency_seconds_count 4",
            "elfen_search_service_seconds_count 4",
        ] {
            assert!(text.lines().any(|other| other == line), "{line} is missing in\n{text}");
        }
    }
}
