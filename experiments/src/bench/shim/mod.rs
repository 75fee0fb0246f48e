//! `elfen lab bench shim`: what `elfen shim` observes, and what observing costs. It measures how
//! often a word can be read, how much the observed program slows down, and whether the double-time
//! error finds wrong rates. It also compares recordings with the observed program's own record.
//!
//! All results depend on the distance of the two lanes, which the host of a virtual machine may
//! change at any time. So the distance is measured before and after each part. If the lanes are far
//! apart, the benchmark waits.

mod cost;
mod dte;
mod functions;
mod programs;
mod rates;
mod stage;
mod switches;
mod truth;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use elfen_console::duration::number;
use elfen_machine::affinity;
use elfen_machine::lane_args::LaneArgs;
use elfen_shim::clock::Clock;
use elfen_shim::reach::program_file;

use super::{
    BenchError, BenchReport, Column, Progress, Table, label, lanes, number as figure, rounded, row,
    runs,
};
use stage::{Lanes, Stage};

const EXAMPLES: &str = "\
Examples:
  elfen lab bench shim --only rates --only dte       rates and wrong rates
  elfen lab bench shim --lanes 0:1 --json            all parts; takes minutes
  workloads/lua.sh luas
  elfen lab bench shim --only programs --lua luas/lua-returns
                                                 a Lua that publishes entries";

/// Measure the accuracy of `elfen shim`, and the cost of being observed
///
/// `rates`: how often a word is read, and how many of its changes are detected. `dte`: whether the
/// double-time error detects wrong rates. `truth`: how far recordings of elfen-truth differ from
/// its own time stamps. `competitor`: the same, while another thread runs on the observer's lane.
/// `switches`: whether all context switches of a lane are detected.
///
/// `costs`: the slowdown of programs that write the observed word, compared with a single load at
/// the same times. `functions`: the cost of functions that publish their entries, with stores and
/// with hooks. `programs`: the slowdown of Lua, compared with perf record. `profile`: whether Shim
/// finds all functions that perf finds. `spread`: how the spread of a rate narrows with the period.
///
/// All results depend on the distance of the lanes, which is the time of a cache line's round trip
/// between them. A hypervisor may change it. If the round trip is slow, the benchmark waits, and
/// repeats the affected measurement. The first table shows the distances.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct BenchShimArgs {
    /// The observed lane and the observer's lane, on different cores: OBSERVED:OBSERVER [default:
    /// the first and the last CPU of this process]
    #[command(flatten)]
    lanes: LaneArgs,

    /// Measure only this part; may be repeated
    #[arg(long, value_name = "PART")]
    only: Vec<Part>,

    /// Number of rounds, each with and without the observer; a cost is the median of all rounds
    #[arg(long, value_name = "N", default_value_t = 41, value_parser = runs())]
    runs: usize,

    /// A Lua interpreter for the scripts, such as one whose functions publish their entries; may be
    /// repeated [default: lua5.4 of PATH]
    #[arg(long, value_name = "FILE")]
    lua: Vec<PathBuf>,
}

/// The parts that can be measured separately.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Part {
    Rates,
    Dte,
    Truth,
    Competitor,
    Switches,
    Costs,
    Functions,
    Programs,
    Profile,
    Spread,
}

/// The distance of the lanes: ticks for a round trip of a cache line.
const ROUND_TRIPS: &[Column] = &[
    label("part", "part"),
    figure("shortest", "cache line round trip, shortest", "ticks", 0),
    figure("longest", "longest", "ticks", 0),
    label("disturbed", "disturbed"),
    figure("repeated", "repeated", "", 0),
];

pub(crate) fn run(args: &BenchShimArgs, progress: Progress<'_>) -> Result<BenchReport, BenchError> {
    let lanes = observed_and_observer(args)?;
    let lua = match &args.lua[..] {
        [] => program_file(OsStr::new("lua5.4")).into_iter().collect(),
        named => named.to_vec(),
    };
    let mut report = BenchReport::default();
    let mut stage = Stage::new(lanes, progress);
    let asked = |part: &&Part| args.only.is_empty() || args.only.contains(part);
    for &part in Part::value_variants().iter().filter(asked) {
        let of_lua = matches!(part, Part::Programs | Part::Profile | Part::Spread);
        if of_lua && lua.is_empty() {
            let why = "lua5.4 is not installed, and there is no --lua";
            report.left_out.push(format!("{}: {why}", name(part)));
        }
        let all: Vec<&Path> = match of_lua {
            true => lua.iter().map(PathBuf::as_path).collect(),
            false => vec![Path::new("")],
        };
        for lua in all {
            stage.begin(name(part));
            let found = match part {
                Part::Rates => rates::measure(&mut stage)?,
                Part::Dte => dte::measure(&mut stage)?,
                Part::Truth => truth::measure(&mut stage)?,
                Part::Competitor => truth::competitor(&mut stage)?,
                Part::Switches => switches::measure(&mut stage)?,
                Part::Costs => cost::measure(&mut stage, args.runs)?,
                Part::Functions => functions::measure(&mut stage)?,
                Part::Programs => programs::measure(&mut stage, lua, args.runs)?,
                Part::Profile => programs::profile(&mut stage, lua)?,
                Part::Spread => programs::spread(&mut stage, lua)?,
            };
            found.tables.into_iter().for_each(|table| report.add(table));
            report.left_out.extend(found.left_out);
        }
    }
    let (rows, longest) = stage.end();
    report.tables.insert(0, Table { key: "round_trips", columns: ROUND_TRIPS, rows });
    Ok(report.about(row![
        "clock_step_ticks" => lanes.clock.step_ticks,
        "ticks_per_us" => rounded(number(lanes.clock.ticks_per_second) / 1e6),
        // The longest distance during any measurement.
        "line_round_trip_ticks" => longest,
    ]))
}

fn name(part: Part) -> String {
    part.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

fn observed_and_observer(args: &BenchShimArgs) -> Result<Lanes, BenchError> {
    let clock = Clock::of_this_machine().map_err(|error| {
        let fix = "use a machine whose kernel uses the time stamp counter as its clock";
        BenchError::unsupported(format!("the clock of samples: {error}"), fix)
    })?;
    let (on, from) = if args.lanes.by_hand() {
        lanes(&args.lanes)?
    } else {
        let allowed = affinity::allowed()?;
        match (allowed.iter().next(), allowed.iter().last()) {
            (Some(first), Some(last)) if first != last => (first, last),
            _ => {
                let why = "observer and observed program require a CPU each, and this process may \
                    use only one";
                return Err(BenchError::unsupported(why, "allow this process a second CPU"));
            }
        }
    };
    Ok(Lanes { on, from, clock })
}
