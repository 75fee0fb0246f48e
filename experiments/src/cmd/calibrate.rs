//! `elfen lab calibrate`: measures how a service and programs that share a core slow each other
//! down. It also measures how fast each nap is, and how much it slows a request. It writes the
//! results as parameters of the model.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use std::{fs, thread};

use elfen_console::failure::{Failure, Status};
use elfen_console::output::{print, warn};
use elfen_console::{duration, shell, table};
use elfen_machine::lane_args::{LaneArgs, topology};
use elfen_machine::lanes;
use elfen_machine::source::Source;
use elfen_rt::nap::{Nap, NapKind};
use serde::Serialize;

use super::meter::Meter;
use super::model_file::{Interference, Measured, ModelFile, NapTimes};
use super::{live_args, live_rows};
use crate::bench::nap::{self, Lanes};
use crate::live::calibrate::{self, Order, Slowdown};
use crate::live::summary::Figure;
use crate::live::{self, Machine, experiment, plan};

const EXAMPLES: &str = "\
Examples:
  elfen lab calibrate            the first pair of lanes, into elfen-model.toml
  elfen lab calibrate --lanes 2:6 --batch loop,spin --runs 10
  elfen lab simulate --rps 80 --policy borrow-idle --model elfen-model.toml

The service is one worker that searches without pauses. It runs alone, next to each batch program, \
and next to each nap of the machine. A machine without SMT is refused.";

const WHAT: &str = "calibrating";
const DEFAULT_BATCHES: [&str; 4] = ["loop", "matrix", "flush", "compress"];
const NAPS: usize = 200;

/// Measure how programs on one core slow each other down, for `simulate` and `plan`
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct CalibrateArgs {
    #[command(flatten)]
    lanes: LaneArgs,

    /// Batch programs of elfen-batch
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_values = DEFAULT_BATCHES,
        value_parser = clap::builder::PossibleValuesParser::new(plan::BATCHES))]
    batch: Vec<String>,

    /// How long each batch program runs alone
    #[arg(short, long, value_name = "TIME", value_parser = duration::parse,
        default_value = "500ms")]
    duration: Duration,

    /// How often the service is measured next to each batch program and each nap
    #[arg(long, value_name = "N", default_value_t = 3,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,

    /// Documents of the service's index
    #[arg(long, value_name = "N", default_value_t = 20_000,
        value_parser = clap::value_parser!(u64).range(100..))]
    docs: u64,

    /// The folder of the index; a missing index is built there and kept
    #[arg(long, value_name = "FOLDER")]
    index: Option<PathBuf>,

    /// Where to write the parameters
    #[arg(short, long, value_name = "FILE", default_value = "elfen-model.toml")]
    output: PathBuf,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct CalibrateReport {
    file: PathBuf,
    model: ModelFile,
}

pub(crate) fn run(args: &CalibrateArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    refuse_without_smt(args)?;
    let machine = live_args::machine(&args.lanes, WHAT)?;
    live_args::writable(&args.output)?;
    let failed = |error| live_args::failure(WHAT, &error);
    live::install_signal_handlers().map_err(failed)?;
    let pair = machine.pairs[0].clone();
    let batch = pair.batch.iter().next().unwrap_or(pair.request);
    let lanes = Lanes { request: pair.request, batch };
    let order = Order {
        pair,
        batches: args.batch.clone(),
        documents: args.docs,
        index: args.index.clone(),
        duration: args.duration,
        runs: args.runs,
    };
    let naps: Vec<Nap> =
        NapKind::ALL.into_iter().filter_map(|kind| nap::open(kind, lanes).ok()).collect();
    let times = nap_times(lanes);
    let meter = Meter::new();
    let measured = calibrate::measure(order, &naps, &mut |done, all| meter.step(done, all));
    drop(meter);
    let measured = measured.map_err(failed)?;
    let model = model(&machine, &times, measured);
    let written = fs::write(&args.output, model.text());
    written.map_err(|error| Failure::unwritable("model", &args.output, error))?;
    let report = CalibrateReport { file: args.output.clone(), model };
    print(out, args.json, &report, || report.text())?;
    Ok(ExitCode::SUCCESS)
}

/// Refuses a machine without SMT. Lanes from `--lanes` are accepted: the file records whether they
/// share a core.
fn refuse_without_smt(args: &CalibrateArgs) -> Result<(), Failure> {
    let topology = topology(&Source::live())?;
    if args.lanes.by_hand() || !lanes::default_pairs(&topology).is_empty() {
        return Ok(());
    }
    let why = "the kernel's topology shows no two CPUs that share a core, so there is no slowdown \
        to measure";
    Err(Failure::new(Status::Unsupported, WHAT, why, lanes::remedy(&topology)))
}

/// Measures how long each nap takes to sleep and to wake, in nanoseconds. If the measurement fails,
/// it prints a warning and returns an empty list. The measurement pins its thread, so it gets a
/// thread of its own.
fn nap_times(lanes: Lanes) -> Vec<nap::NapTimes> {
    let measured = thread::scope(|scope| {
        let measuring = scope.spawn(|| nap::times(lanes, NAPS));
        measuring.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    measured.unwrap_or_else(|error| {
        warn(&format!(
            "measuring the times of naps failed: {error}; the model uses the times of the thesis"
        ));
        Vec::new()
    })
}

/// Returns the parameters of the model. The naps keep the order of `measured`, because the model
/// uses the first of them by default.
fn model(
    machine: &Machine,
    times: &[nap::NapTimes],
    [batches, naps]: [Vec<Slowdown>; 2],
) -> ModelFile {
    let order = live::testbed::Order { machine: machine.clone(), ..Default::default() };
    let known = experiment::setup(&order, &Default::default(), shell::command_line("elfen lab"));
    let interference = |Slowdown { name, of_request, of_batch }| {
        let of_batch = of_batch.unwrap_or(of_request);
        Interference {
            name,
            request_slowdown: of_request.median,
            request_slowdown_ci95: of_request.ci95,
            batch_slowdown: of_batch.median,
            batch_slowdown_ci95: of_batch.ci95,
        }
    };
    let nap = |Slowdown { name, of_request, .. }| {
        let known = times.iter().find(|(known, ..)| *known == name);
        let (sleep_ns, wake_ns) = known.map_or((None, None), |(_, sleep, wake)| (*sleep, *wake));
        let (nap_slowdown, nap_slowdown_ci95) = (Some(of_request.median), of_request.ci95);
        NapTimes { name, sleep_ns, wake_ns, nap_slowdown, nap_slowdown_ci95 }
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
        nap: naps.into_iter().map(nap).collect(),
        batch: batches.into_iter().map(interference).collect(),
    }
}

impl CalibrateReport {
    fn text(&self) -> String {
        let figure = |median, ci95| live_rows::interval(&Figure { median, ci95 });
        let row = |batch: &Interference| {
            let of_request = figure(batch.request_slowdown, batch.request_slowdown_ci95);
            let of_batch = figure(batch.batch_slowdown, batch.batch_slowdown_ci95);
            vec![batch.name.clone(), of_request, of_batch]
        };
        let rows: Vec<Vec<String>> = self.model.batch.iter().map(row).collect();
        let heading = ["batch lane", "slowdown of a search", "slowdown of the batch"];
        let mut text = table::lines(&heading, &rows);
        let time = |ns: Option<f64>| {
            ns.map_or_else(
                || "as in the thesis (not measured)".to_owned(),
                |ns| format!("{ns:.0} ns"),
            )
        };
        for nap in &self.model.nap {
            let slower = nap
                .nap_slowdown
                .map_or_else(String::new, |median| figure(median, nap.nap_slowdown_ci95));
            let (name, sleep, wake) = (&nap.name, time(nap.sleep_ns), time(nap.wake_ns));
            text += &format!(
                "nap {name}: slowdown of a search {slower}; time to sleep {sleep}; time to wake \
                 {wake}\n"
            );
        }
        if !self.model.machine.siblings {
            text += "the kernel's topology shows that these lanes do not share a core: the model \
                     is not valid for SMT, as the file also notes\n";
        }
        text + &format!("parameters: {}\n", self.file.display())
    }
}
