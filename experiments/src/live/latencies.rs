//! The latencies of all requests of a run, from the generator's CSV.
//!
//! The generator's own percentiles leave out failed requests, so a service that answers nothing
//! would look fast. Here a failed request counts as the generator's timeout.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use super::LiveError;
use crate::record::Served;

/// The timeout of a request, which is the latency of a failed one.
pub(super) const TIMEOUT: Duration = Duration::from_secs(10);

/// In milliseconds, ascending.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Latencies(Vec<f64>);

impl Latencies {
    /// Adds the latencies of another run.
    pub(super) fn add(&mut self, other: Self) {
        self.0.extend(other.0);
        self.0.sort_unstable_by(f64::total_cmp);
    }

    /// From the generator's CSV.
    pub(super) fn read(csv: &Path) -> Result<Self, LiveError> {
        let failed = || LiveError::io(format!("reading {}", csv.display()));
        Self::parse(&fs::read_to_string(csv).map_err(failed())?).ok_or_else(|| LiveError::Garbled {
            name: "elfen-load".to_owned(),
            why: "a CSV without requests, or without latency_us and outcome".to_owned(),
        })
    }

    fn parse(text: &str) -> Option<Self> {
        let (heading, lines) = text.split_once('\n')?;
        let column = |name: &str| column_of(heading, name);
        let (latency, outcome) = column("latency_us").zip(column("outcome"))?;
        let waited_ms = TIMEOUT.as_secs_f64() * 1e3;
        let read = |line: &str| {
            let cells: Vec<&str> = line.split(',').collect();
            match *cells.get(outcome)? {
                "ok" => Some(cells.get(latency)?.parse::<f64>().ok()? / 1e3),
                _ => Some(waited_ms),
            }
        };
        let mut latencies: Vec<f64> = lines.lines().map(read).collect::<Option<_>>()?;
        latencies.sort_unstable_by(f64::total_cmp);
        (!latencies.is_empty()).then_some(Self(latencies))
    }

    /// The lowest latency that at least `per_thousand` of 1000 requests do not exceed.
    pub(super) fn at(&self, per_thousand: usize) -> f64 {
        let rank = (self.0.len() * per_thousand).div_ceil(1000);
        self.0[rank.saturating_sub(1)]
    }

    pub(super) fn all(self) -> Vec<f64> {
        self.0
    }

    pub(super) fn mean(&self) -> f64 {
        self.0.iter().sum::<f64>() / count_as_f64(self.0.len())
    }
}

/// The answered requests of a generator's CSV that have a service time, in the order of their due
/// times.
pub(super) fn read_served(csv: &Path) -> Result<Vec<Served>, LiveError> {
    let text =
        fs::read_to_string(csv).map_err(LiveError::io(format!("reading {}", csv.display())))?;
    Ok(parse_served(&text).unwrap_or_default())
}

/// Appends the service times to a file, one per line.
pub(super) fn append_service_times(served: &[Served], file: &Path) -> Result<(), LiveError> {
    let times: String = served.iter().map(|one| format!("{:.3}\n", one.work_us)).collect();
    let opened = OpenOptions::new().create(true).append(true).open(file);
    opened
        .and_then(|mut file| file.write_all(times.as_bytes()))
        .map_err(LiveError::io(format!("writing {}", file.display())))
}

fn parse_served(csv: &str) -> Option<Vec<Served>> {
    let (heading, lines) = csv.split_once('\n')?;
    let column = |name: &str| column_of(heading, name);
    let (due, ran) = column("intended_us").zip(column("service_us"))?;
    let added = column("added_us");
    let request = |line: &str| {
        let cells: Vec<&str> = line.split(',').collect();
        let us = |at: usize| cells.get(at)?.parse::<f64>().ok();
        let added_us = added.and_then(us).unwrap_or(0.0);
        Some(Served { due_us: us(due)?, work_us: us(ran)? - added_us })
    };
    Some(lines.lines().filter_map(request).collect())
}

fn column_of(heading: &str, name: &str) -> Option<usize> {
    heading.trim_end().split(',').position(|column| column == name)
}

pub(super) fn count_as_f64(count: usize) -> f64 {
    u32::try_from(count).map_or(f64::MAX, f64::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a service time is without the slowdown of an emulated core. Method: lines with and
    /// without that column; a failed request has no time.
    #[test]
    fn only_answered_requests_have_a_service_time() {
        let csv = "intended_us,service_us,outcome,added_us\n1.5,250.5,ok,\n2,,timeout,\n7,9,ok,2\n";
        let served = [(1.5, 250.5), (7.0, 7.0)].map(|(due_us, work_us)| Served { due_us, work_us });
        assert_eq!(parse_served(csv).unwrap(), served);
        assert_eq!(parse_served("intended_us,outcome\n1,ok\n"), None);
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("times");
        served.iter().for_each(|one| append_service_times(&[*one], &file).unwrap());
        assert_eq!(fs::read_to_string(file).unwrap(), "250.500\n7.000\n");
    }

    /// Goal: percentiles include failed requests. Method: a CSV of four requests, one of which was
    /// refused at once, and invalid files.
    #[test]
    fn failed_requests_count_as_slow() {
        let csv = "seed,latency_us,outcome\n1,3000,ok\n1,1000,ok\n1,10,HTTP 503\n1,2000,ok\n";
        let latencies = Latencies::parse(csv).unwrap();
        assert_eq!(latencies.0, [1.0, 2.0, 3.0, 10_000.0]);
        let found = [500, 750, 751, 990, 1000].map(|per_thousand| latencies.at(per_thousand));
        assert_eq!(found, [2.0, 3.0, 10_000.0, 10_000.0, 10_000.0]);
        assert_eq!(latencies.mean(), 2501.5);
        for wrong in [
            "",
            "seed,latency_us,outcome\n",
            "latency,outcome\n1,ok\n",
            "latency_us,outcome\nx,ok\n",
        ] {
            assert_eq!(Latencies::parse(wrong), None, "{wrong:?}");
        }
    }
}
