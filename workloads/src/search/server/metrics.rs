//! What the service counts, and how Prometheus reads it.

use super::request::Status;
use crate::beside::{Slowdown, Tally};
use crate::units::{Nanos, seconds};
use serde_json::json;
use std::fmt::Write;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// Upper ends of the buckets in nanoseconds: from 62.5 us, doubling, to 8 s.
const BUCKETS: usize = 18;
const FIRST_BUCKET_NS: Nanos = 62_500;

// Relaxed throughout: each is a count on its own, and the coordinator reads them for `/metrics`.
#[derive(Debug, Default)]
pub(super) struct Metrics {
    answers: [AtomicU64; Status::ALL.len()],
    latency: Histogram,
    service: Histogram,
    pub(super) connections: AtomicU64,
    pub(super) accepted: AtomicU64,
    core: Option<EmulatedCore>,
}

/// Of all request lanes together.
#[derive(Debug)]
struct EmulatedCore {
    slowdown: Slowdown,
    beside_ns: AtomicU64,
    added_ns: AtomicU64,
}

#[derive(Debug, Default)]
struct Histogram {
    /// Values in each bucket, and beyond the last.
    counts: [AtomicU64; BUCKETS + 1],
    sum_ns: AtomicU64,
}

impl Histogram {
    fn record(&self, ns: Nanos) {
        let ends = (0..BUCKETS).map(|bucket| FIRST_BUCKET_NS << bucket);
        let bucket = ends.take_while(|end| *end < ns).count();
        self.counts[bucket].fetch_add(1, Relaxed);
        self.sum_ns.fetch_add(ns, Relaxed);
    }

    fn write(&self, out: &mut String, name: &str, help: &str) -> std::fmt::Result {
        writeln!(out, "# HELP {name} {help}\n# TYPE {name} histogram")?;
        let mut below = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            below += count.load(Relaxed);
            if bucket < BUCKETS {
                let end = seconds(FIRST_BUCKET_NS << bucket);
                writeln!(out, "{name}_bucket{{le=\"{end}\"}} {below}")?;
            } else {
                writeln!(out, "{name}_bucket{{le=\"+Inf\"}} {below}")?;
            }
        }
        writeln!(out, "{name}_sum {}\n{name}_count {below}", seconds(self.sum_ns.load(Relaxed)))
    }
}

impl Metrics {
    /// Of a service whose request lanes are emulated to share cores, if there is a slowdown.
    pub(super) fn new(slowdown: Option<Slowdown>) -> Self {
        let core = slowdown.map(|slowdown| EmulatedCore {
            slowdown,
            beside_ns: AtomicU64::new(0),
            added_ns: AtomicU64::new(0),
        });
        Self { core, ..Self::default() }
    }

    /// What `/health` answers: that the service lives, and what of it is emulated.
    pub(super) fn health(&self) -> Vec<u8> {
        let health = match &self.core {
            None => json!({}),
            Some(core) => json!({ "emulated_core": { "slowdown": core.slowdown.factor() } }),
        };
        (health.to_string() + "\n").into_bytes()
    }

    /// What a request added to its worker's tally.
    pub(super) fn slowed(&self, before: Tally, after: Tally) {
        if let Some(core) = &self.core {
            core.beside_ns.fetch_add(after.all.beside_ns - before.all.beside_ns, Relaxed);
            core.added_ns.fetch_add(after.added_ns - before.added_ns, Relaxed);
        }
    }

    pub(super) fn answered(&self, status: Status) {
        let at = Status::ALL.iter().position(|other| *other == status);
        self.answers[at.expect("all of them are listed")].fetch_add(1, Relaxed);
    }

    pub(super) fn searched(&self, latency_ns: Nanos, service_ns: Nanos) {
        self.latency.record(latency_ns);
        self.service.record(service_ns);
    }

    /// In Prometheus's text format.
    pub(super) fn text(&self, queue_len: usize) -> String {
        let mut out = String::new();
        self.write(&mut out, queue_len).expect("a String takes everything");
        out
    }

    fn write(&self, out: &mut String, queue_len: usize) -> std::fmt::Result {
        let name = "elfen_search_answers_total";
        writeln!(out, "# HELP {name} Answers by HTTP status.\n# TYPE {name} counter")?;
        for (status, count) in Status::ALL.iter().zip(&self.answers) {
            writeln!(out, "{name}{{status=\"{}\"}} {}", status.code(), count.load(Relaxed))?;
        }
        let counts = [
            ("queue_length", "gauge", "Requests that wait for a worker.", queue_len as u64),
            ("connections", "gauge", "Open connections.", self.connections.load(Relaxed)),
            ("accepted_total", "counter", "Connections ever opened.", self.accepted.load(Relaxed)),
        ];
        for (name, kind, help, value) in counts {
            writeln!(out, "# HELP elfen_search_{name} {help}\n# TYPE elfen_search_{name} {kind}")?;
            writeln!(out, "elfen_search_{name} {value}")?;
        }
        if let Some(core) = &self.core {
            let name = "elfen_search_emulated_slowdown";
            let help = "How many times as long a request takes beside a batch; emulated.";
            writeln!(out, "# HELP {name} {help}\n# TYPE {name} gauge")?;
            writeln!(out, "{name} {}", core.slowdown)?;
            for (name, help, ns) in [
                ("beside", "Time of requests with a batch beside them.", &core.beside_ns),
                ("added", "Time by which requests were made longer for it.", &core.added_ns),
            ] {
                let name = format!("elfen_search_{name}_seconds_total");
                writeln!(out, "# HELP {name} {help}\n# TYPE {name} counter")?;
                writeln!(out, "{name} {}", seconds(ns.load(Relaxed)))?;
            }
        }
        let help = "From arrival to the end of the search.";
        self.latency.write(out, "elfen_search_latency_seconds", help)?;
        self.service.write(out, "elfen_search_service_seconds", "The search alone.")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: values fall into their buckets, and the text is Prometheus's format. Method: values on
    /// both sides of a border, and one beyond the last.
    #[test]
    fn buckets_are_cumulative() {
        let metrics = Metrics::default();
        for ns in [1, 62_500, 62_501, 20_000_000_000] {
            metrics.searched(ns, 1);
        }
        metrics.answered(Status::Unavailable);
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
