//! `elfen tailor check`: can the account be trusted on this machine?

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use elfen_console::failure::{Failure, Status};
use elfen_console::output::print;
use elfen_console::{duration, table};

use super::failure;
use crate::check::{self, Checked, Failed, Kind, Missed, Plan, Score, Stolen, server};

const EXAMPLES: &str = "\
Examples:
  sudo elfen tailor check                     30 injections of each kind
  sudo elfen tailor check --injections 5      sooner, and less sure
  sudo elfen tailor check --causes io,nagle   these ways alone";

/// Hurt a service of its own in known ways, and see whether the account says so
///
/// A service with one thread is stopped, kept from its CPU by a thread above it and by one beside
/// it, from its lock and from a file, is given long requests and many at once, has an answer held
/// back by Nagle's algorithm, and packets handled on its CPU; another one, in Java, collects its
/// heap (it takes a JDK). What their requests are charged is held against clocks of those that hurt
/// or are hurt: within 10 % or 0.3 ms for 95 of 100 requests that were touched for at least a
/// millisecond. Of each cause, a request that was not is shown; `--json` has the first ten.
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
}

pub(super) fn serve(args: &ServeArgs) -> Result<ExitCode, Failure> {
    server::serve(args.cpu, args.ordinary).map_err(|error| failed(&error))?;
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
    let plan = Plan {
        kinds: args.causes.0.clone(),
        injections: args.injections,
        requests_a_second: args.rps,
        last: Duration::from_millis(15),
        every: Duration::from_millis(150),
    };
    let checked = check::check(&plan).map_err(|error| match error {
        Failed::Events(error) => failure::no_events(&error),
        Failed::Io(error) => failed(&error),
        Failed::OneCpu => {
            let (why, fix) = ("it takes two CPUs", "allow it another with taskset");
            Failure::new(Status::Unsupported, "checking the account", why, fix)
        }
    })?;
    print(out, args.json, &checked, || text(&checked))?;
    Ok(if checked.holds { ExitCode::SUCCESS } else { ExitCode::from(Status::Failed as u8) })
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
    let Stolen { by_events_ns, by_kernel_ns } = checked.stolen;
    let stolen = format!(
        "the hypervisor took {} of the service's CPU by the events, {} by the kernel's ticks\n",
        duration::show(by_events_ns),
        duration::show(by_kernel_ns)
    );
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
