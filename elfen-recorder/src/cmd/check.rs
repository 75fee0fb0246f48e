//! `elfen tailor check`: can the account be trusted on this machine?

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use elfen_console::failure::{Failure, Status};
use elfen_console::output::print;
use elfen_console::{duration, table};

use super::failure;
use crate::check::whatif::{Foreseen, WhatIf, foresee};
use crate::check::{self, Checked, Failed, Kind, Missed, Plan, Score, Stolen, server};

const EXAMPLES: &str = "\
Examples:
  sudo elfen tailor check                     30 injections of each kind
  sudo elfen tailor check --injections 5      sooner, and less sure
  sudo elfen tailor check --causes io,nagle   these ways alone
  sudo elfen tailor check --what-if           p99 without stops, foreseen
  sudo elfen tailor check --steal 60s         stolen time, by the kernel's ticks";

/// Hurt a service of its own in known ways, and see whether the account says so
///
/// A service with one thread is stopped, kept from its CPU by a thread above it and by one beside
/// it, from its lock and from a file, is given long requests and many at once, has an answer held
/// back by Nagle's algorithm, and packets handled on its CPU; others, in Java, collect their heap
/// or are new and load classes (it takes a JDK). What their requests are charged is held against
/// clocks of those that hurt or are hurt: within 10 % or 0.3 ms for 95 of 100 requests that were
/// touched for at least a millisecond. Of each cause, a request that was not is shown; `--json` has
/// the first ten.
///
/// With --what-if a service of one thread and one of four are hurt by turns with being left alone,
/// and the p99 that is foreseen without the cause is held against that of being left alone: the
/// median is to be within 15 %. One request in sixteen is ten times as long as the others there, so
/// that there is a p99 without the cause too. A cause of which nothing is foreseen in half of the
/// pairs, as the replay is off, does not hold.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// How often the service is hurt in each way
    #[arg(long, value_name = "N", default_value = "30",
        value_parser = clap::value_parser!(u32).range(1..=10_000))]
    injections: u32,

    /// Which ways: `all`, or some of them, as in stop,nagle
    #[arg(long, value_name = "CAUSES", default_value = "all", value_parser = causes)]
    causes: Causes,

    /// The p99 without stop, hog and long, or without --causes, in pairs of so many
    #[arg(long, value_name = "PAIRS", num_args = 0..=1, default_missing_value = "8",
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=1_000))]
    what_if: Option<usize>,

    /// What the hypervisor takes of a CPU in that time, by events and by the kernel's ticks
    #[arg(long, value_name = "TIME", conflicts_with_all = ["what_if", "causes", "injections"],
        value_parser = duration::parse)]
    steal: Option<Duration>,

    /// Requests of each second
    #[arg(long, value_name = "N", default_value = "400",
        value_parser = clap::value_parser!(u32).range(8..=2_000))]
    rps: u32,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Be the service that `check` hurts, until standard input ends
#[derive(clap::Args, Debug)]
#[command(after_help = "Example:\n  elfen tailor serve 0     on CPU 0")]
pub(super) struct ServeArgs {
    /// The CPU that it runs on
    cpu: u32,

    /// At an ordinary priority, not before everybody else there
    #[arg(long)]
    ordinary: bool,

    /// Threads that answer
    #[arg(long, value_name = "N", default_value_t = 1,
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=64))]
    workers: usize,
}

pub(super) fn serve(args: &ServeArgs) -> Result<ExitCode, Failure> {
    server::serve(args.cpu, args.ordinary, args.workers).map_err(|error| failed(&error))?;
    Ok(ExitCode::SUCCESS)
}

#[derive(Clone, Debug)]
struct Causes(Vec<Kind>);

fn causes(text: &str) -> Result<Causes, String> {
    if text == "all" {
        return Ok(Causes(Kind::ALL.to_vec()));
    }
    let kind = |name: &str| Kind::ALL.into_iter().find(|kind| kind.name() == name);
    let unknown = || format!("there are all, {}", Kind::ALL.map(Kind::name).join(", "));
    text.split(',').map(|name| kind(name).ok_or_else(unknown)).collect::<Result<_, _>>().map(Causes)
}

fn failed(error: &std::io::Error) -> Failure {
    Failure::new(Status::Failed, "checking the account", error, "try again, as root")
}

pub(super) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let mut plan = Plan {
        kinds: args.causes.0.clone(),
        injections: args.injections,
        requests_a_second: args.rps,
        last: Duration::from_millis(15),
        every: Duration::from_millis(150),
    };
    let holds = if let Some(time) = args.steal {
        let stolen = check::stolen(time, args.rps).map_err(unchecked)?;
        print(out, args.json, &stolen, || told_of_steal(stolen))?;
        stolen.agrees()
    } else if let Some(pairs) = args.what_if {
        if plan.kinds.len() == Kind::ALL.len() {
            plan.kinds = vec![Kind::Stop, Kind::Hog, Kind::Long];
        }
        if let Some(kind) = plan.kinds.iter().find(|kind| !kind.is_of_any()) {
            let why = format!("{} takes a service of its own", kind.name());
            let fix = "leave it out of --causes, or --what-if";
            return Err(Failure::new(Status::Usage, "arguments", why, fix));
        }
        let foreseen = foresee(&plan, pairs).map_err(unchecked)?;
        print(out, args.json, &foreseen, || foreseen_text(&foreseen))?;
        foreseen.holds
    } else {
        let checked = check::check(&plan).map_err(unchecked)?;
        print(out, args.json, &checked, || text(&checked))?;
        checked.holds
    };
    Ok(if holds { ExitCode::SUCCESS } else { ExitCode::from(Status::Failed as u8) })
}

fn unchecked(error: Failed) -> Failure {
    match error {
        Failed::Events(error) => failure::no_events(&error),
        Failed::Io(error) => failed(&error),
        Failed::OneCpu => {
            let (why, fix) = ("it takes two CPUs", "allow it another with taskset");
            Failure::new(Status::Unsupported, "checking the account", why, fix)
        }
    }
}

fn told_of_steal(stolen: Stolen) -> String {
    let agrees = if stolen.agrees() { "agrees" } else { "does not agree" };
    format!("{}it {agrees} to two ticks\n", stolen_text(stolen))
}

fn stolen_text(Stolen { by_events_ns, by_kernel_ns }: Stolen) -> String {
    format!(
        "the hypervisor took {} of the service's CPU by the events, {} by the kernel's ticks\n",
        duration::show(by_events_ns),
        duration::show(by_kernel_ns)
    )
}

fn foreseen_text(WhatIf { rows: all, holds }: &WhatIf) -> String {
    let row = |row: &Foreseen| {
        let off = |ratio: f64| format!("{:+.0} %", (ratio - 1.0) * 100.0);
        let none = || "the replay is off".to_owned();
        vec![
            row.workers.to_string(),
            row.cause.name().to_owned(),
            duration::show(row.with_p99_ns),
            row.foreseen_p99_ns.map_or_else(none, duration::show),
            duration::show(row.seen_p99_ns),
            row.ratio.map_or_else(|| "-".to_owned(), off),
            format!("{} of {}", row.pairs - row.replay_off, row.pairs),
        ]
    };
    let rows: Vec<Vec<String>> = all.iter().map(row).collect();
    let heading = ["threads", "cause", "p99", "without, foreseen", "seen", "off", "pairs"];
    let verdict = if *holds { "holds" } else { "does not hold" };
    let of = |row: &&Foreseen| format!("{} with {}", row.cause.name(), row.workers);
    let none: Vec<String> =
        all.iter().filter(|row| !row.is_foreseen()).map(|row| of(&row)).collect();
    let none = match none.is_empty() {
        true => String::new(),
        false => format!("not foreseen, as the replay is off: {}\n", none.join(", ")),
    };
    format!("{}{none}what is foreseen on this machine {verdict}\n", table::lines(&heading, &rows))
}

fn text(checked: &Checked) -> String {
    let row = |score: &Score| {
        vec![
            score.cause.name().to_owned(),
            score.injections.to_string(),
            score.touched.to_string(),
            score.within.to_string(),
            format!("{} of {}", score.named, score.dominant),
            duration::show(score.injected_ns),
            duration::show(score.charged_ns),
        ]
    };
    let Checked { requests, complete, lost_events, left_out, scores, .. } = checked;
    let rows: Vec<Vec<String>> = scores.iter().map(row).collect();
    let heading =
        ["cause", "times", "touched", "right amount", "named first", "injected", "charged"];
    let missed: Vec<String> = scores.iter().filter_map(missed).collect();
    let missed = match missed.is_empty() {
        true => String::new(),
        false => format!("\nnot as injected:\n{}\n", missed.join("\n")),
    };
    let stolen = stolen_text(checked.stolen);
    let left_out: String = left_out.iter().map(|why| format!("left out: {why}\n")).collect();
    let verdict = if checked.holds { "holds" } else { "does not hold" };
    format!(
        "{requests} requests, {complete} complete, {lost_events} events lost\n{}{missed}\n\
         {stolen}{left_out}the account {verdict} on this machine\n",
        table::lines(&heading, &rows)
    )
}

/// The first request of a cause that was not charged it, as a line.
fn missed(Score { cause, missed, .. }: &Score) -> Option<String> {
    let Missed { latency_ns, injected_ns, charged, .. } = missed.first()?;
    let charged =
        charged.iter().take(3).map(|(name, ns)| format!("{name} {}", duration::show(*ns)));
    let (injected, latency) = (duration::show(*injected_ns), duration::show(*latency_ns));
    let charged = charged.collect::<Vec<String>>().join(", ");
    Some(format!("  {}: {injected} of {latency}; charged: {charged}", cause.name()))
}
