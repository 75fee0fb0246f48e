//! The machines, requests and batch programs that `simulate` and `plan` model.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::time::Duration;

use elfen_rt::clock::nanos;
use experiments::simulate::batches::{KINDS, Kind};
use experiments::simulate::demand::Demand;
use experiments::simulate::load::{Bursts, Load};
use experiments::simulate::pair::{Batch, Control};
use experiments::simulate::source::{Requests, Until};
use experiments::simulate::time::{nanoseconds, real};
use experiments::simulate::{Model, Queue, trace};

use serde::Serialize;

use super::duration;
use super::failure::{Failure, Status};
use super::model_file::ModelFile;

const DEFAULT_REQUESTS: u64 = 1_000_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum QueueName {
    /// All cores of a machine take from one
    Shared,
    /// Each core has its own, and requests are dealt by chance
    PerCore,
}

#[derive(clap::Args, Debug)]
pub(crate) struct ModelArgs {
    /// SMT cores of a machine, each a request lane and a batch lane
    #[arg(long, value_name = "N", default_value_t = 1)]
    cores: u64,

    /// Machines, each with --rps requests a second; machines times cores is at most 10,000
    #[arg(long, value_name = "N", default_value_t = 1)]
    machines: u64,

    /// How the cores of a machine get their requests
    #[arg(long, value_enum, default_value = "shared")]
    queue: QueueName,

    /// Requests a second of a machine, at random times
    #[arg(long, value_name = "RATE", value_parser = rate, allow_negative_numbers = true)]
    rps: Option<f64>,

    /// The rate at noon, if --rps is that at midnight: it follows a sine over each day
    #[arg(long, value_name = "RATE", value_parser = rate, conflicts_with = "trace")]
    noon_rps: Option<f64>,

    /// Bursts: so many requests a second on top
    #[arg(long, value_name = "RATE", value_parser = rate, conflicts_with = "trace")]
    burst_rps: Option<f64>,

    /// The mean length of a burst
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "120s")]
    burst_length: Duration,

    /// The mean time between two bursts
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "3600s")]
    burst_pause: Duration,

    /// How long requests run alone: `search` (the thesis's Lucene), `exp:5ms`, `fixed:5ms`,
    /// `lognormal:5ms:0.8`, or `file:PATH` with a service time in microseconds a line, or the CSV
    /// of elfen-load
    #[arg(long, default_value = "search")]
    demand: String,

    /// Requests with their arrival and demand from this CSV instead (columns arrival_ns, demand_ns)
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["rps", "demand", "duration", "requests"],
    )]
    trace: Option<PathBuf>,

    /// Requests of a machine; 1,000,000 if --duration is not given either
    #[arg(long, value_name = "N", conflicts_with = "duration")]
    requests: Option<u64>,

    /// Simulated time
    #[arg(long, value_name = "TIME", value_parser = duration::parse)]
    duration: Option<Duration>,

    /// Take slowdowns and nap times from this TOML file, which `elfen calibrate` writes, instead of
    /// the thesis
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,

    /// The batch program: one of the --model file, or of the thesis `typical` (a request beside it
    /// takes 1.5 times as long) or `pause` (IPC 0.01, 1.37 times) [default: the first]
    #[arg(long, value_name = "NAME")]
    batch: Option<String>,

    /// How much longer a request takes while the batch runs, instead of --batch's
    #[arg(long, value_name = "FACTOR", value_parser = slowdown)]
    slowdown: Option<u64>,

    /// How much longer the batch takes while a request runs, instead of --batch's
    #[arg(long, value_name = "FACTOR", value_parser = slowdown)]
    batch_slowdown: Option<u64>,

    /// From one check to the next [default: 1us]
    #[arg(long, value_name = "TIME", value_parser = duration::parse)]
    check: Option<Duration>,

    /// From the check that decides to nap until the lane is free [default: 1643ns, the thesis's]
    #[arg(long, value_name = "TIME", value_parser = duration::parse)]
    sleep: Option<Duration>,

    /// From the request lane going idle until the batch runs [default: 719ns, the thesis's]
    #[arg(long, value_name = "TIME", value_parser = duration::parse)]
    wake: Option<Duration>,

    /// The same seed gives the same requests, whatever the policy
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

impl ModelArgs {
    /// The model, without a batch program and without an SLO.
    pub(crate) fn model(&self) -> Result<Model, Failure> {
        let until = match self.duration {
            Some(duration) => Until::Time { ns: nanos(duration) },
            None => Until::Requests(self.requests.unwrap_or(DEFAULT_REQUESTS)),
        };
        let queue = match self.queue {
            QueueName::Shared => Queue::Shared,
            QueueName::PerCore => Queue::PerCore,
        };
        Ok(Model {
            machines: self.machines,
            cores: self.cores,
            queue,
            requests: self.requests()?,
            until,
            batch: self.parameters()?.batch(),
            control: Control::NoBatch,
            watch: None,
            seed: self.seed,
        })
    }

    /// Requests a simulation and the seed, of a check that has its own model.
    pub(crate) fn of_thesis(&self) -> (u64, u64) {
        (self.requests.unwrap_or(DEFAULT_REQUESTS), self.seed)
    }

    fn requests(&self) -> Result<Requests, Failure> {
        if let Some(file) = &self.trace {
            let trace = trace::read(open(file, "trace")?).map_err(|error| {
                let fix = "give a CSV that `elfen simulate --trace-out` wrote, or one like it";
                wrong_file(file, "trace", error, fix)
            })?;
            return Ok(Requests::Trace(trace.into()));
        }
        let low_rps = self.rps.ok_or_else(|| {
            let why = "neither a rate of requests nor a trace is given";
            Failure::new(Status::Usage, "the model", why, "add --rps 100 or --trace FILE")
        })?;
        let bursts = self.burst_rps.map(|extra_rps| Bursts {
            extra_rps,
            length_ns: real(nanos(self.burst_length)),
            pause_ns: real(nanos(self.burst_pause)),
        });
        let load = Load { low_rps, high_rps: self.noon_rps.unwrap_or(low_rps), bursts };
        Ok(Requests::Drawn { load, demand: demand(&self.demand)? })
    }

    /// What stands behind every figure.
    pub(crate) fn parameters(&self) -> Result<Parameters, Failure> {
        let (source, name, batch) = match &self.model {
            Some(file) => self.of_file(file)?,
            None => {
                let kind = self.batch.as_deref().map_or(Ok(&KINDS[0]), built_in)?;
                ("the thesis's numbers".to_owned(), kind.name.to_owned(), kind.batch())
            }
        };
        Ok(Parameters {
            source,
            batch: name,
            given: [
                ("slowdown", self.slowdown.is_some()),
                ("batch-slowdown", self.batch_slowdown.is_some()),
                ("check", self.check.is_some()),
                ("sleep", self.sleep.is_some()),
                ("wake", self.wake.is_some()),
            ]
            .into_iter()
            .filter_map(|(option, given)| given.then_some(option))
            .collect(),
            request_slowdown: factor(self.slowdown.unwrap_or(batch.request_slowdown_milli)),
            batch_slowdown: factor(self.batch_slowdown.unwrap_or(batch.batch_slowdown_milli)),
            check_ns: self.check.map_or(batch.check_ns, nanos),
            sleep_ns: self.sleep.map_or(batch.sleep_ns, nanos),
            wake_ns: self.wake.map_or(batch.wake_ns, nanos),
        })
    }

    fn of_file(&self, file: &Path) -> Result<(String, String, Batch), Failure> {
        let model = ModelFile::read(file)?;
        let interference = model.interference(self.batch.as_deref()).ok_or_else(|| {
            let names: Vec<&str> = model.batch.iter().map(|batch| batch.name.as_str()).collect();
            let name = self.batch.as_deref().unwrap_or_default();
            let why = format!("{} has no such program", file.display());
            let fix = format!("use one of {}", names.join(", "));
            Failure::new(Status::Usage, format!("batch {name:?}"), why, fix)
        })?;
        let siblings = if model.machine.siblings { "" } else { ", not measured on SMT" };
        let source = format!("{} ({}{siblings})", file.display(), model.machine.cpu);
        Ok((source, interference.name.clone(), model.batch(interference)))
    }
}

fn built_in(name: &str) -> Result<&'static Kind, Failure> {
    KINDS.iter().find(|kind| kind.name == name).ok_or_else(|| {
        let names = KINDS.map(|kind| kind.name).join(" or ");
        let fix = format!("use {names}, or a program of a file with --model");
        Failure::new(Status::Usage, format!("batch {name:?}"), "it is none of those known", fix)
    })
}

/// The parameters of a simulation, as every output names them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Parameters {
    source: String,
    batch: String,
    /// Options that go before the source.
    given: Vec<&'static str>,
    request_slowdown: f64,
    batch_slowdown: f64,
    check_ns: u64,
    sleep_ns: u64,
    wake_ns: u64,
}

impl Parameters {
    fn batch(&self) -> Batch {
        Batch {
            request_slowdown_milli: nanoseconds(self.request_slowdown * 1000.0),
            batch_slowdown_milli: nanoseconds(self.batch_slowdown * 1000.0),
            check_ns: self.check_ns,
            sleep_ns: self.sleep_ns,
            wake_ns: self.wake_ns,
        }
    }

    /// One line.
    pub(crate) fn text(&self) -> String {
        let Self { source, batch, request_slowdown, batch_slowdown, .. } = self;
        let [check, sleep, wake] = [self.check_ns, self.sleep_ns, self.wake_ns].map(duration::show);
        let given: Vec<String> = self.given.iter().map(|option| format!("--{option}")).collect();
        let given =
            if given.is_empty() { String::new() } else { format!(" and {}", given.join(", ")) };
        format!(
            "parameters: {source}{given}: batch {batch}, requests slowed {request_slowdown} x, batch \
             {batch_slowdown} x; check every {check}, to sleep {sleep}, to wake {wake}\n"
        )
    }
}

fn factor(milli: u64) -> f64 {
    real(milli) / 1000.0
}

/// Refuses what cannot be simulated.
pub(crate) fn validate(model: &Model) -> Result<(), Failure> {
    let fix = "change the options that say otherwise";
    model.validate().map_err(|error| Failure::new(Status::Usage, "the model", error, fix))
}

/// For clap: a rate in requests a second.
fn rate(text: &str) -> Result<f64, String> {
    let rate = text.parse().ok().filter(|rate: &f64| rate.is_finite() && *rate >= 0.0);
    rate.ok_or_else(|| "a rate is a number of requests a second, 0 or more".to_owned())
}

/// For clap: a factor, in thousandths.
fn slowdown(text: &str) -> Result<u64, String> {
    let factor = text.parse().ok().filter(|factor| (1.0..=1000.0).contains(factor));
    let milli = factor.map(|factor: f64| nanoseconds(factor * 1000.0));
    milli.ok_or_else(|| "a slowdown is a factor between 1 and 1000, as in 1.5".to_owned())
}

fn demand(text: &str) -> Result<Demand, Failure> {
    let (kind, rest) = text.split_once(':').unwrap_or((text, ""));
    let time = || duration::parse(rest).ok().map(nanos).filter(|&ns| ns > 0);
    let demand = match kind {
        "search" if rest.is_empty() => Some(Demand::Search),
        "fixed" => time().map(|ns| Demand::Fixed { ns }),
        "exp" => time().map(|ns| Demand::Exponential { mean_ns: real(ns) }),
        "lognormal" => log_normal(rest),
        "file" => return recorded(Path::new(rest)),
        _ => None,
    };
    demand.ok_or_else(|| {
        let fix = "use search, exp:5ms, fixed:5ms, lognormal:5ms:0.8 or file:PATH";
        Failure::new(Status::Usage, format!("demand {text:?}"), "it is none of those known", fix)
    })
}

fn log_normal(text: &str) -> Option<Demand> {
    let (mean, sigma) = text.split_once(':')?;
    let mean_ns = duration::parse(mean).ok().map(nanos).filter(|&ns| ns > 0)?;
    let sigma = sigma.parse().ok().filter(|sigma| (0.0..=4.0).contains(sigma))?;
    Some(Demand::log_normal(real(mean_ns), sigma))
}

fn recorded(file: &Path) -> Result<Demand, Failure> {
    Demand::recorded(open(file, "demand")?).map_err(|error| {
        let fix = "give service times in microseconds, one a line, or a CSV with a column of them";
        wrong_file(file, "demand", error, fix)
    })
}

fn open(file: &Path, what: &str) -> Result<BufReader<File>, Failure> {
    let opened = File::open(file).map(BufReader::new);
    opened.map_err(|error| wrong_file(file, what, error, "give a file that can be read"))
}

fn wrong_file(file: &Path, what: &str, error: impl std::fmt::Display, fix: &str) -> Failure {
    Failure::new(Status::Usage, format!("{what} {:?}", file.display().to_string()), error, fix)
}
