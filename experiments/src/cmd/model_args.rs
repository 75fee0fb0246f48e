//! The options of `simulate` and `plan` for the machines and the requests of the model.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::time::Duration;

use elfen_console::duration;
use elfen_console::failure::{Failure, Status};
use elfen_rt::clock::nanos;

use super::batch_args::{BatchArgs, Parameters, Usual};
use simulator::demand::Demand;
use simulator::load::{Bursts, Load};
use simulator::pair::Control;
use simulator::source::{Requests, Until};
use simulator::time::real;
use simulator::{Model, Queue, trace};

pub(super) const DEFAULT_REQUESTS: u64 = 1_000_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum QueueName {
    /// All cores of a machine share one queue
    Shared,
    /// Each core has its own queue, and each request goes to a random one
    PerCore,
}

#[derive(clap::Args, Debug)]
pub(crate) struct ModelArgs {
    /// SMT cores of a machine, each with a request lane and a batch lane
    #[arg(long, value_name = "N", default_value_t = 1)]
    cores: u64,

    /// The number of machines, each with --rps requests per second; machines times cores must be at
    /// most 10,000
    #[arg(long, value_name = "N", default_value_t = 1)]
    machines: u64,

    /// How requests are distributed to the cores of a machine
    #[arg(long, value_enum, default_value = "shared")]
    queue: QueueName,

    /// Requests per second of a machine, at random times
    #[arg(long, value_name = "RATE", value_parser = rate, allow_negative_numbers = true)]
    rps: Option<f64>,

    /// The rate, in percent of the cores' capacity without a batch
    #[arg(long, value_name = "PERCENT", value_parser = rate, conflicts_with_all = ["rps", "trace"])]
    load: Option<f64>,

    /// The rate at noon; --rps is then the rate at midnight, and the rate follows a sine over each
    /// day
    #[arg(long, value_name = "RATE", value_parser = rate, conflicts_with = "trace")]
    noon_rps: Option<f64>,

    /// Additional requests per second during bursts
    #[arg(long, value_name = "RATE", value_parser = rate, conflicts_with = "trace")]
    burst_rps: Option<f64>,

    /// The mean length of a burst
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "120s")]
    burst_length: Duration,

    /// The mean time between two bursts
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "3600s")]
    burst_pause: Duration,

    /// The service times of requests alone: `search` (the thesis's Lucene), `exp:5ms`, `fixed:5ms`,
    /// `lognormal:5ms:0.8`, or `file:PATH` with one service time in microseconds per line, or the
    /// CSV of elfen-load
    #[arg(long, default_value = "search")]
    demand: String,

    /// Read the requests, with arrival and demand, from this CSV (columns arrival_ns, demand_ns)
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["rps", "demand", "duration", "requests"],
    )]
    trace: Option<PathBuf>,

    /// The number of requests per machine; 1,000,000 if --duration is not given either
    #[arg(long, value_name = "N", conflicts_with = "duration")]
    requests: Option<u64>,

    /// The simulated time
    #[arg(long, value_name = "TIME", value_parser = duration::parse)]
    duration: Option<Duration>,

    #[command(flatten)]
    batch: BatchArgs,

    /// The seed: the same seed gives the same requests under every policy
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

impl ModelArgs {
    /// Returns the model, without a policy and without an SLO.
    pub(crate) fn model(&self, usual: Usual) -> Result<Model, Failure> {
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
            batch: self.batch.parameters(usual)?.batch(),
            control: Control::NoBatch,
            watch: None,
            seed: self.seed,
        })
    }

    fn requests(&self) -> Result<Requests, Failure> {
        if let Some(file) = &self.trace {
            let trace = trace::read(open(file, "trace")?).map_err(|error| {
                let fix = "use a CSV that `elfen lab simulate --trace-out` wrote, or a CSV of the \
                    same format";
                wrong_file(file, "trace", error, fix)
            })?;
            return Ok(Requests::Trace(trace.into()));
        }
        let demand = demand(&self.demand)?;
        let all_rps = real(self.cores) * 1e9 / demand.mean_ns();
        let part_rps = self.load.map(|percent| percent / 100.0 * all_rps);
        let low_rps = self.rps.or(part_rps).ok_or_else(|| {
            let why = "neither a rate of requests nor a trace is given";
            Failure::new(Status::Usage, "the model", why, "add --rps 100 or --trace FILE")
        })?;
        let bursts = self.burst_rps.map(|extra_rps| Bursts {
            extra_rps,
            length_ns: real(nanos(self.burst_length)),
            pause_ns: real(nanos(self.burst_pause)),
        });
        let load = Load { low_rps, high_rps: self.noon_rps.unwrap_or(low_rps), bursts };
        Ok(Requests::Drawn { load, demand })
    }

    /// Returns the parameters that every output prints with its figures.
    pub(crate) fn parameters(&self, usual: Usual) -> Result<Parameters, Failure> {
        self.batch.parameters(usual)
    }
}

/// Refuses models that cannot be simulated.
pub(crate) fn validate(model: &Model) -> Result<(), Failure> {
    let fix = "correct the options";
    model.validate().map_err(|error| Failure::new(Status::Usage, "the model", error, fix))
}

/// Parses a rate in requests per second, for clap.
fn rate(text: &str) -> Result<f64, String> {
    let rate = text.parse().ok().filter(|rate: &f64| rate.is_finite() && *rate >= 0.0);
    rate.ok_or_else(|| "a rate must be a number of requests per second, 0 or more".to_owned())
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
        Failure::new(Status::Usage, format!("demand {text:?}"), "unknown distribution", fix)
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
        let fix = "use a file with one service time in microseconds per line, or a CSV with such a \
            column";
        wrong_file(file, "demand", error, fix)
    })
}

fn open(file: &Path, what: &str) -> Result<BufReader<File>, Failure> {
    let opened = File::open(file).map(BufReader::new);
    opened.map_err(|error| wrong_file(file, what, error, "choose a file that can be read"))
}

fn wrong_file(file: &Path, what: &str, error: impl std::fmt::Display, fix: &str) -> Failure {
    Failure::new(Status::Failed, format!("{what} {:?}", file.display().to_string()), error, fix)
}
