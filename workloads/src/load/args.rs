//! The command line of `elfen-load`, and its conversion to settings.

use super::driver::Settings;
use super::engine::Limits;
use super::plan::{Arrivals, End};
use super::protocol::Protocol;
use super::queries::{Lines, QuerySet, Target, usage};
use super::reference::ServiceTimes;
use crate::units::{Nanos, parse_nanos};
use clap::Parser;
use elfen_console::failure::Failure;
use std::net::SocketAddr;
use std::path::PathBuf;

const DEFAULT_DURATION_NS: Nanos = 10_000_000_000;
const DEFAULT_SPIN_NS: Nanos = 100_000;

/// Loads a service at a rate that does not depend on its answers, and measures latency from the
/// moment each request was due.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "elfen-load",
    version,
    after_help = "Example: elfen-load --rps 200 --duration 30s --connections 64 \\\n         \
                  --queries queries.txt --template '/search?q={}' http://127.0.0.1:8080\n\n\
                  Exit status: 0 measured, 1 failed (also: sent too late), 2 wrong arguments, \
                  130 interrupted."
)]
pub(crate) struct LoadArgs {
    /// http://host:port/path or redis://host:port
    #[arg(required_unless_present = "reference_server")]
    pub(crate) url: Option<Target>,

    /// Requests per second, on average
    #[arg(long, value_parser = rate, default_value = "100")]
    rps: f64,

    /// How long requests are sent, after the warm-up [default: 10s]
    #[arg(long, value_parser = parse_nanos, conflicts_with_all = ["requests", "passes"])]
    duration: Option<Nanos>,

    /// Send this many requests instead
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..), conflicts_with = "passes")]
    requests: Option<u64>,

    /// Send the query set this many times instead (5 in the thesis)
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    passes: Option<u64>,

    /// Send requests for this long before measuring
    #[arg(long, value_parser = parse_nanos, default_value = "0s")]
    warmup: Nanos,

    /// Measure this many times, with seeds counting up from --seed; report medians (20 in the
    /// thesis)
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..), default_value = "1")]
    pub(crate) runs: u32,

    /// Seed of the arrival times and of the order of the queries
    #[arg(long, default_value = "1")]
    pub(crate) seed: u64,

    /// How arrivals are spread over time
    #[arg(long, value_enum, default_value = "exponential")]
    arrivals: Arrivals,

    #[arg(long, value_parser = clap::value_parser!(u32).range(1..), default_value = "16")]
    connections: u32,

    /// Requests that may be under way on one connection
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..), default_value = "1")]
    pipeline: u32,

    /// Time limit for an answer, from the time at which the request was due
    #[arg(long, value_parser = parse_nanos, default_value = "10s")]
    timeout: Nanos,

    /// How late a request may be sent before the run fails
    #[arg(long, value_parser = parse_nanos, default_value = "10ms")]
    pub(crate) max_late: Nanos,

    /// Continue with a warning if requests are sent later than --max-late
    #[arg(long)]
    pub(crate) allow_late: bool,

    /// One query per line: a target (/x?q=a), METHOD /target body, or a Redis command
    #[arg(long, value_name = "FILE")]
    queries: Option<PathBuf>,

    /// The target of each request; {} is replaced by a percent-encoded line of --queries
    #[arg(long, requires = "queries", value_parser = template)]
    template: Option<String>,

    /// Read --queries as a luceneutil task file (Category: query # freq=..)
    #[arg(long, requires = "queries", requires = "template")]
    tasks: bool,

    /// The CPU to run on
    #[arg(long)]
    cpu: Option<usize>,

    /// How long before a send to stop sleeping and poll the clock instead [default: 100us]
    #[arg(long, value_parser = parse_nanos)]
    spin: Option<Nanos>,

    /// Never sleep: detects answers immediately, but uses a whole CPU
    #[arg(long, conflicts_with = "spin")]
    busy: bool,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,

    /// Write every request to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) csv: Option<PathBuf>,

    /// Serve at this address with known response times, to test load generators
    #[arg(long, value_name = "ADDRESS", conflicts_with = "url")]
    pub(crate) reference_server: Option<SocketAddr>,

    /// Service times of --reference-server: exponential:1ms, fixed:1ms, or
    /// fixed:1ms,stall:1000:100ms (each 1000th takes 100 ms more) [default: exponential:1ms]
    #[arg(long, requires = "reference_server")]
    pub(crate) service: Option<ServiceTimes>,
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rps) if (1e-3..=1e8).contains(&rps) => Ok(rps),
        _ => Err("a rate must be a number from 0.001 to 100000000".into()),
    }
}

fn template(text: &str) -> Result<String, String> {
    if text.contains("{}") { Ok(text.into()) } else { Err("a template must contain {}".into()) }
}

impl LoadArgs {
    /// Converts the arguments to settings, and reads the files that they name.
    pub(crate) fn settings(&self, target: &Target) -> Result<Settings, Failure> {
        let queries = self.query_set(target)?;
        let end = match (self.duration, self.requests, self.passes) {
            (_, Some(requests), _) => End::Requests(requests),
            (_, _, Some(passes)) => End::Requests(passes.saturating_mul(queries.len().into())),
            (Some(duration), ..) => End::At(duration),
            _ => End::At(DEFAULT_DURATION_NS),
        };
        Ok(Settings {
            address: target.resolve()?,
            protocol: target.protocol,
            queries,
            arrivals: self.arrivals,
            rps: self.rps,
            end,
            warmup_ns: self.warmup,
            limits: Limits {
                connections: self.connections as usize,
                pipeline: self.pipeline as usize,
                timeout_ns: self.timeout,
                most_late_ns: (!self.allow_late).then_some(self.max_late),
            },
            spin_ns: (!self.busy).then_some(self.spin.unwrap_or(DEFAULT_SPIN_NS)),
            cpu: self.cpu,
            every_request: self.csv.is_some(),
        })
    }

    fn query_set(&self, target: &Target) -> Result<QuerySet, Failure> {
        if self.template.is_some() && target.protocol != Protocol::Http {
            let problem = "--template is for HTTP; write Redis commands as they are";
            return Err(usage(problem));
        }
        let Some(path) = &self.queries else { return QuerySet::of_target(target) };
        let lines = match &self.template {
            None => Lines::Requests,
            Some(template) if self.tasks => Lines::Tasks(template),
            Some(template) => Lines::Template(template),
        };
        QuerySet::read(path, lines, target)
    }
}
