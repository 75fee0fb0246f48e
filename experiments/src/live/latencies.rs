//! The latencies of all requests of a run, from the generator's CSV.
//!
//! The generator's own percentiles leave out requests that failed, and a service that answers none
//! would look fast: here they count as the time that the generator waits.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use super::LiveError;

/// After that a request has failed, and counts as having taken so long.
pub(super) const TIMEOUT: Duration = Duration::from_secs(10);

/// In milliseconds and in order.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Latencies(Vec<f64>);

impl Latencies {
    /// Those of another run as well.
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
        let mut lines = text.lines();
        let heading: Vec<&str> = lines.next()?.split(',').collect();
        let column = |name: &str| heading.iter().position(|column| *column == name);
        let (latency, outcome) = column("latency_us").zip(column("outcome"))?;
        let waited_ms = TIMEOUT.as_secs_f64() * 1e3;
        let read = |line: &str| {
            let cells: Vec<&str> = line.split(',').collect();
            match *cells.get(outcome)? {
                "ok" => Some(cells.get(latency)?.parse::<f64>().ok()? / 1e3),
                _ => Some(waited_ms),
            }
        };
        let mut latencies: Vec<f64> = lines.map(read).collect::<Option<_>>()?;
        latencies.sort_unstable_by(f64::total_cmp);
        (!latencies.is_empty()).then_some(Self(latencies))
    }

    /// The lowest that so many of a thousand do not exceed.
    pub(super) fn at(&self, per_thousand: usize) -> f64 {
        let rank = (self.0.len() * per_thousand).div_ceil(1000);
        self.0[rank.saturating_sub(1)]
    }

    pub(super) fn mean(&self) -> f64 {
        self.0.iter().sum::<f64>() / number_of(self.0.len())
    }
}

/// How long the requests of a generator's CSV ran, in microseconds as it wrote them.
pub(super) fn service_times(csv: &Path) -> Result<Vec<String>, LiveError> {
    let text =
        fs::read_to_string(csv).map_err(LiveError::io(format!("reading {}", csv.display())))?;
    Ok(parse_service_times(&text).unwrap_or_default())
}

/// So many of them at most, from the shortest to the longest.
pub(super) fn spread(times: &[String], most: usize) -> Vec<f64> {
    let mut times: Vec<f64> = times.iter().filter_map(|time| time.parse().ok()).collect();
    times.sort_unstable_by(f64::total_cmp);
    let kept = times.len().min(most);
    // The middle of each of so many equal parts.
    (0..kept).map(|part| times[(2 * part + 1) * times.len() / (2 * kept)]).collect()
}

/// Adds times to a file, a line each.
pub(super) fn append(times: &[String], file: &Path) -> Result<(), LiveError> {
    let times: String = times.iter().map(|time| format!("{time}\n")).collect();
    let opened = OpenOptions::new().create(true).append(true).open(file);
    opened
        .and_then(|mut file| file.write_all(times.as_bytes()))
        .map_err(LiveError::io(format!("writing {}", file.display())))
}

/// Of those that the service said; a failed request has none.
fn parse_service_times(csv: &str) -> Option<Vec<String>> {
    let mut lines = csv.lines();
    let at = lines.next()?.split(',').position(|column| column == "service_us")?;
    let times = lines.filter_map(|line| line.split(',').nth(at).filter(|time| !time.is_empty()));
    Some(times.map(str::to_owned).collect())
}

pub(super) fn number_of(count: usize) -> f64 {
    u32::try_from(count).map_or(f64::MAX, f64::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn service_times_are_those_of_requests_that_have_one() {
        let csv = "at,service_us,outcome\n1,250.5,ok\n2,,timeout\n3,7,ok\n";
        let times = parse_service_times(csv).unwrap();
        assert_eq!(times, ["250.5", "7"]);
        assert_eq!(parse_service_times("at,outcome\n1,ok\n"), None);
        assert_eq!((spread(&times, 5), spread(&times, 1)), (vec![7.0, 250.5], vec![250.5]));
        let many: Vec<String> = (0..1000).rev().map(|time| time.to_string()).collect();
        assert_eq!(spread(&many, 4), [125.0, 375.0, 625.0, 875.0]);
        assert_eq!(spread(&[], 4), [0.0; 0]);
    }

    /// Goal: percentiles are those of all requests, failed ones included. Method: a CSV of four
    /// requests, one of which was refused at once, and files that are none.
    #[test]
    fn who_gets_no_answer_counts_as_slow() {
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
