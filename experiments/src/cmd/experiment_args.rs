//! The options of `elfen lab experiment`, the TOML file of a plan, and the [`Experiment`] that both
//! define.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ValueEnum;
use elfen_console::failure::{Failure, Status, named};
use elfen_console::{duration, shell};
use elfen_machine::lane_args::LaneArgs;
use elfen_run::channels::SourceChoice;
use serde::de::Error;
use serde::{Deserialize, Deserializer};

use super::live_args;
use super::own_args::{self, AUTO, ServiceArgs, check_program, methods};
use crate::live::experiment::Experiment;
use crate::live::plan;
use crate::live::testbed::{self, Order};
use crate::record::Plan;

const EXAMPLES: &str = "\
Examples:
  elfen lab experiment --load 50 --scenario none,borrow-idle --batch loop
  elfen lab experiment --load 20,50,70 --runs 20 -o night.jsonl
  elfen lab experiment --scenario none,fixed-budget:2ms,slo-budget:p99=20ms
  elfen lab experiment --plan plan.toml -o results.jsonl
  elfen lab experiment --checks guard -- xz -9 -k -c backup.tar
  elfen lab experiment --service-url http://127.0.0.1/ --service-pid 47 --rps 9
  sudo elfen lab experiment --shim runs --scenario borrow-idle --batch loop

A plan in TOML has the options' names as keys: load = [20, 50], scenario = [\"none\", \
\"borrow-idle\"], duration = \"10s\". Options on the command line override those of the file.

Scenarios: none, unrestrained, nice19, sched-idle, core-scheduling, borrow-idle, \
fixed-budget:TIME, refresh-budget:TIME, dynamic-budget:TIME:IPC, slo-budget:SLO.

Ctrl-C ends the experiment; the same command then makes the missing runs.";

pub(super) const WHAT: &str = "the experiment";
const DEFAULT_LOADS: [f64; 3] = [20.0, 50.0, 70.0];
const DEFAULT_BATCH: &str = "compress";
const DEFAULT_SCENARIOS: [&str; 5] =
    ["none", "unrestrained", "nice19", "sched-idle", "borrow-idle"];
const CORE_SCHEDULING: &str = "core-scheduling";

/// Measure a service next to batch programs, at many loads and under many policies
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct ExperimentArgs {
    #[command(flatten)]
    pub(super) lanes: LaneArgs,

    #[command(flatten)]
    service: ServiceArgs,

    /// Read the plan from this TOML file
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,

    #[command(flatten)]
    choices: Choices,

    /// The results, as JSON lines; missing runs are added to an existing file
    #[arg(short, long, value_name = "FILE", default_value = "elfen-experiment.jsonl")]
    pub(super) output: PathBuf,

    /// Write a page with figures at the end
    #[arg(long, value_name = "FILE")]
    pub(super) html: Option<PathBuf>,

    /// At the end, also write the JSON object of --json to this file
    #[arg(long, value_name = "FILE")]
    pub(super) json_out: Option<PathBuf>,

    /// Write the service times of the runs without a batch, in microseconds. `elfen lab simulate
    /// --demand file:FILE` reads them and predicts the other scenarios
    #[arg(long, value_name = "FILE")]
    pub(super) service_times: Option<PathBuf>,

    /// Record each run with `elfen shim` into this folder: the tasks on the first pair's lanes, and
    /// the requests of the service
    ///
    /// This requires root, or membership of group elfen if elfend runs. The observer uses a
    /// separate lane. The results contain the file name of each recording, for `elfen lab report
    /// FILE.shim` and `elfen shim show`.
    #[arg(long, value_name = "FOLDER")]
    shim: Option<PathBuf>,

    /// Print the list of runs without starting them
    #[arg(long)]
    pub(super) dry_run: bool,

    /// Print one JSON object at the end
    #[arg(long)]
    pub(super) json: bool,
}

/// The options that a plan in TOML may contain, too.
#[derive(clap::Args, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Choices {
    /// Loads, in percent of the service's capacity [default: 20,50,70]
    #[arg(long, value_name = "PERCENT", value_delimiter = ',')]
    load: Option<Vec<f64>>,

    /// More loads, in requests per second
    #[arg(long, value_name = "RATE", value_delimiter = ',')]
    rps: Option<Vec<f64>>,

    /// What runs next to the service [default: all baselines and borrow-idle]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    scenario: Option<Vec<String>>,

    /// Batch programs of elfen-batch [default: compress]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    batch: Option<Vec<String>>,

    /// How often each combination of load, scenario and batch is run [default: 5]
    #[arg(long, value_name = "N")]
    runs: Option<u32>,

    /// How long each run lasts [default: 10s]
    #[arg(short, long, value_name = "TIME", value_parser = duration::parse)]
    #[serde(default, deserialize_with = "time")]
    duration: Option<Duration>,

    /// How long each run is under load before measuring begins [default: 1s]
    #[arg(long, value_name = "TIME", value_parser = duration::parse)]
    #[serde(default, deserialize_with = "time")]
    warmup: Option<Duration>,

    /// Seed of the requests and of the order of the runs [default: 1]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,

    /// Documents of the index that is built [default: 100000]
    #[arg(long, value_name = "N")]
    docs: Option<u64>,

    /// Emulate a core that the lanes share: a program takes this many times as long while the other
    /// lane is busy, as in 1.5
    ///
    /// For machines without SMT, where a batch takes no resources from requests. The emulation uses
    /// the kernel's record of the tasks that ran at the same time, so it requires root. It assumes
    /// that a napping batch does not slow a request. The table then also has the predictions of
    /// `elfen lab simulate`.
    #[arg(long, value_name = "FACTOR")]
    emulate_smt: Option<f64>,

    /// The folder of the index; a missing index is built there and kept
    #[arg(long, value_name = "FOLDER")]
    index: Option<PathBuf>,

    /// Where batch programs get their checks, as in `elfen run` [default: auto]
    #[arg(long, value_name = "HOW")]
    checks: Option<String>,

    /// The source of the request lane's state, as in `elfen run` [default: auto]
    #[arg(long, value_enum)]
    #[serde(default, deserialize_with = "source")]
    source: Option<SourceChoice>,

    /// The capacity of the service in requests per second; it is then not measured
    #[arg(long, value_name = "RATE")]
    capacity: Option<f64>,

    /// A batch program of your own with its arguments, instead of elfen-batch or in addition
    ///
    /// Whenever it ends with status 0, it is started again. Its work is the CPU time that it gets.
    #[arg(last = true, value_name = "PROGRAM")]
    #[serde(default)]
    command: Vec<String>,
}

impl Choices {
    /// Returns these options. Missing ones are taken from the file of a plan.
    fn or(&self, file: Self) -> Self {
        Self {
            load: self.load.clone().or(file.load),
            rps: self.rps.clone().or(file.rps),
            scenario: self.scenario.clone().or(file.scenario),
            batch: self.batch.clone().or(file.batch),
            runs: self.runs.or(file.runs),
            duration: self.duration.or(file.duration),
            warmup: self.warmup.or(file.warmup),
            seed: self.seed.or(file.seed),
            docs: self.docs.or(file.docs),
            emulate_smt: self.emulate_smt.or(file.emulate_smt),
            index: self.index.clone().or(file.index),
            checks: self.checks.clone().or(file.checks),
            source: self.source.or(file.source),
            capacity: self.capacity.or(file.capacity),
            command: if self.command.is_empty() { file.command } else { self.command.clone() },
        }
    }
}

fn time<'de, D: Deserializer<'de>>(file: D) -> Result<Option<Duration>, D::Error> {
    duration::parse(&String::deserialize(file)?).map(Some).map_err(D::Error::custom)
}

fn source<'de, D: Deserializer<'de>>(file: D) -> Result<Option<SourceChoice>, D::Error> {
    let name = String::deserialize(file)?;
    SourceChoice::from_str(&name, false).map(Some).map_err(D::Error::custom)
}

impl ExperimentArgs {
    /// Returns the experiment. Options on the command line come first, then those of the file, then
    /// the defaults.
    pub(super) fn experiment(&self) -> Result<Experiment, Failure> {
        let file = self.plan.as_deref().map(read_plan).transpose()?.unwrap_or_default();
        let chosen = self.choices.or(file);
        let mut limits = Vec::new();
        let (service, processes) = self.service.own_service()?.unzip();
        let rates = chosen.rps.unwrap_or_default();
        let mut capacity_rps = chosen.capacity;
        if service.is_some() && capacity_rps.is_none() {
            capacity_rps = Some(own_args::capacity(chosen.load.as_deref(), &rates, &mut limits)?);
        }
        let default_loads = if rates.is_empty() { &DEFAULT_LOADS[..] } else { &[] };
        let loads = chosen.load.unwrap_or_else(|| default_loads.to_vec());
        let scenarios = scenarios(chosen.scenario, &mut limits)?;
        let default_source = service.as_ref().map_or(SourceChoice::Auto, own_args::source);
        let command = chosen.command;
        command.first().map_or(Ok(()), |program| check_program(program.as_ref()))?;
        let default_batches = if command.is_empty() { &[DEFAULT_BATCH][..] } else { &[] };
        let default_batches = || default_batches.iter().copied().map(str::to_owned).collect();
        let plan = Plan {
            loads: loads.iter().map(|percent| percent / 100.0).collect(),
            rates,
            scenarios,
            batches: chosen.batch.unwrap_or_else(default_batches),
            runs: chosen.runs.unwrap_or(5),
            duration_s: chosen.duration.map_or(10.0, |time| time.as_secs_f64()),
            warmup_s: chosen.warmup.map_or(1.0, |time| time.as_secs_f64()),
            seed: chosen.seed.unwrap_or(1),
            source: live_args::signal_word(chosen.source.unwrap_or(default_source)),
            emulate_smt: chosen.emulate_smt,
            command,
            checks: checks(chosen.checks)?,
            service,
        };
        let specs = plan::check(&plan).map_err(|why| wrong_plan(&why))?;
        if capacity_rps.is_some_and(|rps| !(rps > 0.0 && rps.is_finite())) {
            return Err(wrong_plan("the capacity must be above 0 requests per second"));
        }
        let mut machine = live_args::machine(&self.lanes, WHAT)?;
        machine.emulated = plan.emulate_smt;
        limits.extend(machine.emulation());
        if plan.emulate_smt.is_some_and(|factor| !(1.0..=10.0).contains(&factor)) {
            return Err(wrong_plan("the factor of --emulate-smt must be from 1 to 10"));
        }
        let order = Order {
            machine,
            documents: match processes {
                Some(_) => 0,
                None => chosen.docs.unwrap_or(100_000).max(100),
            },
            index: chosen.index,
            service: processes,
            service_times: self.service_times.clone(),
            shim: self.shim.clone(),
        };
        let command = shell::command_line("elfen lab");
        Ok(Experiment { order, plan, specs, capacity_rps, limits, command })
    }
}

/// Returns the requested scenarios. By default, these are all that this kernel supports.
fn scenarios(
    requested: Option<Vec<String>>,
    limits: &mut Vec<String>,
) -> Result<Vec<String>, Failure> {
    let supported = testbed::core_scheduling();
    let Some(requested) = requested else {
        let mut scenarios = DEFAULT_SCENARIOS.map(str::to_owned).to_vec();
        match supported {
            Ok(()) => scenarios.insert(4, CORE_SCHEDULING.to_owned()),
            Err(why) => limits.push(format!("baseline core-scheduling is not measured: {why}")),
        }
        return Ok(scenarios);
    };
    match supported {
        Err(why) if requested.iter().any(|scenario| scenario == CORE_SCHEDULING) => {
            let fix = "omit core-scheduling";
            Err(Failure::new(Status::Unsupported, "scenario core-scheduling", why, fix))
        }
        _ => Ok(requested),
    }
}

/// Returns the value of `--checks`, or `None` for the default, which the results do not contain.
fn checks(requested: Option<String>) -> Result<Option<String>, Failure> {
    match requested {
        Some(name) if !methods().any(|known| known == name) => {
            let known = methods().collect::<Vec<_>>().join(", ");
            Err(wrong_plan(&format!("unknown --checks {name:?}, expected one of: {known}")))
        }
        requested => Ok(requested.filter(|name| name != AUTO)),
    }
}

fn wrong_plan(why: &str) -> Failure {
    Failure::new(Status::Usage, "the plan", why, "see `elfen lab experiment --help`")
}

fn read_plan(file: &Path) -> Result<Choices, Failure> {
    let what = || named("plan", file);
    let text = fs::read_to_string(file).map_err(|error| {
        Failure::new(Status::Failed, what(), error, "choose a file that can be read")
    })?;
    toml::from_str(&text).map_err(|error| {
        let line = error.span().map_or(1, |span| text[..span.start].matches('\n').count() + 1);
        let why = format!("line {line}: {}", error.message());
        Failure::new(Status::Usage, what(), why, "see `elfen lab experiment --help`")
    })
}
