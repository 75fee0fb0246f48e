//! `elfen bench shim`: what observing by `elfen shim` gives, and what it costs.

use std::io::Write;
use std::process::ExitCode;

use elfen_console::duration::number;
use elfen_console::failure::{Failure, Status};
use elfen_console::{output, table};
use elfen_host::affinity;
use elfen_shim::clock::Clock;

use crate::bench::shim::{self, Cost, Error, Lanes, Measured, Rate, Size, Truth};

const EXAMPLES: &str = "\
Examples:
  elfen bench shim                      about a minute
  elfen bench shim --on 0 --from 1 --json | jq .dte";

/// Measure what `elfen shim` sees, and what being observed costs
///
/// How often a word is read and seen to change; how much slower programs are that write it, in
/// pairs of runs; whether double-time error finds the rates that are wrong; and how far recordings
/// of elfen-truth are from its own stamps. Rates and costs depend on how far apart the lanes are:
/// far ones are waited for, and if they stay so, that is said.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The lane that is observed [default: the first of this process]
    #[arg(long, value_name = "LANE")]
    on: Option<u32>,

    /// The observer's lane, on another core [default: the last of this process]
    #[arg(long, value_name = "LANE")]
    from: Option<u32>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let lanes = lanes(args)?;
    let measured = shim::measure(lanes).map_err(|error| {
        let fix = match error {
            Error::Truth(_) => "build all of Elfen, or name the folder in ELFEN_LIB",
            Error::Io(_) | Error::NoRoundTrip => "leave both lanes to it, and try again",
        };
        Failure::new(Status::Failed, "measuring elfen shim", error, fix)
    })?;
    output::print(out, args.json, &measured, || text(&measured))?;
    Ok(ExitCode::SUCCESS)
}

fn lanes(args: &Args) -> Result<Lanes, Failure> {
    let allowed = affinity::allowed()
        .map_err(|error| Failure::new(Status::Failed, "reading the lanes", error, "try again"))?;
    let usage = |why: String| {
        Failure::new(Status::Usage, "lanes", why, format!("use CPUs {allowed}, two of them"))
    };
    if allowed.len() < 2 {
        let (why, fix) = ("observer and observed need a CPU each", "allow this process a second");
        return Err(Failure::new(Status::Unsupported, "elfen bench shim", why, fix));
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
    let mut text = format!(
        "{ticks_per_us:.0} ticks a microsecond, in steps of {clock_step_ticks}; a line goes there \
         and back in {line_round_trip_ticks}\n"
    );
    if measured.disturbed {
        text += "disturbed: the lanes are far apart now, so nothing below is usual\n";
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
        let Cost { program, stores, period_ticks, slowdown_percent, low, high, pairs } = cost;
        let names = [*program, *stores].map(str::to_owned).into_iter();
        let figures = [slowdown_percent, low, high].map(|value| format!("{value:.1}"));
        names.chain([periods(*period_ticks)]).chain(figures).chain([pairs.to_string()]).collect()
    });
    let heading = ["observed", "stores", "period, ticks", "% slower", "p25", "p75", "pairs"];
    add(&mut text, &heading, costs.collect());
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
        let highest = [dte.highest_before, dte.highest_after];
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
    ];
    add(&mut text, &heading, dte.collect());
    let sizes = measured.sizes.iter().map(|size| {
        let Size { period, period_ns, runs_a_second, bytes_a_run, bytes_a_second } = size;
        let figures = [
            format!("{:.2}", 1e3 / number((*period_ns).max(1))),
            format!("{:.0}", runs_a_second / 1e3),
            format!("{bytes_a_run:.2}"),
            format!("{:.2}", bytes_a_second / 1e6),
        ];
        [(*period).to_owned()].into_iter().chain(figures).collect()
    });
    let heading = ["recording at", "M samples/s", "1000 runs/s", "bytes a run", "MB/s"];
    add(&mut text, &heading, sizes.collect());
    text
}

fn add(text: &mut String, heading: &[&str], rows: Vec<Vec<String>>) {
    *text += "\n";
    *text += &table::lines(heading, &rows);
}
