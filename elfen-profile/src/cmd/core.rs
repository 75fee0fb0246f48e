//! `elfen profile core`: runs a trace on the model of a core.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use elfen_console::failure::{Failure, Status, named};
use elfen_console::output;
use elfen_core_model::elftrace;
use elfen_core_model::machine::Machine;
use elfen_core_model::pair_metric::{NAMED, PairMetric};
use elfen_core_model::sample::{Counting, Sampling};
use elfen_core_model::trace::Trace;

use crate::core_report::{BesideReport, CoreOrder, CoreReport, PathsReport, TraceNames};
use crate::pipeline_picture::{Picture, PictureError};

const AFTER: &str = "\
The samples are what ProfileMe's hardware would take (MICRO 1997). The model also counts \
everything, so the report says how well the estimates fit.

The table is ordered by wasted slots: issue slots that no other instruction used and later \
retired, while this one was in progress. The columns from map to load are the mean latencies of \
the paper's Table 1, in cycles. ± is the relative error of the executions.

The machine is a model that is not tuned to any processor. A file describes another one: TOML or \
JSON, with `like = \"wide\"` and the fields that differ. docs/design/core-model.md lists them.

A metric is an expression of a pair of samples, a and b. It is summed over all b around an a. Names:
  useful        b issues while a is in progress, and retires
  ipc           instructions per cycle within 15 cycles of a
  on_hit        useful, if a hits the data cache
  on_miss       useful, if a misses it

Examples:
  elfen profile trace -o run.elftrace -- ./program
  elfen profile core run.elftrace
  elfen profile core run.elftrace --machine 21264 --every 5000 --pairs 80
  elfen profile core run.elftrace --metric 'b.multiply && b.issue == a.issue'
  elfen profile core run.elftrace --pipeline main
  elfen profile core run.elftrace --beside other.elftrace";

/// Run a trace on a model of an out-of-order core, and sample its instructions
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER)]
pub(super) struct CoreArgs {
    /// A trace that `elfen profile trace` wrote
    file: PathBuf,

    /// 21264, 21164, wide, or a file that describes a core
    #[arg(long, value_name = "MACHINE", default_value = "wide")]
    machine: String,

    /// The mean number of fetched instructions between samples
    #[arg(long, value_name = "COUNT", default_value_t = 500,
          value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    every: u64,

    /// Count places for instructions instead, with or without one
    #[arg(long)]
    opportunities: bool,

    /// How far apart the instructions of a pair are at most [default: what the core can hold]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pairs: Option<u32>,

    /// How many instructions are sampled together; 1 for no pairs
    #[arg(long, value_name = "COUNT", default_value_t = 2,
          value_parser = clap::value_parser!(u32).range(1..=16))]
    ways: u32,

    /// Of the random intervals
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,

    /// Add a column with a metric of pairs
    #[arg(long, value_name = "EXPRESSION")]
    metric: Option<String>,

    /// The number of rows
    #[arg(long, value_name = "ROWS", default_value_t = 20)]
    top: usize,

    /// Draw two iterations of the instruction at an address (0x...), or of a function's slowest one
    #[arg(long, value_name = "PLACE", conflicts_with = "beside")]
    pipeline: Option<String>,

    /// Print how many paths to samples the branch history tells, with and without pairs
    #[arg(long, conflicts_with_all = ["pipeline", "beside"])]
    paths: bool,

    /// Run another trace on the same core, as its second thread: an experiment
    #[arg(long, value_name = "FILE")]
    beside: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &CoreArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let machine = machine(&args.machine)?;
    let metric = args.metric.as_deref().map(metric).transpose()?;
    let trace = read(&args.file)?;
    if let Some(other) = &args.beside {
        let other = read(other)?;
        let report = BesideReport::of([&trace, &other], &machine);
        output::print(out, args.json, &report, || report.text())?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.paths {
        let report = PathsReport::of(&trace, args.seed);
        output::print(out, args.json, &report, || report.text())?;
        return Ok(ExitCode::SUCCESS);
    }
    let names = TraceNames::read(&trace);
    for path in &names.changed {
        output::warn(&format!("{path} has changed since the trace: its functions have no names"));
    }
    if let Some(place) = &args.pipeline {
        let picture = Picture::of(&trace, &machine, &names, place)
            .map_err(|PictureError::Unknown| unknown(place))?;
        output::print(out, args.json, &picture, || picture.text())?;
        return Ok(ExitCode::SUCCESS);
    }
    let counting =
        if args.opportunities { Counting::Opportunities } else { Counting::Instructions };
    let in_flight = machine.map.reorder + machine.fetch.queue;
    let sampling = Sampling {
        every: args.every,
        counting,
        ways: args.ways,
        window: args.pairs.unwrap_or(in_flight),
        seed: args.seed,
        fetch_width: machine.fetch.width,
    };
    let metric = args.metric.as_deref().zip(metric.as_ref());
    let order = CoreOrder { machine: &machine, sampling, top: args.top, metric };
    let report = CoreReport::of(&trace, &names, order);
    output::print(out, args.json, &report, || report.text())?;
    Ok(ExitCode::SUCCESS)
}

fn machine(name: &str) -> Result<Machine, Failure> {
    if let Some(found) = Machine::built_in(name) {
        return Ok(found);
    }
    let what = format!("the machine {name}");
    let known = Machine::BUILT_IN.join(", ");
    let text = fs::read_to_string(name).map_err(|error| {
        let fix = format!("name {known}, or a file");
        Failure::new(Status::Failed, &what, error, fix)
    })?;
    Machine::parse(&text).map_err(|error| {
        let fix = "correct the file; docs/design/core-model.md lists all fields";
        Failure::new(Status::Failed, &what, error, fix)
    })
}

fn metric(text: &str) -> Result<PairMetric, Failure> {
    PairMetric::parse(text).map_err(|error| {
        let names: Vec<&str> = NAMED.iter().map(|(name, ..)| *name).collect();
        let fix = format!("use an expression such as {}", names.join(", "));
        Failure::new(Status::Usage, format!("the metric `{text}`"), error, fix)
    })
}

fn read(path: &Path) -> Result<Trace, Failure> {
    let failed = |error: &dyn std::fmt::Display| {
        let fix = "name a file that `elfen profile trace -o` wrote";
        Failure::new(Status::Failed, named("the trace", path), error, fix)
    };
    let file = File::open(path).map_err(|error| failed(&error))?;
    let trace = elftrace::read(file).map_err(|error| failed(&error))?;
    if trace.runs.is_empty() {
        return Err(failed(&"it holds no instructions"));
    }
    Ok(trace)
}

fn unknown(place: &str) -> Failure {
    let why = "no instruction that ran is there";
    let fix = "name an address or a function that `elfen profile core FILE` lists";
    Failure::new(Status::Failed, format!("the place `{place}`"), why, fix)
}
