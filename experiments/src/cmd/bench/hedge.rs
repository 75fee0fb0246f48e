//! `elfen lab bench hedge`: what each policy of `elfen-hedge` makes of the same pauses.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use elfen_console::failure::{Failure, Status};
use elfen_console::{duration, output, table};
use serde::Serialize;

use crate::bench::hedge::alone::{self, Alone, Way};
use crate::bench::hedge::{Fared, Plan, jvm, measure};
use crate::cmd::live_args;
use crate::live::install_signal_handlers;

const EXAMPLES: &str = "\
Examples:
  elfen lab bench hedge                          7 stops of 20 ms in 4 s
  elfen lab bench hedge --pauses 20 --rounds 10  5 stops a second
  elfen lab bench hedge --work 15ms --rps 20 --pauses 0
                                              long requests: none sent twice
  sudo elfen lab bench hedge --jvm               servers in Java that collect
  elfen lab bench hedge --alone --for 2s         no stops: the proxy itself

With --jvm it takes javac and Lucene (Debian: default-jdk-headless, liblucene8-java).";

/// Measure what `elfen-hedge` makes of a server that stands still
///
/// Two servers of our own behind the proxy, of which the first is stopped now and then; each policy
/// by turns, under the same requests. Latencies are from when a request was to be sent, and every
/// answer is held against its request. Beside it is the p99 that the simulator foresees for the
/// same requests and pauses: each round begins with a turn in which nobody is stopped, which tells
/// what each request takes beside its work.
///
/// With --jvm nothing is foreseen, and the servers are those of `workloads/lucene`, each of which
/// collects its whole heap as often as the first would be stopped, and never both at once. After
/// these turns come others, in which nobody collects, the first is killed and started anew, and
/// latencies are those of its first second.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// How often each policy has its turn
    #[arg(long, value_name = "N", default_value_t = 5,
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=10_000))]
    rounds: usize,

    /// How long a turn is
    #[arg(long = "for", value_name = "TIME", default_value = "4s",
        value_parser = duration::parse)]
    time: Duration,

    /// Requests a second
    #[arg(long, value_name = "N", default_value_t = 300,
        value_parser = clap::value_parser!(u32).range(1..=20_000))]
    rps: u32,

    /// How much work a request is
    #[arg(long, value_name = "TIME", default_value = "500us", value_parser = duration::parse,
        conflicts_with = "jvm")]
    work: Duration,

    /// How often the first server is stopped in a turn
    #[arg(long, value_name = "N", default_value_t = 7)]
    pauses: u32,

    /// And for how long
    #[arg(long, value_name = "TIME", default_value = "20ms", value_parser = duration::parse,
        conflicts_with = "jvm")]
    pause: Duration,

    /// Two Lucene servers in Java, with their own pauses and a new start
    #[arg(long)]
    jvm: bool,

    /// No pauses: what the proxy adds to a request, and how many a second it takes on
    #[arg(long, conflicts_with_all = ["jvm", "rps", "work", "pauses", "pause"])]
    alone: bool,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    policies: Vec<Fared>,
}

const WHAT: &str = "measuring the proxy";

fn unmeasured(error: std::io::Error) -> Failure {
    Failure::new(Status::Failed, WHAT, error, "see `ulimit -n`, and try again")
}

fn proxy_rows(alone: &Alone) -> String {
    let row = |name: &str, way: &Way| {
        let us = |us: f64| format!("{us:.0} us");
        vec![name.to_owned(), us(way.p50_us), us(way.p99_us), format!("{:.0}", way.rps)]
    };
    let rows = [row("straight", &alone.direct), row("through the proxy", &alone.proxied)];
    let table = table::lines(&["way", "p50", "p99", "requests/s"], &rows);
    format!("{table}added to p50: {:.0} us, the median of the rounds\n", alone.added_p50_us)
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    if args.alone {
        let alone = alone::measure(args.rounds, args.time).map_err(unmeasured)?;
        output::print(out, args.json, &alone, || proxy_rows(&alone))?;
        return Ok(ExitCode::SUCCESS);
    }
    if !args.jvm && args.time < args.pause.saturating_mul(args.pauses.saturating_add(1)) {
        let why = "the pauses take longer than --for";
        return Err(Failure::new(Status::Usage, "arguments", why, "choose fewer or shorter ones"));
    }
    let Args { rounds, time, pauses, pause, .. } = *args;
    let work_us = u32::try_from(args.work.as_micros()).unwrap_or(u32::MAX);
    let plan = Plan { rounds, time, rps: f64::from(args.rps), pauses, pause, work_us };
    let policies = if args.jvm {
        let failed = |error| live_args::failure(WHAT, &error);
        install_signal_handlers().map_err(failed)?;
        jvm::measure(&plan).map_err(failed)?
    } else {
        measure(&plan).map_err(unmeasured)?
    };
    let report = Report { policies };
    output::print(out, args.json, &report, || rows(&report.policies))?;
    Ok(ExitCode::SUCCESS)
}

fn rows(policies: &[Fared]) -> String {
    let row = |fared: &Fared| {
        let ms = |us: f64| format!("{:.2} ms", us / 1e3);
        let part = duration::number(fared.duplicates) / duration::number(fared.requests.max(1));
        let mut cells = vec![
            fared.policy.to_owned(),
            fared.requests.to_string(),
            ms(fared.p50_us),
            ms(fared.p99_us),
            ms(fared.p999_us),
            ms(fared.max_us),
            format!("{:.2} %", part * 100.0),
            fared.won_by_backup.to_string(),
        ];
        cells.extend(fared.simulated_p99_us.map(ms));
        cells.extend(fared.restart_p99_us.map(ms));
        cells
    };
    let rows: Vec<Vec<String>> = policies.iter().map(row).collect();
    let head = ["policy", "requests", "p50", "p99", "p99.9", "max", "sent twice", "won"];
    // All of them were simulated, or seen at a new start, or none.
    let is_new = policies.first().is_some_and(|fared| fared.restart_p99_us.is_some());
    let last = if is_new { "restart: p99" } else { "p99 simulated" };
    table::lines(&[&head[..], &[last]].concat(), &rows)
}
