//! Reads the latencies of all requests of a run from the generator's CSV.
//!
//! The generator's own percentiles leave out failed requests. With them, a service that fails all
//! requests would look fast. Here, a failed request counts as the generator's timeout.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::Path;
use std::time::Duration;

use serde::Deserialize;

use super::LiveError;
use crate::record::Served;

/// The timeout of a request, which is the latency of failed requests.
pub(super) const TIMEOUT: Duration = Duration::from_secs(10);

/// Latencies in milliseconds, in ascending order.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Latencies(Vec<f64>);

impl Latencies {
    /// Adds the latencies of another run.
    pub(super) fn add(&mut self, other: Self) {
        self.0.extend(other.0);
        self.0.sort_unstable_by(f64::total_cmp);
    }

    /// Returns the lowest latency that at least `per_thousand` of 1000 requests do not exceed.
    pub(super) fn at(&self, per_thousand: usize) -> f64 {
        let rank = (self.0.len() * per_thousand).div_ceil(1000);
        self.0[rank.saturating_sub(1)]
    }

    pub(super) fn mean(&self) -> f64 {
        self.0.iter().sum::<f64>() / count_as_f64(self.0.len())
    }
}

/// The columns of the generator's CSV that are used here. `service_us` is `None` if the service
/// does not report service times. `added_us` is `None` if the core is not emulated.
#[derive(Deserialize)]
struct Request {
    outcome: String,
    latency_us: f64,
    intended_us: Option<f64>,
    service_us: Option<f64>,
    added_us: Option<f64>,
}

/// The requests of a run.
#[derive(Debug, Default)]
pub(super) struct Requests {
    pub(super) latencies: Latencies,
    /// The same latencies in microseconds, in the order of the due times.
    pub(super) in_order_us: Vec<f64>,
    /// The answered requests that have a service time, in the same order.
    pub(super) served: Vec<Served>,
}

/// Reads a generator's CSV, whose lines are in the order of the due times.
pub(super) fn read(csv: &Path) -> Result<Requests, LiveError> {
    let file = File::open(csv).map_err(LiveError::io(format!("reading {}", csv.display())))?;
    let garbled = |why| LiveError::Garbled { name: "elfen-load".to_owned(), why };
    let read = parse(file).map_err(|error| garbled(format!("invalid CSV: {error}")))?;
    Some(read)
        .filter(|requests| !requests.in_order_us.is_empty())
        .ok_or_else(|| garbled("a CSV without requests".to_owned()))
}

fn parse(csv: impl Read) -> csv::Result<Requests> {
    let mut requests = Requests::default();
    for request in csv::Reader::from_reader(csv).deserialize() {
        let Request { outcome, latency_us, intended_us, service_us, added_us } = request?;
        let latency_us = if outcome == "ok" { latency_us } else { TIMEOUT.as_secs_f64() * 1e6 };
        requests.in_order_us.push(latency_us);
        requests.served.extend(intended_us.zip(service_us).map(|(due_us, service_us)| {
            let added_us = added_us.unwrap_or(0.0);
            Served { due_us, work_us: service_us - added_us, added_us }
        }));
    }
    let latencies_ms = requests.in_order_us.iter().map(|us| us / 1e3);
    requests.latencies.add(Latencies(latencies_ms.collect()));
    Ok(requests)
}

/// Appends the service times to a file, one per line.
pub(super) fn append_service_times(served: &[Served], file: &Path) -> Result<(), LiveError> {
    let times: String = served.iter().map(|one| format!("{:.3}\n", one.work_us)).collect();
    let opened = OpenOptions::new().create(true).append(true).open(file);
    opened
        .and_then(|mut file| file.write_all(times.as_bytes()))
        .map_err(LiveError::io(format!("writing {}", file.display())))
}

pub(crate) fn count_as_f64(count: usize) -> f64 {
    u32::try_from(count).map_or(f64::MAX, f64::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Goal: percentiles include failed requests, and service times exclude the slowdown of an
    /// emulated core. Method: a CSV of four requests, one of which failed immediately, with and
    /// without service times; and invalid files.
    #[test]
    fn failed_requests_count_as_slow() {
        let csv = "seed,latency_us,outcome,intended_us,service_us,added_us\n\
                   1,3000,ok,1.5,250.5,\n1,1000,ok,7,9,2\n1,10,HTTP 503,8,,\n1,2000,ok,9,,\n";
        let Requests { latencies, in_order_us, served } = parse(csv.as_bytes()).unwrap();
        assert_eq!(in_order_us, [3000.0, 1000.0, 10_000_000.0, 2000.0]);
        assert_eq!(latencies.0, [1.0, 2.0, 3.0, 10_000.0]);
        let found = [500, 750, 751, 990, 1000].map(|per_thousand| latencies.at(per_thousand));
        assert_eq!(found, [2.0, 3.0, 10_000.0, 10_000.0, 10_000.0]);
        assert_eq!(latencies.mean(), 2501.5);
        let works = [(1.5, 250.5, 0.0), (7.0, 7.0, 2.0)].map(Served::from);
        assert_eq!(served, works);
        let folder = tempfile::tempdir().unwrap();
        let [file, csv] = ["times", "csv"].map(|name| folder.path().join(name));
        served.iter().for_each(|one| append_service_times(&[*one], &file).unwrap());
        assert_eq!(fs::read_to_string(file).unwrap(), "250.500\n7.000\n");
        fs::write(&csv, "latency_us,outcome\n1000,ok\n").unwrap();
        assert_eq!(read(&csv).unwrap().served, []);
        for wrong in
            ["", "latency_us,outcome\n", "latency,outcome\n1,ok\n", "latency_us,outcome\nx,ok\n"]
        {
            fs::write(&csv, wrong).unwrap();
            assert!(matches!(read(&csv), Err(LiveError::Garbled { .. })), "{wrong:?}");
        }
    }
}
