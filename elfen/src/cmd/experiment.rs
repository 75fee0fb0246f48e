//! `elfen experiment`: loads, companies, batch programs and invocations, measured on this machine.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::ValueEnum;
use experiments::live::experiment::{self as live_experiment, Experiment, Results};
use experiments::live::plan::{self, Job};
use experiments::live::summary::{self, Row};
use experiments::live::testbed::{self, Order};
use experiments::live::{self, LiveError};
use experiments::record::{Plan, Setup};
use serde::{Deserialize, Serialize};

use super::failure::{Failure, Status, named};
use super::lane_args::LaneArgs;
use super::meter::Meter;
use super::{duration, live_args, live_rows, print, shell};
use crate::host::run::channels::Wanted;

const EXAMPLES: &str = "\
Examples:
  elfen experiment --load 50 --company none,borrow-idle --batch loop
  elfen experiment --load 20,50,70 --invocations 20 --out night.jsonl
  elfen experiment --company none,fixed-budget:2ms,slo-budget:p99=20ms
  elfen experiment --plan plan.toml --out results.jsonl

A plan in TOML has the options' names as keys: load = [20, 50], company = [\"none\", \"borrow-idle\"], \
duration = \"10s\"; an option on the command line goes before the file's.

Companies: none, unrestrained, nice19, sched-idle, core-scheduling, borrow-idle, fixed-budget:TIME, \
refresh-budget:TIME, dynamic-budget:TIME:IPC, slo-budget:SLO.

Ctrl-C ends it; the same command goes on with what is missing.";

const WHAT: &str = "the experiment";
const DEFAULT_LOADS: [f64; 3] = [20.0, 50.0, 70.0];
const DEFAULT_BATCH: &str = "compress";
const DEFAULT_COMPANIES: [&str; 5] =
    ["none", "unrestrained", "nice19", "sched-idle", "borrow-idle"];
const CORE_SCHEDULING: &str = "core-scheduling";

/// Measure a service with batch programs beside it, at many loads and under many policies
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    lanes: LaneArgs,

    /// Read the plan from this TOML file
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,

    /// Loads, in percent of what the service can serve [default: 20,50,70]
    #[arg(long, value_name = "PERCENT", value_delimiter = ',')]
    load: Option<Vec<f64>>,

    /// Loads in requests a second, besides
    #[arg(long, value_name = "RATE", value_delimiter = ',')]
    rps: Option<Vec<f64>>,

    /// What shares the core with the service [default: all baselines and borrow-idle]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    company: Option<Vec<String>>,

    /// Batch programs of elfen-batch [default: compress]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    batch: Option<Vec<String>>,

    /// How often everything is run [default: 5]
    #[arg(long, value_name = "N")]
    invocations: Option<u32>,

    /// How long each run lasts [default: 10s]
    #[arg(long, value_name = "TIME", value_parser = duration::parse)]
    duration: Option<Duration>,

    /// How long each run is under load before that [default: 1s]
    #[arg(long, value_name = "TIME", value_parser = duration::parse)]
    warmup: Option<Duration>,

    /// Decides the requests and the order of the runs [default: 1]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,

    /// Documents of the index that is built [default: 100000]
    #[arg(long, value_name = "N")]
    docs: Option<u64>,

    /// An index to use, or to build and keep, in this folder
    #[arg(long, value_name = "FOLDER")]
    index: Option<PathBuf>,

    /// Where to learn what the request lane does, as in `elfen run` [default: auto]
    #[arg(long, value_enum)]
    signal: Option<Wanted>,

    /// What the service can serve, in requests a second, instead of measuring it
    #[arg(long, value_name = "RATE")]
    capacity: Option<f64>,

    /// The results, as JSON lines; a file that is there already is gone on with
    #[arg(long, value_name = "FILE", default_value = "elfen-experiment.jsonl")]
    out: PathBuf,

    /// Write an HTML report at the end
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,

    /// Say which runs there would be, and make none
    #[arg(long)]
    dry_run: bool,

    /// Print one JSON object at the end
    #[arg(long)]
    json: bool,
}

/// The plan's file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct PlanFile {
    load: Option<Vec<f64>>,
    rps: Option<Vec<f64>>,
    company: Option<Vec<String>>,
    batch: Option<Vec<String>>,
    invocations: Option<u32>,
    duration: Option<String>,
    warmup: Option<String>,
    seed: Option<u64>,
    docs: Option<u64>,
    index: Option<PathBuf>,
    signal: Option<String>,
    capacity: Option<f64>,
}

#[derive(Serialize)]
struct Report<'a> {
    results: &'a Path,
    setup: Option<&'a Setup>,
    rows: Vec<Row>,
    remarks: Vec<String>,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let experiment = args.experiment()?;
    if args.dry_run {
        return dry_run(&experiment, out);
    }
    live::heed_signals().map_err(|error| args.failure(&error))?;
    args.report.as_deref().map_or(Ok(()), live_args::writable)?;
    live_args::writable(&args.out)?;
    let mut results = Results::open(&args.out).map_err(|error| args.failure(&error))?;
    args.refuse_other(&experiment, &results)?;
    let mut meter = Meter::new();
    let done = experiment.run(&mut results, &mut |progress| meter.hear(progress));
    drop(meter);
    done.map_err(|error| args.failure(&error))?;
    if let Some(file) = &args.report {
        live_args::write_report(file, "Elfen: an experiment", &results.lines)?;
    }
    let rows = summary::rows(&results.lines);
    let right = live_rows::all_right(&rows);
    let remarks = live_rows::remarks(&results.lines, &rows);
    let report = Report { results: &args.out, setup: results.setup(), rows, remarks };
    print(out, args.json, &report, || report.text())?;
    Ok(if right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

impl Args {
    fn failure(&self, error: &LiveError) -> Failure {
        let file = self.out.display();
        match error {
            LiveError::Interrupted(_) => {
                let fix = format!("the same command goes on with what is missing in {file}");
                Failure::new(Status::Failed, WHAT, error, fix)
            }
            LiveError::Locked | LiveError::NoResults(_) => {
                live_args::failure(&named("results", &self.out), error)
            }
            _ => live_args::failure(WHAT, error),
        }
    }

    /// Command line, file and defaults, in this order.
    fn experiment(&self) -> Result<Experiment, Failure> {
        let file = self.plan.as_deref().map(read_plan).transpose()?.unwrap_or_default();
        let time =
            |given: Option<Duration>, text: &Option<String>, default: u64| match (given, text) {
                (Some(given), _) => Ok(given),
                (None, Some(text)) => {
                    duration::parse(text).map_err(|why| wrong_plan(&format!("{text:?}: {why}")))
                }
                (None, None) => Ok(Duration::from_secs(default)),
            };
        let rates = self.rps.clone().or(file.rps).unwrap_or_default();
        let loads = self.load.clone().or(file.load);
        let loads = loads
            .unwrap_or_else(|| if rates.is_empty() { DEFAULT_LOADS.to_vec() } else { Vec::new() });
        let mut limits = Vec::new();
        let asked = self.company.clone().or(file.company);
        let companies = companies(asked, &mut limits)?;
        let signal = match (self.signal, &file.signal) {
            (Some(signal), _) => signal,
            (None, Some(name)) => Wanted::from_str(name, false).map_err(|why| wrong_plan(&why))?,
            (None, None) => Wanted::Auto,
        };
        let plan = Plan {
            loads: loads.iter().map(|percent| percent / 100.0).collect(),
            rates,
            companies,
            batches: self.batch.clone().or(file.batch).unwrap_or(vec![DEFAULT_BATCH.to_owned()]),
            invocations: self.invocations.or(file.invocations).unwrap_or(5),
            duration_s: time(self.duration, &file.duration, 10)?.as_secs_f64(),
            warmup_s: time(self.warmup, &file.warmup, 1)?.as_secs_f64(),
            seed: self.seed.or(file.seed).unwrap_or(1),
            signal: live_args::signal_word(signal),
        };
        let specs = plan::check(&plan).map_err(|why| wrong_plan(&why))?;
        let capacity_rps = self.capacity.or(file.capacity);
        if capacity_rps.is_some_and(|rps| !(rps > 0.0 && rps.is_finite())) {
            return Err(wrong_plan("a capacity is a number of requests a second above 0"));
        }
        let order = Order {
            machine: live_args::machine(&self.lanes, WHAT)?,
            documents: self.docs.or(file.docs).unwrap_or(100_000).max(100),
            index: self.index.clone().or(file.index),
            signal: plan.signal.clone(),
        };
        let command = shell::command_line();
        Ok(Experiment { order, plan, specs, capacity_rps, limits, command })
    }

    /// A file of another plan or machine keeps its runs to itself.
    fn refuse_other(&self, experiment: &Experiment, results: &Results) -> Result<(), Failure> {
        let name = named("results", &self.out);
        let refuse = |why: &str| {
            let fix = "name another file with --out, or give the command that it names";
            Failure::new(Status::Usage, name.clone(), why, fix)
        };
        let Some(begun) = results.setup() else {
            let strange = !results.lines.is_empty();
            return if strange { Err(refuse("its first line is no setup")) } else { Ok(()) };
        };
        let mut asked = live_experiment::setup(&experiment.order, &experiment.plan, String::new());
        if experiment.order.index.is_some() {
            // How many an index has is seen when it is opened.
            asked.documents = begun.documents;
        }
        live_experiment::other_than(begun, &asked).map_or(Ok(()), |why| Err(refuse(&why)))
    }
}

/// What was asked for; by default everything that this kernel can do.
fn companies(asked: Option<Vec<String>>, limits: &mut Vec<String>) -> Result<Vec<String>, Failure> {
    let scheduled = testbed::core_scheduling();
    let Some(asked) = asked else {
        let mut companies = DEFAULT_COMPANIES.map(str::to_owned).to_vec();
        match scheduled {
            Ok(()) => companies.insert(4, CORE_SCHEDULING.to_owned()),
            Err(why) => limits.push(format!("not shown: core scheduling as a baseline; {why}")),
        }
        return Ok(companies);
    };
    match scheduled {
        Err(why) if asked.iter().any(|company| company == CORE_SCHEDULING) => {
            let fix = "leave core-scheduling out";
            Err(Failure::new(Status::Unsupported, "company core-scheduling", why, fix))
        }
        _ => Ok(asked),
    }
}

fn wrong_plan(why: &str) -> Failure {
    Failure::new(Status::Usage, "the plan", why, "see `elfen experiment --help`")
}

fn read_plan(file: &Path) -> Result<PlanFile, Failure> {
    let what = || named("plan", file);
    let text = fs::read_to_string(file).map_err(|error| {
        Failure::new(Status::Usage, what(), error, "name a file that can be read")
    })?;
    toml::from_str(&text).map_err(|error| {
        let line = error.span().map_or(1, |span| text[..span.start].matches('\n').count() + 1);
        let why = format!("line {line}: {}", error.message());
        Failure::new(Status::Usage, what(), why, "see `elfen experiment --help`")
    })
}

fn dry_run(experiment: &Experiment, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let Experiment { plan, specs, order, .. } = experiment;
    // Rates follow from the capacity, which nobody has measured yet.
    let jobs = plan::jobs(plan, specs, experiment.capacity_rps.unwrap_or(1.0));
    let each = Duration::from_secs_f64(plan.warmup_s + plan.duration_s);
    let count = u32::try_from(jobs.len()).unwrap_or(u32::MAX);
    let mut text = format!(
        "{} runs on lanes {}, {} s at least, in this order:\n",
        jobs.len(),
        order.machine.lanes(),
        each.saturating_mul(count).as_secs()
    );
    for Job { spec, batch, load, rps, invocation, .. } in &jobs {
        let load = match plan.rates.contains(rps) {
            true => format!("{rps} requests/s"),
            false => format!("{:.0} %", load * 100.0),
        };
        let batch = batch.as_ref().map_or_else(String::new, |batch| format!(" with {batch}"));
        text += &format!("{invocation}: {load}, {}{batch}\n", spec);
    }
    out.write_all(text.as_bytes()).map_err(Failure::output)?;
    Ok(ExitCode::SUCCESS)
}

impl Report<'_> {
    fn text(&self) -> String {
        let mut text = live_rows::text(&self.rows) + "\n";
        if let Some(Setup { capacity_rps, documents, .. }) = self.setup {
            text += &format!(
                "100 % are {capacity_rps:.0} searches a second in {documents} documents\n"
            );
        }
        self.remarks.iter().for_each(|remark| text += &format!("{remark}\n"));
        text + &format!("results: {}\n", self.results.display())
    }
}
