//! `elfen lab bench shim`: what observing by `elfen shim` gives, and what it costs.

use std::ffi::OsStr;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::ValueEnum;
use elfen_console::duration::number;
use elfen_console::failure::{Failure, Status};
use elfen_console::{output, table};
use elfen_machine::affinity;
use elfen_shim::clock::Clock;
use elfen_shim::reach::program_file;

use crate::bench::shim::{
    self, Agreement, CHEAP_PERCENT, Competitor, Cost, Error, Functions, Lanes, Measured, Order,
    Part, Profile, Rate, RoundTrip, Size, Spread, Switches, TRUE_SHARE_PERCENT, Truth,
};

const EXAMPLES: &str = "\
Examples:
  elfen lab bench shim --only rates --only dte       rates, and wrong ones
  elfen lab bench shim --on 0 --from 1 --json        all of it: some minutes
  workloads/lua.sh luas
  elfen lab bench shim --only programs --lua luas/lua-returns
                                                 by a Lua that says what runs";

/// Measure what `elfen shim` sees, and what being observed costs
///
/// How often a word is read and seen to change; how much slower programs are that write it, in
/// pairs of runs, beside what one bare load at the same times costs them; Lua's as well, with perf
/// record beside it; whether double-time error finds the rates that are wrong; how far recordings
/// of elfen-truth are from its own stamps, alone and beside a competitor of the observer's; whether
/// all switches of a lane are accounted for; what functions that say that they run cost, by stores
/// and by hooks, and whether those that perf finds are all seen. All depends on how far apart the
/// lanes are: far ones are waited for, and what was measured on them is measured again; if they
/// stay so, that is said.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The lane that is observed [default: the first of this process]
    #[arg(long, value_name = "LANE")]
    on: Option<u32>,

    /// The observer's lane, on another core [default: the last of this process]
    #[arg(long, value_name = "LANE")]
    from: Option<u32>,

    /// Measure this alone; may be repeated
    #[arg(long, value_name = "PART")]
    only: Vec<Part>,

    /// Pairs of runs, observed and not, that each cost is the median of
    #[arg(long, value_name = "N", default_value = "41", value_parser = pairs)]
    pairs: usize,

    /// A Lua to run scripts by, as one whose functions say that they are entered; may be repeated
    /// [default: lua5.4 of PATH]
    #[arg(long, value_name = "FILE")]
    lua: Vec<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let lua = match &args.lua[..] {
        [] => program_file(OsStr::new("lua5.4")).into_iter().collect(),
        named => named.to_vec(),
    };
    let (only, pairs) = (args.only.clone(), args.pairs);
    let order = Order { lanes: lanes(args)?, only, pairs, lua };
    let measured = shim::measure(&order).map_err(|error| {
        let fix = match error {
            Error::Program(_) => "see that it runs by itself",
            Error::Missing(_) | Error::Truth(_) => {
                "build all of Elfen, or name the folder in ELFEN_LIB"
            }
            Error::Io(_) | Error::NoRoundTrip => "leave both lanes to it, and try again",
        };
        Failure::new(Status::Failed, "measuring elfen shim", error, fix)
    })?;
    output::print(out, args.json, &measured, || text(&measured))?;
    Ok(ExitCode::SUCCESS)
}

fn pairs(text: &str) -> Result<usize, String> {
    let pairs = text.parse().ok().filter(|pairs| (1..=10_000).contains(pairs));
    pairs.ok_or_else(|| "pairs are from 1 to 10000".to_owned())
}

fn lanes(args: &Args) -> Result<Lanes, Failure> {
    let allowed = affinity::allowed()
        .map_err(|error| Failure::new(Status::Failed, "reading the lanes", error, "try again"))?;
    let usage = |why: String| {
        Failure::new(Status::Usage, "lanes", why, format!("use CPUs {allowed}, two of them"))
    };
    if allowed.len() < 2 {
        let (why, fix) = ("observer and observed need a CPU each", "allow this process a second");
        return Err(Failure::new(Status::Unsupported, "elfen lab bench shim", why, fix));
    }
    let free = |taken: Option<u32>| allowed.iter().filter(move |cpu| Some(*cpu) != taken);
    let on = args.on.or_else(|| free(args.from).next()).unwrap_or(0);
    let from = args.from.or_else(|| free(Some(on)).last()).unwrap_or(0);
    if let Some(cpu) = [on, from].into_iter().find(|&cpu| !allowed.contains(cpu)) {
        return Err(usage(format!("CPU {cpu} is not for this process")));
    }
    if on == from {
        return Err(usage(format!("CPU {on} cannot observe itself")));
    }
    let clock = Clock::of_this_machine().map_err(|error| {
        let fix = "use a machine whose kernel keeps time by the time stamp counter";
        Failure::new(Status::Unsupported, "the clock of samples", error, fix)
    })?;
    Ok(Lanes { on, from, clock })
}

fn text(measured: &Measured) -> String {
    let Measured { clock_step_ticks, ticks_per_us, line_round_trip_ticks, .. } = measured;
    let mut text = format!("{ticks_per_us:.0} ticks a microsecond, in steps of {clock_step_ticks}");
    if let Some(ticks) = line_round_trip_ticks {
        text += &format!("; a line goes there and back in {ticks}");
    }
    text.push('\n');
    let name = |part: &Part| {
        part.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    };
    for RoundTrip { part, before, after } in &measured.round_trips {
        let after = after.map_or_else(|| "none that was measured".to_owned(), |t| t.to_string());
        text += &format!("{}: a line there and back in {before} ticks, then {after}\n", name(part));
    }
    for part in &measured.disturbed {
        let name = name(part);
        text += &format!("disturbed: {name}: the lanes were far apart, so this is not usual\n");
    }
    for why in &measured.left_out {
        text += &format!("left out: {why}\n");
    }
    let periods = |ticks: u64| if ticks == 0 { "max".to_owned() } else { ticks.to_string() };
    let some = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |v| format!("{v:.1}"));
    let rates = measured.rates.iter().map(|rate| {
        let Rate { word, ticks_a_sample, ticks_a_new_value, bytes_a_run } = rate;
        let figures = [Some(*ticks_a_sample), *ticks_a_new_value, *bytes_a_run].map(some);
        [word.clone()].into_iter().chain(figures).collect()
    });
    let heading = ["a word that is", "ticks a sample", "ticks a new value", "bytes a run"];
    add(&mut text, &heading, rates.collect());
    let costs = measured.costs.iter().map(|cost| {
        let Cost { program, stores, by, period_ticks, slowdown_percent, low, high, .. } = cost;
        let names = [program, stores, *by].map(str::to_owned).into_iter();
        let period = match (cost.auto, period_ticks) {
            (false, ticks) => ticks.map_or("-".to_owned(), periods),
            (true, Some(ticks)) => format!("auto: {ticks}"),
            (true, None) => "auto".to_owned(),
        };
        let figures = [slowdown_percent, low, high].map(|value| format!("{value:.1}"));
        let distance = [period, cost.round_trip_ticks.to_string()];
        names.chain(distance).chain(figures).chain([cost.pairs.to_string()]).collect()
    });
    let heading = [
        "observed",
        "stores",
        "by",
        "each, ticks",
        "round trip",
        "% slower",
        "p25",
        "p75",
        "pairs",
    ];
    add(&mut text, &heading, costs.collect());
    let cheap = shim::cheap_from(&measured.costs).into_iter().map(|(program, stores, ticks)| {
        vec![program, stores, ticks.map_or_else(|| "-".to_owned(), |ticks| ticks.to_string())]
    });
    let heading = format!("at most {CHEAP_PERCENT} % from, ticks");
    add(&mut text, &["observed", "stores", &heading], cheap.collect());
    let truth = measured.truth.iter().map(|truth| {
        let Truth { period, run_ns, runs, seen_percent, error_percent, share_error_percent } =
            truth;
        let figures =
            [*seen_percent, error_percent.median, error_percent.p90, *share_error_percent]
                .map(|value| format!("{value:.1}"));
        let about = [(*period).to_owned(), format!("{} to {} ns", run_ns.0, run_ns.1)];
        about.into_iter().chain([runs.to_string()]).chain(figures).collect()
    });
    let heading = ["period", "turns", "n", "% seen", "% off", "p90", "share off by"];
    add(&mut text, &heading, truth.collect());
    let dte = measured.dte.iter().map(|dte| {
        let shares = [dte.removed_percent, dte.kept_percent, dte.kept_by_paper_percent];
        let highest = [dte.highest_before, dte.highest_after, dte.left_out_percent];
        let counts = [periods(dte.period_ticks), dte.wrong.to_string()].into_iter();
        let figures = shares.into_iter().chain(highest).map(|value| format!("{value:.1}"));
        counts.chain(figures).collect()
    });
    let heading = [
        "period, ticks",
        "wrong rates",
        "% removed",
        "% right kept",
        "by the paper's rule",
        "highest",
        "then",
        "% left out",
    ];
    add(&mut text, &heading, dte.collect());
    add_beside(&mut text, measured);
    let sizes = measured.sizes.iter().map(|size| {
        let Size { program, period, period_ns, runs_a_second, bytes_a_run, .. } = size;
        let figures = [
            format!("{:.2}", 1e3 / number((*period_ns).max(1))),
            format!("{:.0}", runs_a_second / 1e3),
            format!("{bytes_a_run:.2}"),
            format!("{:.2}", size.bytes_a_second / 1e6),
            format!("{:.2}", size.gigabytes_a_minute),
            format!("{:.0}", size.write_ms_a_second),
        ];
        [program.clone(), (*period).to_owned()].into_iter().chain(figures).collect()
    });
    let heading = [
        "recording of",
        "each",
        "M samples/s",
        "1000 runs/s",
        "bytes a run",
        "MB/s",
        "GB a minute",
        "ms to write a second",
    ];
    add(&mut text, &heading, sizes.collect());
    text
}

/// What is held against somebody else's account: the kernel's, or another way of measuring.
fn add_beside(text: &mut String, measured: &Measured) {
    let per_mille = |value: f64| format!("{value:.2}");
    let ms = |ns: u64| format!("{:.1}", number(ns) / 1e6);
    let competitor = measured.competitor.iter().map(|one| {
        let Competitor { time_ns, gap_ns, not_run_ns, gap_error_percent, share_error_percent } =
            one;
        let times = [time_ns, gap_ns, not_run_ns].map(|ns| ms(*ns)).into_iter();
        times.chain([gap_error_percent, share_error_percent].map(|v| per_mille(*v))).collect()
    });
    let heading = ["beside a competitor, ms", "gaps", "by the kernel", "% off", "share off by"];
    add(text, &heading, competitor.collect());
    let switches = measured.switches.iter().map(|one| {
        let Switches { period_ns, switches, seen, missed, stretches, .. } = one;
        let counts = [period_ns, switches, seen, missed, stretches].map(u64::to_string);
        counts.into_iter().chain([per_mille(one.stretches_seen_percent)]).collect()
    });
    let heading =
        ["switches, each ns", "by the scheduler", "seen", "missed", "stretches", "% seen"];
    add(text, &heading, switches.collect());
    let agreements = measured.agreements.iter().map(|one| {
        let Agreement { program, period_ticks, by_pairs_percent, .. } = one;
        let names = [program.clone(), period_ticks.to_string()].into_iter();
        let measured = one.by_measure_cost_percent;
        let figures = [*by_pairs_percent, measured, one.apart, one.low, one.high];
        let turns = [one.turns, one.turns_left_out].map(|turns| turns.to_string());
        names.chain(figures.map(per_mille)).chain(turns).collect()
    });
    let heading = [
        "observed",
        "each, ticks",
        "% slower",
        "by --measure-cost",
        "apart",
        "p25",
        "p75",
        "turns",
        "left out",
    ];
    add(text, &heading, agreements.collect());
    let functions = measured.functions.iter().map(|one| {
        let Functions { says, file_bytes, ns_a_call, low, high, caller_percent } = one;
        let share = caller_percent.map_or_else(|| "-".to_owned(), |share| format!("{share:.1}"));
        let figures = [ns_a_call, low, high].map(|value| per_mille(*value));
        let names = [(*says).to_owned(), file_bytes.to_string()].into_iter();
        names.chain(figures).chain([share]).collect()
    });
    let share = format!("caller %, of {TRUE_SHARE_PERCENT:.1}");
    let heading = ["functions say by", "file, bytes", "ns an empty call", "p25", "p75", &share];
    add(text, &heading, functions.collect());
    let profiles = measured.profiles.iter().map(|one| {
        let Profile { program, by_perf, found, missing } = one;
        let missing = if missing.is_empty() { "-".to_owned() } else { missing.join(" ") };
        vec![program.clone(), by_perf.to_string(), found.to_string(), missing]
    });
    let heading = ["2 % and more by perf, of", "functions", "seen", "not seen"];
    add(text, &heading, profiles.collect());
    let spreads = measured.spreads.iter().map(|one| {
        let Spread { program, period_ticks, p10, median, p90, kept_percent, .. } = one;
        let names = [program.clone(), period_ticks.to_string()].into_iter();
        let figures = [p10, median, p90, kept_percent].map(|value| per_mille(*value));
        names.chain(figures).chain([one.same_of_ten_hottest.to_string()]).collect()
    });
    let heading =
        ["calls a us of", "each, ticks", "p10", "median", "p90", "% kept", "same of ten hottest"];
    add(text, &heading, spreads.collect());
}

/// Nothing of a part that was not measured.
fn add(text: &mut String, heading: &[&str], rows: Vec<Vec<String>>) {
    if rows.is_empty() {
        return;
    }
    *text += "\n";
    *text += &table::lines(heading, &rows);
}
