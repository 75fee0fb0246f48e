//! `elfen demo`: measures a search service alone, next to an unrestrained batch, and next to a
//! batch under Elfen. It takes less than a minute.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use elfen_console::failure::{Failure, Status, to_stderr};
use elfen_console::output::{print, warn};
use elfen_console::{duration, shell};
use elfen_machine::lane_args::LaneArgs;
use elfen_run::channels::SourceChoice;
use serde::Serialize;

use super::meter::Meter;
use super::{live_args, live_rows};
use crate::live::experiment::{Experiment, Results};
use crate::live::summary::{self, Row};
use crate::live::testbed::Order;
use crate::live::{self, plan};
use crate::record::{Line, Plan, setup};

const EXAMPLES: &str = "\
Examples:
  elfen demo                            on the first pair of lanes, or two CPUs
  elfen demo --lanes 2:6 --batch matrix on this pair, with another program
  elfen demo --html /tmp/demo.html --json-out /tmp/demo.json

It needs no root. With root, the eBPF task map reports all tasks on a lane; without, only the \
service reports its requests. It needs elfen-search, elfen-load and elfen-batch, which \
`cargo build --release` puts next to it.";

const WHAT: &str = "the demo";

/// Show what Elfen does on this machine: a search service under load, alone, next to an
/// unrestrained batch, and next to a batch under Elfen
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    #[command(flatten)]
    lanes: LaneArgs,

    /// The load, in percent of what the service can serve
    #[arg(long, value_name = "PERCENT", default_value_t = 30,
        value_parser = clap::value_parser!(u8).range(1..=100))]
    load: u8,

    /// The batch program of elfen-batch
    #[arg(long, value_name = "NAME", default_value = "compress",
        value_parser = clap::builder::PossibleValuesParser::new(plan::BATCHES))]
    batch: String,

    /// How long each run lasts
    #[arg(short, long, value_name = "TIME", value_parser = duration::parse, default_value = "1s")]
    duration: Duration,

    /// How often each scenario is run
    #[arg(long, value_name = "N", default_value_t = 10,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,

    /// Documents of the index
    #[arg(long, value_name = "N", default_value_t = 20_000,
        value_parser = clap::value_parser!(u64).range(100..))]
    docs: u64,

    /// The source of the request lane's state, as in `elfen run`
    #[arg(long, value_enum, default_value = "auto")]
    source: SourceChoice,

    /// Where to write a page with figures
    #[arg(long, value_name = "FILE", default_value = "elfen-demo.html")]
    html: PathBuf,

    /// Also write the JSON object of --json to this file
    #[arg(long, value_name = "FILE")]
    json_out: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    lanes: String,
    /// Whether the lanes share a core.
    smt: bool,
    capacity_rps: f64,
    rows: Vec<Row>,
    remarks: Vec<String>,
    html: PathBuf,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    live::install_signal_handlers().map_err(|error| live_args::failure(WHAT, &error))?;
    let experiment = experiment(args)?;
    live_args::writable(&args.html)?;
    args.json_out.as_deref().map_or(Ok(()), live_args::writable)?;
    let lines = measure(&experiment)?;
    let mut rows = summary::rows(&lines);
    summary::over_all_requests(&mut rows, &lines);
    let report = Report {
        lanes: experiment.order.machine.lanes(),
        smt: experiment.order.machine.smt,
        capacity_rps: setup(&lines).map_or(0.0, |setup| setup.capacity_rps),
        remarks: live_rows::remarks(&lines, &rows),
        rows,
        html: args.html.clone(),
    };
    live_args::write_page(&args.html, "Elfen: demo", &lines)?;
    if let Some(file) = &args.json_out {
        live_args::write_report(file, &report)?;
    }
    print(out, args.json, &report, || report.text())?;
    Ok(if live_rows::all_right(&report.rows) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn experiment(args: &Args) -> Result<Experiment, Failure> {
    let plan = Plan {
        loads: vec![f64::from(args.load) / 100.0],
        rates: Vec::new(),
        scenarios: ["none", "unrestrained", "borrow-idle"].map(str::to_owned).to_vec(),
        batches: vec![args.batch.clone()],
        runs: args.runs,
        duration_s: args.duration.as_secs_f64(),
        warmup_s: 0.3,
        seed: 1,
        source: live_args::signal_word(args.source),
        ..Plan::default()
    };
    let specs = plan::check(&plan)
        .map_err(|why| Failure::new(Status::Usage, WHAT, why, "change the options"))?;
    let mut machine = live_args::machine(&args.lanes, WHAT)?;
    if !machine.smt {
        machine.emulated = emulated(args.source);
    }
    let emulate_smt = machine.emulated;
    let limits: Vec<String> = machine.emulation().into_iter().collect();
    let plan = Plan { emulate_smt, ..plan };
    let order = Order { machine, documents: args.docs, ..Order::default() };
    let command = shell::command_line("elfen lab");
    Ok(Experiment { order, plan, specs, capacity_rps: None, limits, command })
}

/// Returns the factor of the emulated core, or `None` if the core cannot be emulated.
///
/// On CPUs that do not share a core, a batch takes no resources from the service, so the demo would
/// show nothing. There, the programs of the demo slow each other down. They use the kernel's record
/// of the tasks that ran at the same time.
fn emulated(source: SourceChoice) -> Option<f64> {
    /// The slowdown of a request next to a batch in the thesis's model.
    const SLOWDOWN: f64 = 1.5;
    if matches!(source, SourceChoice::Service | SourceChoice::Module) {
        return None;
    }
    match elfen_kernel::task_map::open() {
        Ok(_) => Some(SLOWDOWN),
        Err(why) => {
            warn(&format!("no shared core is emulated, so a batch slows no request here: {why}"));
            None
        }
    }
}

fn measure(experiment: &Experiment) -> Result<Vec<Line>, Failure> {
    to_stderr("measuring a service with and without a batch: this takes about a minute");
    let mut results = Results::default();
    let meter = Meter::new();
    let done = experiment.run(&mut results, &mut |progress| meter.show_progress(progress));
    done.map_err(|error| live_args::failure(WHAT, &error))?;
    Ok(results.lines)
}

impl Report {
    fn text(&self) -> String {
        let mut text = live_rows::text(&self.rows);
        let rps = self.rows.first().map_or(0.0, |row| row.rps);
        text += &format!(
            "\nlanes {}: {rps:.0} of {:.0} searches per second; percentiles are over all \
             requests of all runs, which are interleaved; batch work is relative to the batch \
             alone\n",
            self.lanes, self.capacity_rps
        );
        self.remarks.iter().for_each(|remark| text += &format!("{remark}\n"));
        text + &format!("page: {}\n", self.html.display())
    }
}
