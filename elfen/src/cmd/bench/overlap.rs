//! `elfen bench overlap`: how long a batch runs next to requests, by turns of the request lane.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use serde::Serialize;

use crate::bench::borrower::Inject;
use crate::bench::distribution::number;
use crate::bench::overlap::{self, Overlap};
use crate::cmd::bench::{Signals, run_here};
use crate::cmd::failure::{Failure, Status};
use crate::cmd::lane_args::LaneArgs;
use crate::cmd::look_args::{LookArgs, Looked};
use crate::cmd::run::NapName;
use crate::cmd::{duration, table, warn};

const EXAMPLE: &str = "\
Example:
  sudo elfen bench overlap --lanes 0:1 --nap spin";

/// Measure how long a batch runs next to requests under borrow-idle
///
/// The request lane is busy and idle in turns of 50 us to 50 ms. For checks in the source and for guards; as seen from
/// outside, and as the runtime reports it.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Args {
    #[command(flatten)]
    lanes: LaneArgs,

    /// How batch and guard nap
    #[arg(long, value_enum, default_value = "auto")]
    nap: NapName,

    #[command(flatten)]
    looks: LookArgs,

    /// How long turns of one length are played
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = duration::parse)]
    duration: Duration,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

const TURNS: [Duration; 6] = [
    Duration::from_micros(50),
    Duration::from_micros(200),
    Duration::from_millis(1),
    Duration::from_millis(5),
    Duration::from_millis(20),
    Duration::from_millis(50),
];

#[derive(Serialize)]
struct Report {
    nap: &'static str,
    #[serde(flatten)]
    looked: Looked,
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
    /// By the scheduler's trace, of the busy time that is reported; for guards, where this process may have a trace.
    traced_ns: Option<u64>,
    traced_percent: Option<f64>,
    reported_busy_ns: u64,
    reported_ns: u64,
    reported_percent: f64,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let looks = args.looks.looks()?;
    let mut overlaps = Vec::new();
    let mut nap = "";
    // Checks first: they find the run that was in the environment when they first looked.
    for inject in [Inject::Inline, Inject::Guard] {
        let (order, channels) = run_here(&args.lanes, args.nap, looks, Signals::Tasks)?;
        nap = order.nap.kind().name();
        let found = overlap::measure(&order, &channels, inject, &TURNS, args.duration);
        let found = found.map_err(|error| {
            let fix = "allow this process both CPUs: see `elfen doctor`";
            Failure::new(Status::Failed, "measuring the overlap", error, fix)
        })?;
        overlaps.extend(TURNS.iter().zip(found).map(|(turn, found)| row(inject, *turn, &found)));
    }
    if overlaps.iter().all(|row| row.traced_ns.is_none()) {
        warn(
            "no scheduler's trace: it takes root, and `mount -t tracefs tracefs /sys/kernel/tracing`",
        );
    }
    let report = Report { nap, looked: looks.into(), overlaps };
    crate::cmd::print(out, args.json, &report, || report.text())?;
    Ok(ExitCode::SUCCESS)
}

fn row(inject: Inject, turn: Duration, overlap: &Overlap) -> Row {
    let percent = |part: u64, whole: u64| {
        let thousandths = (number(part) / number(whole.max(1)) * 100_000.0).round();
        thousandths / 1000.0
    };
    let Overlap { turns, busy_ns, seen_ns, traced_ns, reported_busy_ns, reported_ns } = *overlap;
    Row {
        inject: inject.name(),
        turn_ns: turn.as_nanos(),
        turns,
        busy_ns,
        seen_ns,
        seen_percent: percent(seen_ns, busy_ns),
        traced_ns,
        traced_percent: traced_ns.map(|traced_ns| percent(traced_ns, reported_busy_ns)),
        reported_busy_ns,
        reported_ns,
        reported_percent: percent(reported_ns, reported_busy_ns),
    }
}

impl Report {
    fn text(&self) -> String {
        let cells = |row: &Row| {
            let turn = duration::show(u64::try_from(row.turn_ns).unwrap_or(u64::MAX));
            let percents = [Some(row.seen_percent), row.traced_percent, Some(row.reported_percent)];
            let percents = percents.map(|p| p.map_or("-".to_owned(), |p| format!("{p:.3}")));
            [row.inject.to_owned(), turn, row.turns.to_string()]
                .into_iter()
                .chain(percents)
                .collect()
        };
        let rows: Vec<Vec<String>> = self.overlaps.iter().map(cells).collect();
        let heading = ["inject", "turn", "turns", "% seen", "% traced", "% reported"];
        table::lines(&heading, &rows)
    }
}
