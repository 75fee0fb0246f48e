//! The plan of an invocation: when each request is due, and which query it asks.
//!
//! The plan never looks at the service: that is what makes the loop open. The same seed gives the
//! same plan, so that an invocation can be run again. Arrival times and the order of the queries
//! come from separate streams of the seed: changing the query set does not move the arrivals.

use super::LoadError;
use crate::units::{Nanos, nanos_from_f64, parse_nanos, seconds, show_nanos};
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_distr::Exp1;
use rand_xoshiro::Xoshiro256PlusPlus;
use std::sync::Arc;
use std::{fmt, fs};

/// How arrivals are spread over time.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Arrivals {
    /// Exponential gaps: a Poisson process, as in the thesis.
    Exponential,
    /// Equal gaps.
    Uniform,
    /// A Poisson process that is on for `on_ns`, off for `off_ns`, and again; its mean over both is
    /// the rate.
    Bursts { on_ns: Nanos, off_ns: Nanos },
    /// The moments of a recorded run, from its start.
    Trace(Arc<[TraceEntry]>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TraceEntry {
    pub(crate) at_ns: Nanos,
    /// Which query, where the recording says.
    pub(crate) query: Option<u32>,
}

impl fmt::Display for Arrivals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exponential => f.write_str("exponential"),
            Self::Uniform => f.write_str("uniform"),
            Self::Bursts { on_ns, off_ns } => {
                write!(f, "bursts of {} every {}", show_nanos(*on_ns), show_nanos(on_ns + off_ns))
            }
            Self::Trace(entries) => write!(f, "trace of {}", entries.len()),
        }
    }
}

impl Arrivals {
    /// Reads `exponential`, `uniform`, `bursts:100ms,400ms` or `trace:FILE`, and the file.
    pub(crate) fn read(text: &str) -> Result<Self, LoadError> {
        let wrong = || {
            let expected = "write exponential, uniform, bursts:100ms,400ms or trace:FILE";
            LoadError::Usage(format!("--arrivals {text}: {expected}"))
        };
        match text.split_once(':') {
            None if text == "exponential" => Ok(Self::Exponential),
            None if text == "uniform" => Ok(Self::Uniform),
            Some(("bursts", lengths)) => {
                let (on, off) = lengths.split_once(',').ok_or_else(wrong)?;
                let on_ns = parse_nanos(on).ok().filter(|on_ns| *on_ns > 0).ok_or_else(wrong)?;
                let off_ns = parse_nanos(off).map_err(|_| wrong())?;
                Ok(Self::Bursts { on_ns, off_ns })
            }
            Some(("trace", path)) if !path.is_empty() => {
                let text = fs::read_to_string(path).map_err(|error| {
                    let what = format!("reading arrivals from {path}");
                    LoadError::Failed(format!("{what}: {error}; name a readable text file"))
                })?;
                Ok(Self::Trace(parse_trace(&text, path).map_err(LoadError::Usage)?))
            }
            _ => Err(wrong()),
        }
    }

    /// The mean rate of a trace, over the time to its last entry.
    pub(crate) fn own_rps(&self) -> Option<f64> {
        let Self::Trace(entries) = self else { return None };
        let last = entries.last().filter(|last| last.at_ns > 0)?;
        Some(entries.len() as f64 / seconds(last.at_ns))
    }
}

/// A file with one moment a line in seconds, or the CSV that an earlier run wrote.
fn parse_trace(text: &str, path: &str) -> Result<Arc<[TraceEntry]>, String> {
    let heading: Vec<&str> = text.lines().next().unwrap_or("").split(',').map(str::trim).collect();
    let column = |name| heading.iter().position(|column| *column == name);
    let (time, unit_ns) = column("intended_us").map_or((0, 1e9), |at| (at, 1e3));
    let is_csv = column("intended_us").is_some();
    let mut entries: Vec<TraceEntry> = Vec::new();
    for (line, number) in text.lines().zip(1..).skip(usize::from(is_csv)) {
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        let cells: Vec<&str> = line.split(',').map(str::trim).collect();
        let cell = |name| column(name).and_then(|at| cells.get(at)).filter(|_| is_csv);
        // Of a CSV with several invocations the first is the trace.
        if cell("invocation").is_some_and(|number| *number != "0") {
            continue;
        }
        let at_ns = cells.get(time).and_then(|time| time.parse::<f64>().ok());
        let at_ns = at_ns
            .and_then(|time| nanos_from_f64(time * unit_ns))
            .filter(|at_ns| entries.last().is_none_or(|last| last.at_ns <= *at_ns))
            .ok_or_else(|| {
                let advice = "write seconds from the start, never going back";
                format!("{path}, line {number}: `{line}` is no time; {advice}")
            })?;
        entries.push(TraceEntry { at_ns, query: cell("query").and_then(|text| text.parse().ok()) });
    }
    match entries.last() {
        Some(last) if last.at_ns > 0 => Ok(entries.into()),
        _ => Err(format!("{path} holds no arrivals after its start; write one time a line")),
    }
}

/// Where the plan ends; a trace also ends with its last entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Requests(u64),
    At(Nanos),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Arrival {
    pub(crate) index: u64,
    /// Nanoseconds from the start of the invocation: the intended send time.
    pub(crate) at_ns: Nanos,
    /// Index into the query set.
    pub(crate) query: u32,
}

/// The plan of one invocation, made as it is consumed.
#[derive(Debug)]
pub(crate) struct Plan {
    gaps: Gaps,
    end: End,
    /// The query set in the order asked, round and round: shuffled once, as the thesis does.
    order: Vec<u32>,
    next: u64,
}

#[derive(Debug)]
enum Gaps {
    /// Exponential on a clock that runs during bursts only.
    Random {
        clock: f64,
        mean_gap_ns: f64,
        on_ns: f64,
        off_ns: f64,
        rng: Xoshiro256PlusPlus,
    },
    Equal {
        gap_ns: f64,
    },
    Trace {
        entries: Arc<[TraceEntry]>,
        scale: f64,
    },
}

impl Plan {
    /// `rps` is the mean rate; a trace is stretched to it.
    pub(crate) fn new(arrivals: &Arrivals, rps: f64, end: End, queries: u32, seed: u64) -> Self {
        let rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let mut order_rng = rng.clone();
        order_rng.jump();
        let mut order: Vec<u32> = (0..queries).collect();
        order.shuffle(&mut order_rng);
        let mean_gap_ns = 1e9 / rps;
        let gaps = match arrivals {
            Arrivals::Exponential => {
                Gaps::Random { clock: 0.0, mean_gap_ns, on_ns: f64::INFINITY, off_ns: 0.0, rng }
            }
            Arrivals::Bursts { on_ns, off_ns } => {
                let (on_ns, off_ns) = (*on_ns as f64, *off_ns as f64);
                let mean_gap_ns = mean_gap_ns * on_ns / (on_ns + off_ns);
                Gaps::Random { clock: 0.0, mean_gap_ns, on_ns, off_ns, rng }
            }
            Arrivals::Uniform => Gaps::Equal { gap_ns: mean_gap_ns },
            Arrivals::Trace(entries) => {
                let scale = arrivals.own_rps().map_or(1.0, |own| own / rps);
                Gaps::Trace { entries: entries.clone(), scale }
            }
        };
        Self { gaps, end, order, next: 0 }
    }

    /// How many requests the plan will make, where that is known beforehand, else how many it makes
    /// on average.
    pub(crate) fn expected_requests(&self, rps: f64) -> u64 {
        let by_end = match self.end {
            End::Requests(n) => n,
            End::At(ns) => nanos_from_f64(rps * seconds(ns)).unwrap_or(u64::MAX),
        };
        match &self.gaps {
            Gaps::Trace { entries, .. } => by_end.min(entries.len() as u64),
            _ => by_end,
        }
    }

    /// When the next request is due, and the query that a trace has for it.
    fn next_due(&mut self) -> Option<(Nanos, Option<u32>)> {
        let (at, query) = match &mut self.gaps {
            Gaps::Random { clock, mean_gap_ns, on_ns, off_ns, rng } => {
                *clock += *mean_gap_ns * rng.sample::<f64, _>(Exp1);
                // The times between bursts are put back in.
                (*clock + (*clock / *on_ns).floor() * *off_ns, None)
            }
            Gaps::Equal { gap_ns } => (*gap_ns * (self.next + 1) as f64, None),
            Gaps::Trace { entries, scale } => {
                let entry = entries.get(usize::try_from(self.next).ok()?)?;
                (entry.at_ns as f64 * *scale, entry.query)
            }
        };
        Some((nanos_from_f64(at)?, query))
    }
}

impl Iterator for Plan {
    type Item = Arrival;

    fn next(&mut self) -> Option<Arrival> {
        let index = self.next;
        if self.end == End::Requests(index) {
            return None;
        }
        let (at_ns, query) = self.next_due()?;
        if matches!(self.end, End::At(end) if at_ns >= end) {
            return None;
        }
        self.next += 1;
        // A trace of another query set may name a query that this one hasn't.
        let query = query.filter(|query| (*query as usize) < self.order.len()).or_else(|| {
            let round = usize::try_from(index % self.order.len().max(1) as u64).ok()?;
            self.order.get(round).copied()
        });
        Some(Arrival { index, at_ns, query: query.unwrap_or(0) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn plan(arrivals: &Arrivals, rps: f64, end: End, seed: u64) -> Vec<Arrival> {
        Plan::new(arrivals, rps, end, 7, seed).collect()
    }

    /// Goal: equal gaps are equal and don't drift. Method: the millionth arrival of a rate whose
    /// gap is no whole number.
    #[test]
    fn uniform_does_not_drift() {
        let all = plan(&Arrivals::Uniform, 3_000.0, End::Requests(1_000_000), 1);
        assert_eq!(all[0].at_ns, 333_333);
        assert_eq!(all[999_999].at_ns, 333_333_333_333);
    }

    /// Goal: exponential gaps have the mean and the spread of a Poisson process. Method: 200,000
    /// gaps; both moments within five standard errors.
    #[test]
    fn exponential_gaps_have_their_moments() {
        let all = plan(&Arrivals::Exponential, 1_000.0, End::Requests(200_000), 42);
        let gaps: Vec<f64> =
            all.windows(2).map(|pair| (pair[1].at_ns - pair[0].at_ns) as f64 / 1e6).collect();
        let n = gaps.len() as f64;
        let mean = gaps.iter().sum::<f64>() / n;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / n;
        assert!((mean - 1.0).abs() < 5.0 / n.sqrt(), "mean gap {mean} ms");
        // The standard error of an exponential's sample variance is sqrt(8 / n).
        assert!((variance - 1.0).abs() < 5.0 * (8.0 / n).sqrt(), "variance {variance} ms^2");
    }

    /// Goal: bursts stay in their on-periods and keep the mean rate. Method: every arrival's place
    /// in its period; the count over many periods.
    #[test]
    fn bursts_are_on_when_on() {
        let arrivals = Arrivals::read("bursts:10ms,40ms").expect("well formed");
        let all = plan(&arrivals, 2_000.0, End::At(100_000_000_000), 3);
        assert!(all.iter().all(|arrival| arrival.at_ns % 50_000_000 <= 10_000_000));
        let n = all.len() as f64;
        assert!((n - 200_000.0).abs() < 5.0 * n.sqrt(), "{n} arrivals instead of 200000");
        for text in ["bursts:0s,1s", "bursts:1s", "bursts:x,1s", "uniform:", "trace:", "poisson"] {
            assert!(matches!(Arrivals::read(text), Err(LoadError::Usage(_))), "{text}");
        }
    }

    /// Goal: the thesis's query order: every query once a round, all rounds alike, and each seed
    /// another order; and the size of the query set leaves the arrival times alone. Method: five
    /// rounds of 50 queries for two seeds; the same seed with two sizes.
    #[test]
    fn queries_are_shuffled_once_and_repeated() {
        let all = |queries, seed| {
            Plan::new(&Arrivals::Exponential, 1.0, End::Requests(250), queries, seed)
        };
        let queries = |seed| all(50, seed).map(|arrival| arrival.query).collect::<Vec<_>>();
        let asked = queries(9);
        let mut first = asked[..50].to_vec();
        assert!(asked.chunks(50).all(|round| round == first));
        assert_ne!(queries(10), asked);
        first.sort_unstable();
        assert_eq!(first, (0..50).collect::<Vec<_>>());
        assert!(all(1, 4).map(|a| a.at_ns).eq(all(1141, 4).map(|a| a.at_ns)));
    }

    /// Goal: a trace is replayed as recorded, at its own rate or stretched to another. Method:
    /// three entries.
    #[test]
    fn trace_is_replayed_and_stretched() {
        let entries: Arc<[TraceEntry]> = [(100, Some(3)), (200, None), (300, Some(99))]
            .map(|(ms, query)| TraceEntry { at_ns: ms * 1_000_000, query })
            .into();
        let arrivals = Arrivals::Trace(entries);
        let own = arrivals.own_rps().expect("the trace takes 300 ms");
        assert!((own - 10.0).abs() < 1e-9);
        let all = plan(&arrivals, own, End::Requests(u64::MAX), 1);
        assert_eq!(all.iter().map(|a| a.at_ns / 1_000_000).collect::<Vec<_>>(), [100, 200, 300]);
        assert_eq!(all[0].query, 3);
        assert!(all[2].query < 7, "a query that the set hasn't is replaced");
        let slow = plan(&arrivals, own / 2.0, End::At(500_000_000), 1);
        assert_eq!(slow.iter().map(|a| a.at_ns / 1_000_000).collect::<Vec<_>>(), [200, 400]);
    }

    /// Goal: plain times and our own CSV are both read, and what is no trace is refused with its
    /// line. Method: one of each; words, a step back, nothing, and one moment only.
    #[test]
    fn traces_are_read() {
        let entry = |(ms, query): (u64, Option<u32>)| TraceEntry { at_ns: ms * 1_000_000, query };
        let plain = parse_trace("# seconds\n0.5\n\n1.25, anything\n", "t").expect("good");
        assert_eq!(plain[..], [(500, None), (1_250, None)].map(entry));
        let csv = "invocation,seed,query,intended_us\n0,1,7,500000.0\n0,1,2,1250000.0\n1,2,0,3.0\n";
        let csv = parse_trace(csv, "t").expect("good");
        assert_eq!(csv[..], [(500, Some(7)), (1_250, Some(2))].map(entry));
        for (text, part) in [
            ("1\nx\n", "line 2"),
            ("2\n1\n", "line 2"),
            ("-1\n", "line 1"),
            ("", "no arrivals"),
            ("0\n", "no arr"),
        ] {
            let error = parse_trace(text, "t").expect_err(text);
            assert!(error.contains(part), "{error}");
        }
    }

    proptest! {
        /// Goal: the same seed gives the same plan, in order, within its end. Method: any process,
        /// rate, end and seed.
        #[test]
        fn plans_are_replayable(
            kind in 0..3, rps in 0.1f64..1e6, n in 0u64..300, end_ms in 1u64..100, by_count: bool,
            seed: u64,
        ) {
            let arrivals = match kind {
                0 => Arrivals::Exponential,
                1 => Arrivals::Uniform,
                _ => Arrivals::Bursts { on_ns: 1_000_000, off_ns: 3_000_000 },
            };
            let end = if by_count { End::Requests(n) } else { End::At(end_ms * 1_000_000) };
            let once = || Plan::new(&arrivals, rps, end, 5, seed).take(1_000).collect::<Vec<_>>();
            let all = once();
            prop_assert_eq!(&all, &once());
            prop_assert!(all.windows(2).all(|pair| pair[0].at_ns <= pair[1].at_ns));
            match end {
                End::Requests(n) => prop_assert_eq!(all.len() as u64, n),
                End::At(end) => prop_assert!(all.iter().all(|arrival| arrival.at_ns < end)),
            }
        }

        /// Goal: no file makes the reader panic, and what it accepts is in order. Method: arbitrary
        /// text.
        #[test]
        fn arbitrary_files_are_survived(text in "(intended_us,query\n)?([0-9.,a\n -]{0,60})") {
            if let Ok(entries) = parse_trace(&text, "t") {
                prop_assert!(entries.windows(2).all(|pair| pair[0].at_ns <= pair[1].at_ns));
            }
        }
    }
}
