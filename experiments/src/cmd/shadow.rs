//! `elfen lab shadow`: repeats the experiments of Shadow Profiling, and prints the published
//! figures beside ours.

use std::fmt::Write as _;
use std::io::Write;
use std::process::ExitCode;

use elfen_console::failure::Failure;
use elfen_console::output::print;
use elfen_console::table;

use super::bench::failure;
use super::laboratory::Laboratory;
use super::meter::Meter;
use crate::profile::programs;
use crate::profile::shadow::{self, Configuration, Experiment, KINDS, Outcome, Plan, mean};

const EXAMPLE: &str = "\
Each program runs in turn without the profiler and by shadows. Its exact profile comes first, and \
takes a hundred times as long as the program. All 18 configurations of the paper take about an hour.

Examples:
  elfen lab shadow --program lua,gzip
  elfen lab shadow --sample 1M,10M,100M --load 0.0625,0.125,0.25,0.5,1,2";

/// Repeat the experiments of Shadow Profiling (CGO 2007) with programs of this machine
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLE)]
pub(super) struct ShadowArgs {
    /// Programs [default: all that are installed]
    #[arg(long, value_name = "NAMES", value_delimiter = ',',
          value_parser = clap::builder::PossibleValuesParser::new(programs::names()))]
    program: Vec<String>,

    /// Instructions of a shadow
    #[arg(long, value_name = "COUNTS", value_delimiter = ',', default_value = "1M,10M,100M",
          value_parser = sample)]
    sample: Vec<String>,

    /// CPUs that the shadows may use, on average
    #[arg(long, value_name = "CPUS", value_delimiter = ',', default_value = "0.25,1",
          value_parser = load)]
    load: Vec<f64>,

    /// How often each program does its work in each configuration
    #[arg(long, value_name = "N", default_value_t = 12,
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn sample(text: &str) -> Result<String, String> {
    let digits = text.strip_suffix(['K', 'M']).unwrap_or(text);
    let is_count = digits.parse::<u32>().is_ok_and(|count| count > 0);
    if is_count { Ok(text.to_owned()) } else { Err("it is not a count, as in 10M".to_owned()) }
}

fn load(text: &str) -> Result<f64, String> {
    let load = text.parse().ok().filter(|load| (0.01..=2.0).contains(load));
    load.ok_or_else(|| "it must be a number from 0.01 to 2".to_owned())
}

pub(super) fn run(args: &ShadowArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let command = "elfen lab shadow";
    let Laboratory { elfen, folder, programs, missing, .. } =
        &Laboratory::of(command, &args.program)?;
    let plan = Plan { samples: args.sample.clone(), loads: args.load.clone(), rounds: args.rounds };
    let meter = Meter::new();
    let done = shadow::run((elfen, folder), programs, &plan, &mut |what| meter.show(what));
    drop(meter);
    let experiment = done.map_err(|error| failure(command, error))?;
    let experiment = Experiment { missing: missing.clone(), ..experiment };
    print(out, args.json, &experiment, || text(&experiment))?;
    Ok(ExitCode::SUCCESS)
}

/// What the paper prints of a configuration: accuracy, difference of values, slowdown, coverage.
fn published(sample: &str, load: f64) -> [&'static str; 4] {
    match (sample, load) {
        // The tolerance is that of the parser.
        ("100M", load) if (load - 0.25).abs() < 1e-9 => ["0.93", "4-8", "1.01", "0.2"],
        _ => ["0.83-0.93", "4-8", "up to 1.2", ""],
    }
}

fn text(experiment: &Experiment) -> String {
    let heading = [
        "sample",
        "load",
        "shadows",
        "accuracy",
        "paper",
        "values %",
        "paper",
        "slowdown",
        "paper",
        "faults",
        "coverage %",
        "paper",
    ];
    let row = |one: &Configuration| -> Vec<String> {
        let [accuracy, values, slowdown, coverage] = published(&one.sample, one.load);
        let of = |what: fn(&Outcome) -> f64| mean(&one.programs, what);
        vec![
            one.sample.clone(),
            one.load.to_string(),
            format!("{:.0}", of(|one| one.shadows)),
            format!("{:.3}", of(|one| one.accuracy)),
            accuracy.to_owned(),
            format!("{:.1}", of(|one| one.values)),
            values.to_owned(),
            format!("{:.3}", of(|one| one.slowdown)),
            slowdown.to_owned(),
            format!("{:.2}x", of(|one| one.faults)),
            format!("{:.2}", of(|one| one.coverage)),
            coverage.to_owned(),
        ]
    };
    let rows: Vec<Vec<String>> = experiment.configurations.iter().map(row).collect();
    let mut text =
        "Means of all programs. Accuracy is the weight match of paths; values: how far the \
                    invariance of results differs.\n\n"
            .to_owned();
    text += &table::lines(&heading, &rows);
    text += "\nAccuracy of each program:\n\n";
    text += &by_program(experiment);
    text += "\nSystem calls in shadows, in percent:\n\n";
    text += &calls(experiment);
    if !experiment.missing.is_empty() {
        let _written = writeln!(text, "\nnot installed: {}", experiment.missing.join(", "));
    }
    text += "\n\
Differences:
- The paper ran SPEC CPU2000 for minutes on four CPUs. Here, programs do some tenths of a second of
  work several times, so there are fewer shadows.
- A shadow stops at each system call, under ptrace. So the share of calls that end a shadow
  depends on what these programs do at all: most compute, and write little.
- Here, a shadow records paths and values together, so it takes longer than one of the paper.
";
    text
}

fn by_program(experiment: &Experiment) -> String {
    let names = experiment.configurations.first().map_or(&[][..], |one| &one.programs);
    let mut heading = vec!["sample", "load"];
    heading.extend(names.iter().map(|one| one.program));
    let rows: Vec<Vec<String>> = experiment
        .configurations
        .iter()
        .map(|one| {
            let mut cells = vec![one.sample.clone(), one.load.to_string()];
            cells.extend(one.programs.iter().map(|one| format!("{:.3}", one.accuracy)));
            cells
        })
        .collect();
    table::lines(&heading, &rows)
}

fn calls(experiment: &Experiment) -> String {
    let mut heading = vec!["program"];
    heading.extend(KINDS);
    let mut rows: Vec<Vec<String>> = experiment
        .calls
        .iter()
        .map(|one| {
            let mut cells = vec![one.program.to_owned()];
            cells.extend(one.percent.iter().map(|percent| format!("{percent:.0}")));
            cells
        })
        .collect();
    rows.push(["paper", "49", "39", "5", "2", "5"].map(str::to_owned).into());
    table::lines(&heading, &rows)
}
