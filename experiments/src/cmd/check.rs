//! `elfen lab check`: tests whether Tailor's explanations of slow requests are right on this
//! machine.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use elfen_console::failure::{Failure, Status};
use elfen_console::output::print;
use elfen_console::{duration, table};

use crate::faults::whatif::{Prediction, WhatIfReport, check_predictions};
use crate::faults::{
    self, CheckError, CheckReport, FAULTS, Fault, Mismatch, Plan, Score, Stolen, server,
};
use elfen_tailor::cmd::failure;

const EXAMPLES: &str = "\
Examples:
  sudo elfen lab check                     30 faults of each kind
  sudo elfen lab check --runs 5            faster, but less certain
  sudo elfen lab check --causes io,nagle   only these causes
  sudo elfen lab check --what-if           the predicted p99 without stops
  sudo elfen lab check --steal 60s      stolen time, compared with the kernel";

/// Inject known faults into a test service, and compare them with Tailor's explanation
///
/// The service has one thread. It is stopped, or loses its CPU to a thread with a higher or an
/// equal priority. Its lock is held, and its file is evicted from the cache. It gets long requests
/// and bursts. Nagle's algorithm delays an answer, and packets are handled on its CPU. Two more
/// services are written in Java: one collects its heap, the other is new and loads classes. Both
/// need a JDK.
///
/// The time that Tailor charges to a cause is compared with the clocks of the injectors. They must
/// agree within 10 % or 0.3 ms for 95 of 100 requests that a fault delayed for at least a
/// millisecond. For each cause, the output shows one request with a wrong explanation, and `--json`
/// the first ten.
///
/// With --what-if, services with one and with four threads run alternately with and without faults.
/// The p99 predicted without the cause is compared with the p99 measured without it. The median
/// error must be within 15 %. One request in sixteen is ten times as long as the others, so that
/// the tail has requests without the cause too. A cause fails if the replay is invalid in more than
/// half of the pairs.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct CheckArgs {
    /// How many faults of each kind to inject
    #[arg(long, value_name = "N", default_value = "30",
        value_parser = clap::value_parser!(u32).range(1..=10_000))]
    runs: u32,

    /// The causes: `all`, or a list such as stop,nagle
    #[arg(long, value_name = "CAUSES", default_value = "all", value_parser = causes)]
    causes: Causes,

    /// Check predictions instead: of p99 without stop, hog and long, or without the --causes, in
    /// this many pairs of runs
    #[arg(long, value_name = "PAIRS", num_args = 0..=1, default_missing_value = "8",
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=1_000))]
    what_if: Option<usize>,

    /// Compare the stolen time of a CPU by events with that by kernel ticks, for this long
    #[arg(long, value_name = "TIME", conflicts_with_all = ["what_if", "causes", "runs"],
        value_parser = duration::parse)]
    steal: Option<Duration>,

    /// Requests per second
    #[arg(long, value_name = "N", default_value = "400",
        value_parser = clap::value_parser!(u32).range(8..=2_000))]
    rps: u32,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Run the service that `check` injects faults into, until standard input ends
#[derive(clap::Args, Debug)]
#[command(after_help = "Example:\n  elfen-lab serve 0     on CPU 0")]
pub(super) struct ServeArgs {
    /// The CPU that the service runs on
    cpu: u32,

    /// Run at an ordinary priority instead of a real-time one
    #[arg(long)]
    ordinary: bool,

    /// The number of threads that answer
    #[arg(long, value_name = "N", default_value_t = 1,
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=64))]
    workers: usize,
}

pub(super) fn serve(args: &ServeArgs) -> Result<ExitCode, Failure> {
    server::serve(args.cpu, args.ordinary, args.workers).map_err(|error| failed(&error))?;
    Ok(ExitCode::SUCCESS)
}

#[derive(Clone, Debug)]
struct Causes(Vec<&'static Fault>);

fn causes(text: &str) -> Result<Causes, String> {
    if text == "all" {
        return Ok(Causes(FAULTS.iter().collect()));
    }
    let named = |name| FAULTS.iter().find(|fault| fault.name == name);
    let unknown = || {
        let names: Vec<&str> = FAULTS.iter().map(|fault| fault.name).collect();
        format!("use all, or a list of: {}", names.join(", "))
    };
    text.split(',')
        .map(|name| named(name).ok_or_else(unknown))
        .collect::<Result<_, _>>()
        .map(Causes)
}

fn failed(error: &std::io::Error) -> Failure {
    Failure::new(Status::Failed, "checking the account", error, "try again as root")
}

pub(super) fn run(args: &CheckArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let mut plan =
        Plan { faults: args.causes.0.clone(), runs: args.runs, requests_a_second: args.rps };
    let holds = if let Some(time) = args.steal {
        let stolen = faults::stolen(time, args.rps).map_err(check_failed)?;
        print(out, args.json, &stolen, || steal_text(stolen))?;
        stolen.agrees()
    } else if let Some(pairs) = args.what_if {
        if plan.faults.len() == FAULTS.len() {
            plan.faults.retain(|fault| ["stop", "hog", "long"].contains(&fault.name));
        }
        if let Some(fault) = plan.faults.iter().find(|fault| !fault.is_predictable()) {
            let why = format!(
                "cause {} requires a separate service, so it cannot be predicted",
                fault.name
            );
            let fix = "omit it from --causes, or omit --what-if";
            return Err(Failure::new(Status::Usage, "arguments", why, fix));
        }
        let report = check_predictions(&plan, pairs).map_err(check_failed)?;
        print(out, args.json, &report, || what_if_text(&report))?;
        report.holds
    } else {
        let checked = faults::check(&plan).map_err(check_failed)?;
        print(out, args.json, &checked, || text(&checked))?;
        checked.holds
    };
    Ok(if holds { ExitCode::SUCCESS } else { ExitCode::from(Status::Failed as u8) })
}

fn check_failed(error: CheckError) -> Failure {
    match error {
        CheckError::Events(error) => failure::no_events(&error),
        CheckError::Io(error) => failed(&error),
        CheckError::OneCpu => {
            let why = "it requires two CPUs";
            let fix = "allow this process a second CPU with taskset";
            Failure::new(Status::Unsupported, "checking the account", why, fix)
        }
    }
}

fn steal_text(stolen: Stolen) -> String {
    let agrees = if stolen.agrees() { "agree" } else { "do not agree" };
    format!("{}the two {agrees} within two ticks\n", stolen_text(stolen))
}

fn stolen_text(Stolen { by_events_ns, by_kernel_ns }: Stolen) -> String {
    let [by_events, by_kernel] = [by_events_ns, by_kernel_ns].map(duration::show);
    format!("steal time of the service's CPU: {by_events} by events, {by_kernel} by kernel ticks\n")
}

fn holds_text(holds: bool) -> &'static str {
    if holds { "holds on this machine\n" } else { "does not hold on this machine\n" }
}

fn what_if_text(WhatIfReport { rows, holds }: &WhatIfReport) -> String {
    let cells = |row: &Prediction| {
        let off = |ratio: f64| format!("{:+.0} %", (ratio - 1.0) * 100.0);
        vec![
            row.workers.to_string(),
            row.cause.to_owned(),
            duration::show(row.with_p99_ns),
            row.foreseen_p99_ns.map_or_else(|| "invalid replay".to_owned(), duration::show),
            duration::show(row.seen_p99_ns),
            row.ratio.map_or_else(|| "-".to_owned(), off),
            format!("{} of {}", row.pairs - row.replay_off, row.pairs),
        ]
    };
    let heading = ["threads", "cause", "p99", "predicted without", "measured", "error", "pairs"];
    let mut text = table::lines(&heading, &rows.iter().map(cells).collect::<Vec<_>>());
    let not_predicted = rows.iter().filter(|row| !row.is_predicted());
    let names: Vec<String> =
        not_predicted.map(|row| format!("{} with {} threads", row.cause, row.workers)).collect();
    if !names.is_empty() {
        let names = names.join(", ");
        text += &format!("no prediction, because the replay is invalid: {names}\n");
    }
    text + "the prediction " + holds_text(*holds)
}

fn text(checked: &CheckReport) -> String {
    let CheckReport { requests, complete, lost_events, left_out, scores, .. } = checked;
    let cells = |score: &Score| {
        vec![
            score.cause.to_owned(),
            score.injections.to_string(),
            score.touched.to_string(),
            score.within.to_string(),
            format!("{} of {}", score.named, score.dominant),
            duration::show(score.injected_ns),
            duration::show(score.charged_ns),
        ]
    };
    let heading = [
        "cause",
        "faults",
        "delayed requests",
        "right amount",
        "ranked first",
        "injected",
        "charged",
    ];
    let rows: Vec<Vec<String>> = scores.iter().map(cells).collect();
    let mut text = format!("{requests} requests, {complete} complete, {lost_events} events lost\n");
    text += &table::lines(&heading, &rows);
    let missed: Vec<String> = scores.iter().filter_map(missed).collect();
    if !missed.is_empty() {
        text += &format!("\ncharged time differs from injected time:\n{}\n", missed.join("\n"));
    }
    text += "\n";
    text += &stolen_text(checked.stolen);
    left_out.iter().for_each(|why| text += &format!("not measured: {why}\n"));
    text + "the account " + holds_text(checked.holds)
}

/// Describes the first request to which Tailor did not charge the injected time, as a line.
fn missed(Score { cause, missed, .. }: &Score) -> Option<String> {
    let Mismatch { latency_ns, injected_ns, charged, .. } = missed.first()?;
    let named = |(name, ns): &(String, u64)| format!("{name} {}", duration::show(*ns));
    let charged = charged.iter().take(3).map(named).collect::<Vec<String>>().join(", ");
    let [injected, latency] = [*injected_ns, *latency_ns].map(duration::show);
    Some(format!("  {cause}: {injected} of {latency}; charged: {charged}"))
}
