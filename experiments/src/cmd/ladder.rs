//! `elfen experiment ladder`: the thesis's causes of slow requests, taken away one by one.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::ExitCode;

use elfen_console::failure::Failure;
use elfen_console::output::{print, warn};
use elfen_console::table;
use serde::Serialize;

use super::live_args;
use super::meter::Meter;
use crate::live::ladder::{self, Climbed, Iteration, Plan, Rung};
use crate::live::{LiveError, heed_signals};

const EXAMPLES: &str = "\
Examples:
  sudo elfen experiment ladder                                 as in the thesis
  sudo elfen experiment ladder --iterations 2 --queries 200    a short one

It takes javac and Lucene (Debian: default-jdk-headless, liblucene8-java) and elfen-load. Without \
root nothing is recorded, so no causes are named, and the proxy looks at its servers instead of \
being told of collections. Ctrl-C ends it, and nothing stays.";

const WHAT: &str = "the ladder";
/// More are of no weight.
const CAUSES: usize = 4;

/// Take the causes of slow requests away from a search service in Java, one after the other
///
/// The thesis's service and cures (section 4.4): as is; with TCP_NODELAY; with its heap touched at
/// the start; behind `elfen hedge` with a backup. Each rung has a new virtual machine in its first
/// iteration, rungs take turns, and `elfen tailor` says of each why its slowest requests were slow.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// How often each rung is asked all queries
    #[arg(long, value_name = "N", default_value_t = 20,
        value_parser = clap::value_parser!(u32).range(1..=10_000))]
    iterations: u32,

    /// Queries of an iteration
    #[arg(long, value_name = "N", default_value_t = 1_000,
        value_parser = clap::value_parser!(u32).range(10..=1_000_000))]
    queries: u32,

    /// Queries a second, at random times
    #[arg(long, value_name = "N", default_value_t = 200,
        value_parser = clap::value_parser!(u32).range(1..=20_000))]
    rps: u32,

    /// Connections that they come on
    #[arg(long, value_name = "N", default_value_t = 16,
        value_parser = clap::value_parser!(u32).range(1..=1_000))]
    connections: u32,

    /// Articles that are searched
    #[arg(long, value_name = "N", default_value_t = 10_000,
        value_parser = clap::value_parser!(u32).range(100..=1_000_000))]
    articles: u32,

    /// Decides the times at which queries come
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report<'a> {
    plan: &'a Plan,
    /// Of the proxy.
    policy: &'static str,
    rungs: Vec<Stood>,
    /// How many times less the last rung's p99.9 is than the first's.
    fold_p999: f64,
    /// Why no causes are named; null if they are.
    not_recorded: Option<&'a str>,
    iterations: &'a [Iteration],
}

#[derive(Serialize)]
struct Stood {
    rung: Rung,
    cure: &'static str,
    java: Vec<String>,
    /// Of all its requests.
    p999_ms: f64,
    first_max_ms: f64,
    /// Of the iterations after the first, if there are any.
    max_ms: Option<Spread>,
    page_faults: Option<Spread>,
    thesis_max_ms: (f64, f64),
    causes: Vec<Cause>,
}

#[derive(Clone, Copy, Serialize)]
struct Spread {
    median: f64,
    lowest: f64,
    highest: f64,
}

#[derive(Serialize)]
struct Cause {
    cause: String,
    share: f64,
    cured_by: Option<Rung>,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let failed = |error: LiveError| live_args::failure(WHAT, &error);
    heed_signals().map_err(failed)?;
    let Args { iterations, queries, rps, connections, articles, seed, json } = *args;
    let plan = Plan { iterations, queries, rps, connections, articles, seed };
    let mut meter = Meter::new();
    let all = iterations as usize * Rung::ALL.len();
    let mut done = 0;
    meter.show("compiling the service");
    let climbed = ladder::climb(&plan, |_| {
        done += 1;
        meter.step(done, all);
    });
    drop(meter);
    let climbed = climbed.map_err(failed)?;
    if let Some(why) = &climbed.not_recorded {
        warn(&format!("no causes are named: {why}"));
    }
    let report = report(&plan, &climbed);
    print(out, json, &report, || report.text())?;
    Ok(ExitCode::SUCCESS)
}

fn report<'a>(plan: &'a Plan, climbed: &'a Climbed) -> Report<'a> {
    let rungs = Rung::ALL.map(|rung| stood(rung, climbed)).into();
    let p999_ms = |rung| climbed.p999_ms.get(&rung).copied().unwrap_or(0.0);
    Report {
        plan,
        policy: climbed.policy,
        rungs,
        fold_p999: p999_ms(Rung::AsIs) / p999_ms(Rung::Hedge),
        not_recorded: climbed.not_recorded.as_deref(),
        iterations: &climbed.iterations,
    }
}

fn stood(rung: Rung, climbed: &Climbed) -> Stood {
    let own = || climbed.iterations.iter().filter(move |iteration| iteration.rung == rung);
    let later = || own().filter(|iteration| iteration.number > 1);
    let faults = later().filter_map(|iteration| iteration.page_faults);
    let faults = faults.map(elfen_console::duration::number).collect();
    Stood {
        rung,
        cure: rung.cure(),
        java: rung.options(),
        p999_ms: climbed.p999_ms.get(&rung).copied().unwrap_or(0.0),
        first_max_ms: own().next().map_or(0.0, |iteration| iteration.max_ms),
        max_ms: spread(later().map(|iteration| iteration.max_ms).collect()),
        page_faults: spread(faults),
        thesis_max_ms: rung.thesis_max_ms(),
        causes: causes(rung, own()),
    }
}

fn spread(mut values: Vec<f64>) -> Option<Spread> {
    values.sort_unstable_by(f64::total_cmp);
    let (lowest, highest) = (*values.first()?, *values.last()?);
    Some(Spread { median: values[values.len() / 2], lowest, highest })
}

/// What the slowest requests of all iterations were charged for, the most first.
fn causes<'a>(rung: Rung, iterations: impl Iterator<Item = &'a Iteration>) -> Vec<Cause> {
    let mut sums: BTreeMap<&str, f64> = BTreeMap::new();
    for (cause, ms) in iterations.flat_map(|iteration| &iteration.causes_ms) {
        *sums.entry(cause).or_default() += ms;
    }
    let all: f64 = sums.values().sum();
    let mut sums: Vec<(&str, f64)> = sums.into_iter().collect();
    sums.sort_by(|one, other| other.1.total_cmp(&one.1));
    let cause = |(cause, ms): (&str, f64)| Cause {
        cause: cause.to_owned(),
        share: ms / all,
        cured_by: Rung::that_cures(cause).filter(|cured| *cured > rung),
    };
    sums.into_iter().filter(|(_, ms)| *ms > 0.0).map(cause).collect()
}

fn ms(value: f64) -> String {
    format!("{value:.1}")
}

impl Report<'_> {
    fn text(&self) -> String {
        let mut text = "maximum and p99.9 of each iteration, in ms\n".to_owned();
        text += &self.by_iteration();
        text += "\nin ms; faults: the most pages that an iteration after the first was given\n";
        text += &self.by_rung();
        if self.not_recorded.is_none() {
            let percent = self.plan.slow_percent();
            text += &format!("\nwhy the slowest {percent} % of each iteration were slow\n");
            text += &self.by_cause();
        }
        let [first, last] = [Rung::AsIs, Rung::Hedge].map(|rung| self.rungs[rung as usize].p999_ms);
        text += &format!(
            "\np99.9 of all: {first:.1} to {last:.1} ms, {:.1} times less; in the thesis the \
             maximum went from 41-46 to\n3-5 ms, 9 times less, on six workers with 1000 queries \
             a second. Hedged by `{}`.\n",
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
        let row = |stood: &Stood| {
            let later = stood.max_ms.map_or("-".to_owned(), |spread| {
                let Spread { median, lowest, highest } = spread;
                format!("{} ({}-{})", ms(median), ms(lowest), ms(highest))
            });
            let faults = stood.page_faults.map_or("-".to_owned(), |f| format!("{:.0}", f.highest));
            let (lowest, highest) = stood.thesis_max_ms;
            vec![
                stood.rung.name().to_owned(),
                ms(stood.first_max_ms),
                later,
                ms(stood.p999_ms),
                faults,
                format!("{lowest}-{highest}"),
            ]
        };
        let rows: Vec<Vec<String>> = self.rungs.iter().map(row).collect();
        let heading = ["rung", "max, 1st", "max, others", "p99.9 of all", "faults", "thesis: max"];
        table::lines(&heading, &rows)
    }

    fn by_cause(&self) -> String {
        let rows = self.rungs.iter().flat_map(|stood| {
            let row = |(at, cause): (usize, &Cause)| {
                vec![
                    if at == 0 { stood.rung.name().to_owned() } else { String::new() },
                    cause.cause.clone(),
                    format!("{:.1} %", cause.share * 100.0),
                    cause.cured_by.map_or("-", Rung::name).to_owned(),
                ]
            };
            stood.causes.iter().take(CAUSES).enumerate().map(row)
        });
        let rows: Vec<Vec<String>> = rows.collect();
        table::lines(&["rung", "cause", "share", "cured by"], &rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the iteration with the new virtual machine is told apart, causes are added up over
    /// iterations, and a cure below a rung is none above it. Method: two iterations by hand.
    #[test]
    fn a_ladder_is_summed_up() {
        let iteration = |rung, number, max_ms, causes: &[(&str, f64)]| Iteration {
            rung,
            number,
            p50_ms: 1.0,
            p99_ms: 1.0,
            p999_ms: max_ms,
            max_ms,
            page_faults: Some(u64::from(number)),
            causes_ms: causes.iter().map(|(cause, ms)| ((*cause).to_owned(), *ms)).collect(),
        };
        let both = |rung| {
            [
                iteration(rung, 1, 90.0, &[("gc", 4.0), ("tcp-out", 1.0)]),
                iteration(rung, 2, 45.0, &[("tcp-out", 5.0), ("burst", 0.0)]),
            ]
        };
        let climbed = Climbed {
            iterations: Rung::ALL.into_iter().flat_map(both).collect(),
            p999_ms: BTreeMap::from([(Rung::AsIs, 90.0), (Rung::Hedge, 10.0)]),
            policy: "look",
            not_recorded: None,
        };
        let [as_is, nodelay, ..] = Rung::ALL.map(|rung| stood(rung, &climbed));
        assert_eq!((as_is.first_max_ms, as_is.max_ms.unwrap().highest), (90.0, 45.0));
        assert_eq!(as_is.page_faults.unwrap().median, 2.0);
        let named: Vec<_> =
            as_is.causes.iter().map(|c| (&c.cause[..], c.share, c.cured_by)).collect();
        assert_eq!(named, [("tcp-out", 0.6, Some(Rung::Nodelay)), ("gc", 0.4, Some(Rung::Hedge))]);
        assert_eq!(nodelay.causes[0].cured_by, None);
        let plan = Plan { iterations: 2, queries: 1, rps: 1, connections: 1, articles: 1, seed: 1 };
        assert_eq!(report(&plan, &climbed).fold_p999, 9.0);
    }
}
