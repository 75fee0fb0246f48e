//! `elfen lab ladder`: removes the thesis's causes of slow requests one by one, and measures what
//! is left.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::ExitCode;

use elfen_console::failure::Failure;
use elfen_console::output::{print, warn};
use elfen_console::table;
use serde::Serialize;

use super::live_args;
use super::meter::Meter;
use crate::live::ladder::{self, CauseRow, Iteration, LadderResults, Phase, Plan, ROWS, Rung};
use crate::live::{LiveError, install_signal_handlers};

const EXAMPLES: &str = "\
Examples:
  sudo elfen lab ladder                                 as in the thesis
  sudo elfen lab ladder --runs 2 --queries 200          a short run

It requires javac and Lucene (Debian: default-jdk-headless, liblucene8-java), elfen-load and \
elfen-hedge. Without root there are no recordings, so the report names no causes, and the proxy \
polls its servers instead of receiving events of garbage collections. Ctrl-C ends the run and \
removes all files.";

const WHAT: &str = "the ladder";
/// The number of causes that the table shows for each rung and phase.
const CAUSES: usize = 3;

/// Remove the causes of slow requests from a search service in Java, one after the other
///
/// The service and the four rungs are those of the thesis (section 4.4). The first rung is the
/// service as it is. The second adds TCP_NODELAY. The third touches the heap at the start. The
/// fourth puts the service behind `elfen-hedge` with a backup.
///
/// In the first iteration, each rung has a new virtual machine. In the next iterations, the service
/// takes fresh memory. In the rest, it collects garbage each second. The rungs are interleaved.
/// `elfen tailor` explains the slowest requests of each.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct LadderArgs {
    /// How many iterations each rung runs
    #[arg(long, value_name = "N", default_value_t = 20,
        value_parser = clap::value_parser!(u32).range(1..=10_000))]
    runs: u32,

    /// The number of queries in an iteration
    #[arg(long, value_name = "N", default_value_t = 1_000,
        value_parser = clap::value_parser!(u32).range(10..=1_000_000))]
    queries: u32,

    /// Queries per second, at random times
    #[arg(long, value_name = "N", default_value_t = 300,
        value_parser = clap::value_parser!(u32).range(1..=20_000))]
    rps: u32,

    /// The number of connections of the load generator
    #[arg(long, value_name = "N", default_value_t = 16,
        value_parser = clap::value_parser!(u32).range(1..=1_000))]
    connections: u32,

    /// The number of articles in the index
    #[arg(long, value_name = "N", default_value_t = 10_000,
        value_parser = clap::value_parser!(u32).range(100..=1_000_000))]
    articles: u32,

    /// Seed of the times at which queries are sent
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct LadderReport<'a> {
    plan: &'a Plan,
    /// The hedging policy of the proxy.
    policy: &'static str,
    rungs: Vec<RungRow>,
    /// The causes of the slowest requests, for each rung and phase.
    charged: Vec<Charged>,
    /// The thesis's causes.
    rows: Vec<CauseResult>,
    /// The p99.9 of the first rung, divided by that of the last rung.
    fold_p999: f64,
    /// Why the iterations were not recorded; null if they were.
    not_recorded: Option<&'a str>,
    iterations: &'a [Iteration],
}

#[derive(Serialize)]
struct RungRow {
    rung: Rung,
    cure: &'static str,
    java: Vec<String>,
    /// The p99.9 over all requests of the rung.
    p999_ms: f64,
    first_max_ms: f64,
    /// The maximum over the iterations after the first. `None` if there is only one iteration.
    max_ms: Option<Spread>,
    page_faults: Option<Spread>,
    thesis_max_ms: (f64, f64),
}

#[derive(Clone, Copy, Serialize)]
struct Spread {
    median: f64,
    lowest: f64,
    highest: f64,
}

#[derive(Serialize)]
struct Charged {
    rung: Rung,
    phase: Phase,
    /// The causes of the slowest requests, the largest first.
    causes: Vec<Cause>,
}

#[derive(Clone, PartialEq, Debug, Serialize)]
struct Cause {
    cause: String,
    ms: f64,
    share: f64,
}

/// A cause of the thesis, in the rung and the phase where it is expected.
#[derive(Clone, PartialEq, Debug, Serialize)]
struct CauseResult {
    name: &'static str,
    cause: &'static str,
    rung: Rung,
    phase: Phase,
    /// The rank of this cause among all causes, from 1; null if no time is attributed to it.
    place: Option<usize>,
    share: f64,
    ms: f64,
    next_rung: Rung,
    /// The time of this cause in the next rung. The recording of the proxy does not name the causes
    /// inside its servers. So behind the proxy, this is the time of all causes.
    next_ms: f64,
}

pub(crate) fn run(args: &LadderArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let failed = |error: LiveError| live_args::failure(WHAT, &error);
    install_signal_handlers().map_err(failed)?;
    let LadderArgs { runs: iterations, queries, rps, connections, articles, seed, json } = *args;
    let plan = Plan { iterations, queries, rps, connections, articles, seed };
    let meter = Meter::new();
    let all = iterations as usize * Rung::ALL.len();
    let mut done = 0;
    meter.show("compiling the service");
    let results = ladder::run_ladder(&plan, |_| {
        done += 1;
        meter.step(done, all);
    });
    drop(meter);
    let results = results.map_err(failed)?;
    if let Some(why) = &results.not_recorded {
        warn(&format!("the report names no causes: {why}"));
    }
    let report = report(&plan, &results);
    print(out, json, &report, || report.text())?;
    Ok(ExitCode::SUCCESS)
}

fn report<'a>(plan: &'a Plan, results: &'a LadderResults) -> LadderReport<'a> {
    let rungs = Rung::ALL.map(|rung| rung_row(rung, results)).into();
    let each = Phase::ALL.into_iter().flat_map(|phase| Rung::ALL.map(|rung| (rung, phase)));
    let charged = each.map(|(rung, phase)| rank_causes(rung, phase, &results.iterations));
    let charged: Vec<Charged> = charged.filter(|charged| !charged.causes.is_empty()).collect();
    let rows = ROWS.iter().map(|row| cause_result(row, &charged)).collect();
    let p999_ms = |rung| results.p999_ms.get(&rung).copied().unwrap_or(0.0);
    LadderReport {
        plan,
        policy: results.policy,
        rungs,
        charged,
        rows,
        fold_p999: p999_ms(Rung::AsIs) / p999_ms(Rung::Hedge),
        not_recorded: results.not_recorded.as_deref(),
        iterations: &results.iterations,
    }
}

fn rung_row(rung: Rung, results: &LadderResults) -> RungRow {
    let own = || results.iterations.iter().filter(move |iteration| iteration.rung == rung);
    let later = || own().filter(|iteration| iteration.number > 1);
    let faults = later().filter_map(|iteration| iteration.page_faults);
    let faults = faults.map(elfen_console::duration::number).collect();
    let (_, cure, thesis_max_ms) = rung.facts();
    RungRow {
        rung,
        cure,
        java: rung.options(),
        p999_ms: results.p999_ms.get(&rung).copied().unwrap_or(0.0),
        first_max_ms: own().next().map_or(0.0, |iteration| iteration.max_ms),
        max_ms: spread(later().map(|iteration| iteration.max_ms).collect()),
        page_faults: spread(faults),
        thesis_max_ms,
    }
}

fn spread(mut values: Vec<f64>) -> Option<Spread> {
    values.sort_unstable_by(f64::total_cmp);
    let (lowest, highest) = (*values.first()?, *values.last()?);
    Some(Spread { median: values[values.len() / 2], lowest, highest })
}

fn rank_causes(rung: Rung, phase: Phase, iterations: &[Iteration]) -> Charged {
    let own = iterations.iter().filter(|of| (of.rung, of.phase) == (rung, phase));
    let mut sums: BTreeMap<&str, f64> = BTreeMap::new();
    for (cause, ms) in own.flat_map(|iteration| &iteration.causes_ms) {
        *sums.entry(cause).or_default() += ms;
    }
    let all: f64 = sums.values().sum();
    let cause = |(cause, ms): (&str, f64)| Cause { cause: cause.to_owned(), ms, share: ms / all };
    let mut causes: Vec<Cause> = sums.into_iter().filter(|(_, ms)| *ms > 0.0).map(cause).collect();
    causes.sort_by(|one, other| other.ms.total_cmp(&one.ms));
    Charged { rung, phase, causes }
}

fn cause_result(row: &CauseRow, all: &[Charged]) -> CauseResult {
    let (name, cause, rung, phase) = *row;
    let next = Rung::ALL[rung as usize + 1];
    let causes = |rung: Rung| {
        let of = all.iter().find(|charged| (charged.rung, charged.phase) == (rung, phase));
        of.map_or(&[][..], |charged| &charged.causes)
    };
    let of = |rung: Rung| {
        let at = causes(rung).iter().position(|own| own.cause == cause);
        at.map(|at| (at + 1, &causes(rung)[at]))
    };
    let next_ms = match next {
        Rung::Hedge => causes(next).iter().map(|cause| cause.ms).sum(),
        _ => of(next).map_or(0.0, |(_, cause)| cause.ms),
    };
    let (place, share, ms) = match of(rung) {
        Some((place, cause)) => (Some(place), cause.share, cause.ms),
        None => (None, 0.0, 0.0),
    };
    CauseResult { name, cause, rung, phase, place, share, ms, next_rung: next, next_ms }
}

fn ms(value: f64) -> String {
    format!("{value:.1}")
}

impl LadderReport<'_> {
    fn text(&self) -> String {
        let mut text = "maximum and p99.9 of each iteration, in ms\n".to_owned();
        text += &self.by_iteration();
        text += "\nmaximum latencies and p99.9 in ms; page faults: the highest number in an \
            iteration after the first\n";
        text += &self.by_rung();
        if self.not_recorded.is_none() {
            let percent = self.plan.slow_percent();
            text += &format!("\ncauses of the slowest {percent} % of each iteration\n");
            text += &self.by_cause();
            text += "\nthe thesis's causes, and the time of each in the next rung (behind the \
                     proxy: of all causes),\nin ms over all slow requests\n";
            text += &self.by_row();
        }
        let [first, last] = [Rung::AsIs, Rung::Hedge].map(|rung| self.rungs[rung as usize].p999_ms);
        text += &format!(
            "\np99.9 of all requests: from {first:.1} to {last:.1} ms, {:.1} times lower. In the \
             thesis, the maximum went from\n41-46 to 3-5 ms, 9 times lower, with six workers at \
             1000 queries per second. Policy of the proxy: `{}`.\n",
            self.fold_p999, self.policy
        );
        text
    }

    fn by_iteration(&self) -> String {
        let cell =
            |iteration: &Iteration| format!("{} {}", ms(iteration.max_ms), ms(iteration.p999_ms));
        let row = |row: &[Iteration]| {
            let number = row[0].number.to_string();
            [number].into_iter().chain(row.iter().map(cell)).collect()
        };
        let rows: Vec<Vec<String>> = self.iterations.chunks(Rung::ALL.len()).map(row).collect();
        let names = Rung::ALL.map(Rung::name);
        table::lines(&[&["iteration"], &names[..]].concat(), &rows)
    }

    fn by_rung(&self) -> String {
        let row = |rung_row: &RungRow| {
            let later = rung_row.max_ms.map_or("-".to_owned(), |spread| {
                let Spread { median, lowest, highest } = spread;
                format!("{} ({}-{})", ms(median), ms(lowest), ms(highest))
            });
            let faults =
                rung_row.page_faults.map_or("-".to_owned(), |f| format!("{:.0}", f.highest));
            let (lowest, highest) = rung_row.thesis_max_ms;
            vec![
                rung_row.rung.name().to_owned(),
                ms(rung_row.first_max_ms),
                later,
                ms(rung_row.p999_ms),
                faults,
                format!("{lowest}-{highest}"),
            ]
        };
        let rows: Vec<Vec<String>> = self.rungs.iter().map(row).collect();
        let heading =
            ["rung", "max, 1st", "max, others", "p99.9 of all", "page faults", "thesis: max"];
        table::lines(&heading, &rows)
    }

    fn by_cause(&self) -> String {
        let row = |Charged { rung, phase, causes }: &Charged| {
            let cause = |at: usize| {
                let text = |of: &Cause| format!("{} {:.0} %", of.cause, of.share * 100.0);
                causes.get(at).map_or_else(String::new, text)
            };
            let names = [phase.name().to_owned(), rung.name().to_owned()];
            names.into_iter().chain((0..CAUSES).map(cause)).collect()
        };
        let rows: Vec<Vec<String>> = self.charged.iter().map(row).collect();
        table::lines(&["phase", "rung", "first", "second", "third"], &rows)
    }

    fn by_row(&self) -> String {
        let row = |cause: &CauseResult| {
            vec![
                cause.name.to_owned(),
                format!("{}, {}", cause.rung.name(), cause.phase.name()),
                cause.place.map_or("-".to_owned(), |place| place.to_string()),
                format!("{:.0} %", cause.share * 100.0),
                ms(cause.ms),
                format!("{} {}", cause.next_rung.name(), ms(cause.next_ms)),
            ]
        };
        let rows: Vec<Vec<String>> = self.rows.iter().map(row).collect();
        table::lines(&["cause", "expected in", "rank", "share", "ms", "next rung, ms"], &rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the first iteration is reported separately, and each cause is searched in its phase.
    /// Method: two iterations with made-up numbers.
    #[test]
    fn a_ladder_is_summarised() {
        let iteration = |rung, number, max_ms, causes: &[(&str, f64)]| Iteration {
            rung,
            number,
            phase: Phase::of(number, 3),
            p50_ms: 1.0,
            p99_ms: 1.0,
            p999_ms: max_ms,
            max_ms,
            page_faults: Some(u64::from(number)),
            causes_ms: causes.iter().map(|(cause, ms)| ((*cause).to_owned(), *ms)).collect(),
        };
        let all = |rung| {
            [
                iteration(rung, 1, 90.0, &[("gc", 4.0), ("tcp-out", 1.0)]),
                iteration(rung, 2, 45.0, &[("tcp-out", 5.0), ("burst", 0.0), ("gc", 15.0)]),
            ]
        };
        let results = LadderResults {
            iterations: Rung::ALL.into_iter().flat_map(all).collect(),
            p999_ms: BTreeMap::from([(Rung::AsIs, 90.0), (Rung::Hedge, 10.0)]),
            policy: "look",
            not_recorded: None,
        };
        let as_is = rung_row(Rung::AsIs, &results);
        assert_eq!((as_is.first_max_ms, as_is.max_ms.unwrap().highest), (90.0, 45.0));
        assert_eq!(as_is.page_faults.unwrap().median, 2.0);
        let plan = Plan { iterations: 3, queries: 1, rps: 1, connections: 1, articles: 1, seed: 1 };
        let report = report(&plan, &results);
        assert_eq!(report.fold_p999, 9.0);
        assert_eq!(report.charged.len(), 8, "two phases of four rungs");
        let causes = &report.charged[0].causes;
        let named: Vec<_> = causes.iter().map(|c| (&c.cause[..], c.share)).collect();
        assert_eq!(named, [("gc", 0.8), ("tcp-out", 0.2)]);
        let nagle = &report.rows[0];
        assert_eq!((nagle.place, nagle.share, nagle.next_ms), (Some(2), 0.25, 5.0));
        assert_eq!((report.rows[1].place, report.rows[1].ms), (None, 0.0));
        let loading = &report.rows[2];
        assert_eq!((loading.place, loading.next_ms), (None, 5.0), "all causes behind the proxy");
    }
}
