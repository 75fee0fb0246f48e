//! The latencies of all requests of a run, from the generator's CSV.
//!
//! The generator's own percentiles leave out those that failed, and a service that answers nobody would look fast: here
//! they count as the time that the generator waits.

use std::fs;
use std::path::Path;
use std::time::Duration;

use super::LiveError;
use super::testbed::number_of;

/// After that a request has failed, and counts as having taken so long.
pub(super) const TIMEOUT: Duration = Duration::from_secs(10);

/// In milliseconds and in order.
#[derive(Debug, PartialEq)]
pub(super) struct Latencies(Vec<f64>);

impl Latencies {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: percentiles are those of all requests, failed ones included. Method: a CSV of four requests, one of which was
    /// refused at once, and files that are none.
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
