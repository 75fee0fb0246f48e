//! `elfen calibrate`: what programs that share a core do to each other, and how fast a lane naps, as the model's
//! parameters.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use experiments::live::calibrate::{self, Order, SERVICE, Slowdown};
use experiments::live::{self, Machine, experiment, plan};
use serde::Serialize;

use super::failure::{Failure, Status};
use super::lane_args::{self, LaneArgs};
use super::meter::Meter;
use super::model_file::{Interference, Measured, ModelFile, NapTimes, PairOf};
use super::{duration, live_args, live_rows, print, shell, table, warn};
use crate::bench::nap::{self, Lanes};
use crate::host::lanes;
use crate::host::source::Source;

const EXAMPLES: &str = "\
Examples:
  elfen calibrate                the first pair of lanes, into elfen-model.toml
  elfen calibrate --lanes 2:6 --batch loop,json --rounds 10
  elfen simulate --rps 80 --policy borrow-idle --model elfen-model.toml

Every two programs run alone and then beside each other, round by round; the service is one worker that \
searches without a pause. On a machine without SMT there is nothing to measure, and it says so.";

const WHAT: &str = "calibrating";
const DEFAULT_BATCHES: [&str; 5] = ["loop", "matrix", "flush", "compress", "json"];
const NAPS: usize = 200;

/// Measure how programs slow each other down on this machine's cores, for `simulate` and `plan`
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    lanes: LaneArgs,

    /// Batch programs of elfen-batch
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_values = DEFAULT_BATCHES,
        value_parser = clap::builder::PossibleValuesParser::new(plan::BATCHES))]
    batch: Vec<String>,

    /// How long two programs run beside each other
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "500ms")]
    duration: Duration,

    /// How often each pair is measured
    #[arg(long, value_name = "N", default_value_t = 3,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,

    /// Documents of the service's index
    #[arg(long, value_name = "N", default_value_t = 20_000,
        value_parser = clap::value_parser!(u64).range(100..))]
    docs: u64,

    /// An index to use, or to build and keep, in this folder
    #[arg(long, value_name = "FOLDER")]
    index: Option<PathBuf>,

    /// Where to write the parameters
    #[arg(long, value_name = "FILE", default_value = "elfen-model.toml")]
    out: PathBuf,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    file: PathBuf,
    model: ModelFile,
    slowdowns: Vec<Slowdown>,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    refuse_without_smt(args)?;
    let machine = live_args::machine(&args.lanes, WHAT)?;
    live_args::writable(&args.out)?;
    let failed = |error| live_args::failure(WHAT, &error);
    live::heed_signals().map_err(failed)?;
    let pair = machine.pairs.first().cloned();
    let pair = pair.unwrap_or_else(|| unreachable!("a machine has a pair, or is refused"));
    let lanes = Lanes { request: pair.request, batch: pair.batch[0] };
    let order = Order {
        pair,
        batches: args.batch.clone(),
        documents: args.docs,
        index: args.index.clone(),
        lasting: args.duration,
        rounds: args.rounds,
    };
    let nap = naps(lanes);
    let mut meter = Meter::new();
    let slowdowns = calibrate::slowdowns(order, &mut |done, all| meter.step(done, all));
    drop(meter);
    let slowdowns = slowdowns.map_err(failed)?;
    let model = model(&machine, nap, &slowdowns);
    let written = fs::write(&args.out, model.text());
    written.map_err(|error| Failure::unwritable("model", &args.out, error))?;
    let report = Report { file: args.out.clone(), model, slowdowns };
    print(out, args.json, &report, || report.text())?;
    Ok(ExitCode::SUCCESS)
}

/// Lanes given by hand are the user's word: there the file says what is known of them.
fn refuse_without_smt(args: &Args) -> Result<(), Failure> {
    let topology = lane_args::topology(&Source::live())?;
    if args.lanes.by_hand() || !lanes::default_pairs(&topology).is_empty() {
        return Ok(());
    }
    let why = "no two CPUs here share a core as far as the kernel says, so there is no slowdown to measure";
    Err(Failure::new(Status::Unsupported, WHAT, why, lanes::remedy(&topology)))
}

/// The nap that `auto` takes, in nanoseconds; without times where they cannot be measured, which is said. Measuring pins
/// its thread, so it has one of its own.
fn naps(lanes: Lanes) -> NapTimes {
    let measured = thread::scope(|scope| {
        let measuring = scope.spawn(|| nap::measure(lanes, NAPS));
        measuring.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    let figures = match measured {
        Ok(figures) => figures,
        Err(error) => {
            warn(&format!(
                "naps could not be measured: {error}; the file leaves them to the thesis"
            ));
            let name = "unknown".to_owned();
            return NapTimes { name, sleep_ns: None, wake_ns: None };
        }
    };
    let taken = figures.naps.iter().find(|nap| nap.nap == figures.auto);
    let ns = |cycles: f64| cycles * 1e3 / figures.tsc_mhz;
    NapTimes {
        name: figures.auto.to_owned(),
        sleep_ns: taken.and_then(|nap| Some(ns(nap.sleep_cycles?.median))),
        wake_ns: taken.and_then(|nap| Some(ns(nap.wake_cycles?.median))),
    }
}

fn model(machine: &Machine, nap: NapTimes, slowdowns: &[Slowdown]) -> ModelFile {
    let order = live::testbed::Order {
        machine: machine.clone(),
        documents: 0,
        index: None,
        signal: String::new(),
    };
    let known = experiment::setup(&order, &Default::default(), shell::command_line());
    let with_service = |slowdown: &&Slowdown| slowdown.first == SERVICE;
    let interference = |slowdown: &Slowdown| Interference {
        name: slowdown.second.clone(),
        request_slowdown: slowdown.of_first.median,
        request_slowdown_ci95: slowdown.of_first.ci95,
        batch_slowdown: slowdown.of_second.median,
        batch_slowdown_ci95: slowdown.of_second.ci95,
    };
    let pair = |slowdown: &Slowdown| PairOf {
        first: slowdown.first.clone(),
        second: slowdown.second.clone(),
        of_first: slowdown.of_first.median,
        of_second: slowdown.of_second.median,
    };
    ModelFile {
        machine: Measured {
            elfen: known.elfen,
            kernel: known.kernel,
            cpu: known.cpu,
            lanes: known.lanes,
            siblings: known.smt,
            command: known.command,
        },
        nap,
        batch: slowdowns.iter().filter(with_service).map(interference).collect(),
        pair: slowdowns.iter().filter(|slowdown| !with_service(slowdown)).map(pair).collect(),
    }
}

impl Report {
    fn text(&self) -> String {
        let row = |slowdown: &Slowdown| {
            let (first, second) = (slowdown.first.clone(), slowdown.second.clone());
            vec![
                first,
                second,
                live_rows::interval(&slowdown.of_first),
                live_rows::interval(&slowdown.of_second),
            ]
        };
        let rows: Vec<Vec<String>> = self.slowdowns.iter().map(row).collect();
        let heading = ["request lane", "batch lane", "its slowdown", "the other's"];
        let mut text = table::lines(&heading, &rows);
        let NapTimes { name, sleep_ns, wake_ns } = &self.model.nap;
        let time = |ns: &Option<f64>| {
            ns.map_or_else(
                || "not measured here, the thesis's".to_owned(),
                |ns| format!("{ns:.0} ns"),
            )
        };
        text += &format!("nap {name}: to sleep {}; to wake {}\n", time(sleep_ns), time(wake_ns));
        if !self.model.machine.siblings {
            text += "nothing says that these lanes share a core: this is no model of SMT, and the file says so\n";
        }
        text + &format!("parameters: {}\n", self.file.display())
    }
}
