//! `elfen lab bench overlap`: how long a batch runs next to requests, and how fast it is off its
//! lane and back.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use elfen_console::duration::number;
use elfen_console::failure::{Failure, Status};
use elfen_console::{duration, table};
use elfen_machine::lane_args::LaneArgs;
use elfen_run::args::nap::NapName;
use elfen_run::args::poll_timing::PollTimingArgs;
use elfen_run::poll_timing::PollReport;
use serde::Serialize;

use crate::bench::distribution::Distribution;
use crate::bench::outside::{Case, Error, Inject, Measured, Programs};

const EXAMPLE: &str = "\
Examples:
  sudo elfen lab bench overlap --lanes 0:1
  sudo elfen lab bench overlap --lanes 0:1 --nice 19   as under `nice`
  sudo elfen lab bench overlap --lanes 0:1 --stranger  next to another program";

/// Measure how long a batch runs next to requests under borrow-idle, and how fast it is off its
/// lane
///
/// Two small programs that know nothing of Elfen note when they had their CPU: one is busy and idle
/// in turns, with pauses drawn at random, and the other, under `elfen run`, reads the clock all the
/// time. For checks in its source, for a guard, and for what a run chooses for a stripped program
/// that works in a loop without a call, once a second of learning is over; beside it stands what
/// the run reports. Needs a C compiler, and root for the task map.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Args {
    #[command(flatten)]
    lanes: LaneArgs,

    /// How batch and guard nap
    #[arg(long, value_enum, default_value = "auto")]
    nap: NapName,

    #[command(flatten)]
    looks: PollTimingArgs,

    /// How long a request keeps its lane busy
    #[arg(long, value_name = "TIMES", value_delimiter = ',', value_parser = duration::parse,
        default_value = "200us,1ms,10ms")]
    turns: Vec<Duration>,

    /// For how many seconds turns of one length are played
    #[arg(long, value_name = "SECONDS", default_value_t = 5,
        value_parser = clap::value_parser!(u64).range(1..=600))]
    seconds: u64,

    /// Start `elfen run` at this niceness
    #[arg(long, value_name = "NICE", default_value_t = 0,
        value_parser = clap::value_parser!(i32).range(0..=19))]
    nice: i32,

    /// Have another program spin on the batch lane, at nice 0
    #[arg(long)]
    stranger: bool,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    looked: PollReport,
    nice: i32,
    stranger: bool,
    overlaps: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    inject: &'static str,
    turn_ns: u128,
    turns: usize,
    busy_ns: u64,
    seen_ns: u64,
    seen_percent: f64,
    reported_ns: u64,
    reported_percent: f64,
    /// Within a fifth of what was seen, or a tenth of a percent of the busy time.
    agrees: bool,
    stop_ns: Option<Distribution>,
    resume_ns: Option<Distribution>,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let looks = args.looks.timing()?;
    let pair = args.lanes.first_pair()?;
    let Some(batch) = pair.batch.iter().next() else { unreachable!("a pair has a batch lane") };
    let programs = Programs::build().map_err(failed)?;
    let mut options = args.looks.words().to_vec();
    if let Some(nap) = args.nap.name() {
        options.extend(["--nap".to_owned(), nap.to_owned()]);
    }
    let mut overlaps = Vec::new();
    for inject in [Inject::Inline, Inject::Guard, Inject::Auto] {
        for &turn in &args.turns {
            let case = Case {
                inject,
                turn,
                seconds: args.seconds,
                nice: args.nice,
                stranger: args.stranger,
                options: &options,
            };
            let measured = programs.measure((pair.request, batch), &case).map_err(failed)?;
            overlaps.push(row(&case, measured));
        }
    }
    let report =
        Report { looked: looks.into(), nice: args.nice, stranger: args.stranger, overlaps };
    elfen_console::output::print(out, args.json, &report, || report.text())?;
    Ok(ExitCode::SUCCESS)
}

fn failed(error: Error) -> Failure {
    let (status, fix) = match error {
        Error::Requests(_) => (Status::Unsupported, "let it ask perf_event_open(2): be root"),
        Error::Io { .. } | Error::Compiler(_) => {
            (Status::Unsupported, "install a C compiler (`cc`), and allow this process both CPUs")
        }
        Error::NoAccount => (Status::Unsupported, "the kernel's account takes eBPF: be root"),
        Error::Missing(_) => {
            (Status::Failed, "build all of Elfen (`cargo build --release`), or set ELFEN_LIB")
        }
        Error::Run(_) => (Status::Failed, "try `elfen run` with the same options"),
    };
    Failure::new(status, "measuring the overlap", error, fix)
}

fn row(case: &Case<'_>, Measured { seen, reported_ns }: Measured) -> Row {
    let percent = |part: u64| {
        let thousandths = (number(part) / number(seen.busy_ns.max(1)) * 100_000.0).round();
        thousandths / 1000.0
    };
    let apart_ns = reported_ns.abs_diff(seen.overlapped_ns);
    Row {
        inject: case.inject.name(),
        turn_ns: case.turn.as_nanos(),
        turns: seen.turns,
        busy_ns: seen.busy_ns,
        seen_ns: seen.overlapped_ns,
        seen_percent: percent(seen.overlapped_ns),
        reported_ns,
        reported_percent: percent(reported_ns),
        agrees: apart_ns <= (seen.overlapped_ns / 5).max(seen.busy_ns / 1000),
        stop_ns: seen.stop_ns,
        resume_ns: seen.resume_ns,
    }
}

impl Report {
    fn text(&self) -> String {
        let us = |times: &Option<Distribution>, of: fn(&Distribution) -> f64| {
            times.as_ref().map_or("-".to_owned(), |times| format!("{:.2}", of(times) / 1000.0))
        };
        let cells = |row: &Row| {
            let turn = duration::show(u64::try_from(row.turn_ns).unwrap_or(u64::MAX));
            vec![
                row.inject.to_owned(),
                turn,
                row.turns.to_string(),
                format!("{:.3}", row.seen_percent),
                format!("{:.3}", row.reported_percent),
                if row.agrees { "yes" } else { "no" }.to_owned(),
                us(&row.stop_ns, |times| times.median),
                us(&row.stop_ns, |times| times.p99),
                us(&row.resume_ns, |times| times.median),
            ]
        };
        let rows: Vec<Vec<String>> = self.overlaps.iter().map(cells).collect();
        let heading = [
            "inject",
            "turn",
            "turns",
            "% seen",
            "% reported",
            "agree",
            "us to stop",
            "p99",
            "us to resume",
        ];
        table::lines(&heading, &rows)
    }
}
