//! `elfen lab ladder`: the thesis's causes of slow requests, taken away one by one.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::ExitCode;

use elfen_console::failure::Failure;
use elfen_console::output::{print, warn};
use elfen_console::table;
use serde::Serialize;

use super::live_args;
use super::meter::Meter;
use crate::live::ladder::{self, Climbed, Iteration, Plan};
use crate::live::rungs::{CauseRow, Phase, ROWS, Rung};
use crate::live::{LiveError, heed_signals};

const EXAMPLES: &str = "\
Examples:
  sudo elfen lab ladder                                 as in the thesis
  sudo elfen lab ladder --iterations 2 --queries 200    a short one

It takes javac and Lucene (Debian: default-jdk-headless, liblucene8-java), elfen-load and \
elfen-hedge. Without root nothing is recorded, so no causes are named, and the proxy looks at its \
servers instead of being told of collections. Ctrl-C ends it, and nothing stays.";

const WHAT: &str = "the ladder";
/// More are of no weight.
const CAUSES: usize = 3;

/// Take the causes of slow requests away from a search service in Java, one after the other
///
/// The thesis's service and cures (section 4.4): as is; with TCP_NODELAY; with its heap touched at
/// the start; behind `elfen-hedge` with a backup. Each rung has a new virtual machine in its first
/// iteration, of whose memory nobody has touched much in the next ones, and which collects each
/// second in the rest; rungs take turns, and `elfen tailor` says of each why its slowest requests
/// were slow.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// How often each rung is asked all queries
    #[arg(long, value_name = "N", default_value_t = 20,
        value_parser = clap::value_parser!(u32).range(1..=10_000))]
    iterations: u32,

    /// Queries of an iteration
    #[arg(long, value_name = "N", default_value_t = 1_000,
        value_parser = clap::value_parser!(u32).range(10..=1_000_000))]
    queries: u32,

    /// Queries a second, at random times
    #[arg(long, value_name = "N", default_value_t = 300,
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
    /// Why the slowest were slow, of each rung in each phase.
    charged: Vec<Charged>,
    /// The thesis's causes.
    rows: Vec<Looked>,
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
    /// What its slowest requests were charged for, the most first.
    causes: Vec<Cause>,
}

#[derive(Clone, PartialEq, Debug, Serialize)]
struct Cause {
    cause: String,
    ms: f64,
    share: f64,
}

/// A cause of the thesis, where it is looked for.
#[derive(Clone, PartialEq, Debug, Serialize)]
struct Looked {
    name: &'static str,
    cause: &'static str,
    rung: Rung,
    phase: Phase,
    /// Among causes, from 1; null if nothing was charged for it.
    place: Option<usize>,
    share: f64,
    ms: f64,
    next_rung: Rung,
    /// Of this cause; of a proxy, whose recording names none of its servers' causes, of all.
    next_ms: f64,
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
    let each = Phase::ALL.into_iter().flat_map(|phase| Rung::ALL.map(|rung| (rung, phase)));
    let charged = each.map(|(rung, phase)| charged(rung, phase, &climbed.iterations));
    let charged: Vec<Charged> = charged.filter(|charged| !charged.causes.is_empty()).collect();
    let rows = ROWS.iter().map(|row| looked(row, &charged)).collect();
    let p999_ms = |rung| climbed.p999_ms.get(&rung).copied().unwrap_or(0.0);
    Report {
        plan,
        policy: climbed.policy,
        rungs,
        charged,
        rows,
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
    }
}

fn spread(mut values: Vec<f64>) -> Option<Spread> {
    values.sort_unstable_by(f64::total_cmp);
    let (lowest, highest) = (*values.first()?, *values.last()?);
    Some(Spread { median: values[values.len() / 2], lowest, highest })
}

fn charged(rung: Rung, phase: Phase, iterations: &[Iteration]) -> Charged {
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

fn looked(row: &CauseRow, all: &[Charged]) -> Looked {
    let CauseRow { name, cause, rung, next, phase } = *row;
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
    let found = of(rung);
    Looked {
        name,
        cause,
        rung,
        phase,
        place: found.map(|(place, _)| place),
        share: found.map_or(0.0, |(_, cause)| cause.share),
        ms: found.map_or(0.0, |(_, cause)| cause.ms),
        next_rung: next,
        next_ms,
    }
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
            text += "\nthe thesis's causes, and what is left of each in the next rung (behind the \
                     proxy, of all),\nin ms of all slow requests\n";
            text += &self.by_row();
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
        let row = |looked: &Looked| {
            vec![
                looked.name.to_owned(),
                format!("{}, {}", looked.rung.name(), looked.phase.name()),
                looked.place.map_or("-".to_owned(), |place| place.to_string()),
                format!("{:.0} %", looked.share * 100.0),
                ms(looked.ms),
                format!("{} {}", looked.next_rung.name(), ms(looked.next_ms)),
            ]
        };
        let rows: Vec<Vec<String>> = self.rows.iter().map(row).collect();
        table::lines(&["cause", "looked for in", "place", "share", "ms", "next rung: ms"], &rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the iteration with the new virtual machine is told apart, and causes are looked for in
    /// their phases. Method: two iterations by hand.
    #[test]
    fn a_ladder_is_summed_up() {
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
        let climbed = Climbed {
            iterations: Rung::ALL.into_iter().flat_map(all).collect(),
            p999_ms: BTreeMap::from([(Rung::AsIs, 90.0), (Rung::Hedge, 10.0)]),
            policy: "look",
            not_recorded: None,
        };
        let as_is = stood(Rung::AsIs, &climbed);
        assert_eq!((as_is.first_max_ms, as_is.max_ms.unwrap().highest), (90.0, 45.0));
        assert_eq!(as_is.page_faults.unwrap().median, 2.0);
        let plan = Plan { iterations: 3, queries: 1, rps: 1, connections: 1, articles: 1, seed: 1 };
        let report = report(&plan, &climbed);
        assert_eq!(report.fold_p999, 9.0);
        assert_eq!(report.charged.len(), 8, "two phases of four rungs");
        let causes = &report.charged[0].causes;
        let named: Vec<_> = causes.iter().map(|c| (&c.cause[..], c.share)).collect();
        assert_eq!(named, [("gc", 0.8), ("tcp-out", 0.2)]);
        let nagle = &report.rows[0];
        assert_eq!((nagle.place, nagle.share, nagle.next_ms), (Some(2), 0.25, 5.0));
        assert_eq!((report.rows[1].place, report.rows[1].ms), (None, 0.0));
        let loading = &report.rows[2];
        assert_eq!((loading.place, loading.next_ms), (None, 5.0), "all that the proxy's had");
    }
}
