//! `elfen lab bench nap`: how long a lane takes to fall asleep and to wake, beside the thesis's
//! numbers.

use std::io::Write;
use std::process::ExitCode;

use elfen_console::failure::{Failure, Status};
use elfen_console::table;
use elfen_machine::lane_args::LaneArgs;
use serde::Serialize;

use crate::bench::distribution::Distribution;
use crate::bench::nap::{self, Error, Figures, Lanes, Measured, SleepSeenBy};

const EXAMPLES: &str = "\
Examples:
  elfen lab bench nap                    every nap, on the first pair of lanes
  elfen lab bench nap --lanes 2:6 -n 100 on this pair, 100 times
  elfen lab bench nap --json | jq '.naps[] | select(.available) | .nap'";

/// Measure how long a lane takes to fall asleep and to wake
///
/// The experiment of the thesis's Figure 5.7, in cycles of the time stamp counter, with a futex for
/// reference. Naps that cannot run here are listed with the reason.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    lanes: LaneArgs,

    /// Naps of each kind
    #[arg(short = 'n', long, value_name = "COUNT", default_value_t = 1000,
        value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    count: u32,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Cycles to sleep and to wake on the thesis's machine, by the mean of 100 (Figure 5.8).
#[derive(Clone, Copy, Serialize)]
struct Thesis {
    name: &'static str,
    sleep_cycles: u32,
    wake_cycles: u32,
}

const MWAIT: Thesis = Thesis { name: "mwait", sleep_cycles: 2443, wake_cycles: 1036 };
const NANONAP: Thesis = Thesis { name: "nanonap", sleep_cycles: 3285, wake_cycles: 1438 };
const FUTEX: Thesis = Thesis { name: "futex", sleep_cycles: 11518, wake_cycles: 3968 };

/// What the thesis measured of the same kind: UMWAIT and MWAITX are the bare instruction.
fn thesis(nap: &str) -> Option<Thesis> {
    match nap {
        "device" => Some(NANONAP),
        "umwait" | "mwaitx" => Some(MWAIT),
        "futex" => Some(FUTEX),
        _ => None,
    }
}

#[derive(Serialize)]
struct Report {
    request_cpu: u32,
    batch_cpu: u32,
    tsc_mhz: f64,
    /// The nap that `auto` takes here.
    auto: &'static str,
    naps: Vec<NapReport>,
}

#[derive(Serialize)]
struct NapReport {
    nap: &'static str,
    available: bool,
    /// Why it cannot run here, or what could not be measured; empty if there is nothing to say.
    why: String,
    /// `released`: the sibling had the core to itself; `switched`: the kernel had taken the lane
    /// from the thread; `entered`: the thread was about to wait.
    sleep_seen_by: Option<SleepSeenBy>,
    sleep_cycles: Option<Distribution>,
    wake_cycles: Option<Distribution>,
    thesis: Option<Thesis>,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let pair = args.lanes.first_pair()?;
    let batch = pair.batch.iter().next();
    let batch = batch.unwrap_or_else(|| unreachable!("a pair has a batch lane"));
    let lanes = Lanes { request: pair.request, batch };
    let count = usize::try_from(args.count).unwrap_or(usize::MAX);
    let figures = nap::measure(lanes, count).map_err(|error| failure(&error))?;
    let report = Report::new(lanes, figures);
    elfen_console::output::print(out, args.json, &report, || report.text())?;
    Ok(ExitCode::SUCCESS)
}

fn failure(error: &Error) -> Failure {
    let fix = match error {
        Error::Pin { .. } => "see `elfen lanes` for CPUs that can be used",
        Error::Memory(_) => "see `ipcs -l` for the limits of shared memory",
        Error::Stuck(_) => "take load off the machine: another program keeps that CPU",
    };
    Failure::new(Status::Failed, "measuring naps", error, fix)
}

impl Report {
    fn new(lanes: Lanes, figures: Figures) -> Self {
        let Figures { naps, tsc_mhz, auto } = figures;
        let (request_cpu, batch_cpu) = (lanes.request, lanes.batch);
        let naps = naps.into_iter().map(NapReport::new).collect();
        Self { request_cpu, batch_cpu, tsc_mhz: tsc_mhz.round(), auto, naps }
    }

    fn text(&self) -> String {
        let measured = self.naps.iter().filter(|nap| nap.available);
        let rows: Vec<_> = measured.map(NapReport::row).collect();
        let mut text = table::lines(&HEADING, &rows);
        for NapReport { nap, available, why, .. } in &self.naps {
            match (available, why.as_str()) {
                (true, "") => {}
                (true, why) => text += &format!("{nap}: in part: {why}\n"),
                (false, why) => text += &format!("{nap}: not measured: {why}\n"),
            }
        }
        let Self { tsc_mhz, request_cpu, batch_cpu, auto, .. } = self;
        text +=
            &format!("cycles of a {tsc_mhz} MHz counter; CPU {request_cpu} asks CPU {batch_cpu}\n");
        for (seen_by, explained) in EXPLAINED {
            if self.naps.iter().any(|nap| nap.sleep_seen_by == Some(seen_by)) {
                text += &format!("{}: sleep lasts until {explained}\n", word(seen_by));
            }
        }
        text + &format!("auto takes: {auto}\n")
    }
}

const HEADING: [&str; 11] =
    ["nap", "sleep", "p99", "max", "seen by", "wake", "p99", "max", "n", "thesis: sleep", "wake"];

const EXPLAINED: [(SleepSeenBy, &str); 3] = [
    (SleepSeenBy::Released, "the sibling has the core to itself"),
    (SleepSeenBy::Switched, "the kernel takes the lane from the thread; the CPU's part is missing"),
    (SleepSeenBy::Entered, "the thread is about to wait; the CPU's part is missing"),
];

fn word(seen_by: SleepSeenBy) -> &'static str {
    match seen_by {
        SleepSeenBy::Released => "released",
        SleepSeenBy::Switched => "switched",
        SleepSeenBy::Entered => "entered",
    }
}

impl NapReport {
    fn new(measured: Measured) -> Self {
        let Measured { nap, available, why, sleep_seen_by, sleep_cycles, wake_cycles } = measured;
        let thesis = thesis(nap);
        Self { nap, available, why, sleep_seen_by, sleep_cycles, wake_cycles, thesis }
    }

    fn row(&self) -> Vec<String> {
        let cells = |distribution: &Option<Distribution>| match distribution {
            Some(d) => [d.median, d.p99, d.max].map(|cycles| format!("{cycles:.0}")),
            None => ["-"; 3].map(str::to_owned),
        };
        let n = self.wake_cycles.or(self.sleep_cycles).map_or(0, |distribution| distribution.n);
        let thesis = match self.thesis {
            Some(Thesis { name, sleep_cycles, wake_cycles }) => {
                [format!("{sleep_cycles} ({name})"), wake_cycles.to_string()]
            }
            None => ["-"; 2].map(str::to_owned),
        };
        [self.nap.to_owned()]
            .into_iter()
            .chain(cells(&self.sleep_cycles))
            .chain([self.sleep_seen_by.map_or("-", word).to_owned()])
            .chain(cells(&self.wake_cycles))
            .chain([n.to_string()])
            .chain(thesis)
            .collect()
    }
}
