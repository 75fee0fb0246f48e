//! What a live experiment writes: JSON lines, one about the machine and the plan, then one for each
//! run as it ends.
//!
//! A line is written whole or, after a crash, is the last and cut off; [`read`] leaves such a tail
//! out, so that an experiment goes on where it was. The report draws from these lines alone; a user
//! may hand it anything.

use std::path::PathBuf;

use elfen_run::report::Report;
use serde::{Deserialize, Serialize};

/// One line of a results file.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Line {
    Setup(Setup),
    Run(Run),
}

/// All that is needed to repeat the runs that follow.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Setup {
    pub elfen: String,
    pub kernel: String,
    pub cpu: String,
    pub cpus: u32,
    /// Whether the lanes are hyperthreads of one core, or CPUs that were only said to be.
    pub smt: bool,
    /// As in `--lanes`.
    pub lanes: String,
    /// The command that made the file.
    pub command: String,
    /// Seconds since 1970.
    pub started_s: u64,
    pub seed: u64,
    /// What the service can serve, by which loads are shares.
    pub capacity_rps: f64,
    pub documents: u64,
    /// What this machine cannot show, a sentence each.
    pub limits: Vec<String>,
    /// What was asked for; a file goes on with the same alone.
    #[serde(default)]
    pub plan: Option<Plan>,
    /// Where coordinator and generator ran, and at which priority.
    #[serde(default)]
    pub helpers: String,
    /// Whether that was the batch lane's CPU, for want of another.
    #[serde(default)]
    pub helpers_share_a_lane: bool,
    /// Every batch program without a request beside it, on one lane.
    #[serde(default)]
    pub alone: Vec<Alone>,
}

/// Everything that decides which runs there are.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Plan {
    /// Shares of the service's capacity.
    pub loads: Vec<f64>,
    /// Requests per second, besides or instead.
    pub rates: Vec<f64>,
    /// As a user writes them: `none`, `fixed-budget:2ms`.
    pub companies: Vec<String>,
    pub batches: Vec<String>,
    pub invocations: u32,
    pub duration_s: f64,
    pub warmup_s: f64,
    pub seed: u64,
    /// As in `elfen run --signal`.
    pub signal: String,
    /// As in `--emulate-smt`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub emulate_smt: Option<f64>,
    /// A batch program of the user's own, with its arguments.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// As in `elfen run --inject`; nothing is auto.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inject: Option<String>,
    /// Instead of `elfen-search`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<Service>,
}

/// A service of the user's own. The processes whose CPU time is its may change: a service is
/// restarted.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Service {
    pub url: String,
    /// The name under which it publishes its requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// A line of this file goes into each request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queries: Option<PathBuf>,
}

/// A batch program with nothing beside it.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Alone {
    pub batch: String,
    pub per_second: f64,
    pub unit: String,
    pub checksum: String,
}

/// What shared the core with the service.
#[derive(
    Clone, Copy, Debug, Default, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Company {
    /// Nothing.
    #[default]
    None,
    /// A batch program without any restraint.
    Unrestrained,
    Nice19,
    SchedIdle,
    CoreScheduling,
    BorrowIdle,
    FixedBudget,
    RefreshBudget,
    DynamicBudget,
    SloBudget,
}

/// One measurement: the service under one load, with one kind of company, for one invocation.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Run {
    pub company: Company,
    pub budget_ns: Option<u64>,
    /// The batch program; nothing if there was none.
    pub batch: Option<String>,
    /// The share of the service's capacity that was asked for.
    pub load: f64,
    pub rps: f64,
    pub invocation: u32,
    pub seed: u64,
    pub duration_s: f64,
    pub requests: u64,
    pub errors: u64,
    pub achieved_rps: f64,
    /// Of all requests; one that failed counts as the generator's timeout, 10 s.
    pub p50_ms: f64,
    pub p95_ms: f64,
    pub p99_ms: f64,
    pub p999_ms: f64,
    pub max_ms: f64,
    pub mean_ms: f64,
    /// How late the generator sent, at its 99th percentile.
    pub late_p99_ms: f64,
    /// Shares of the wall time, of all pairs together divided by their number.
    pub request_lane_utilisation: f64,
    pub batch_lane_utilisation: f64,
    /// Work of the batch per second, in the program's own unit; nothing if there was none, or if it
    /// was so starved that it could not even end.
    pub batch_per_second: Option<f64>,
    /// Whether the batch found its results right.
    pub batch_verified: Option<bool>,
    /// What `elfen run --report` wrote; nothing for the baselines.
    pub report: Option<Box<Report>>,
    /// The same for every batch lane after the first.
    #[serde(default)]
    pub more_reports: Vec<Report>,
    /// The company in the words of the plan: `fixed-budget:2ms`.
    #[serde(default)]
    pub asked: String,
    /// The objective of slo-budget, as in `--slo`.
    #[serde(default)]
    pub slo: Option<String>,
    #[serde(default)]
    pub batch_unit: Option<String>,
    #[serde(default)]
    pub batch_checksum: Option<String>,
    /// How often a program of the user's own came to its end and was started again.
    #[serde(default)]
    pub batch_ends: u32,
    /// CPU time of coordinator and generator, in CPUs. Where they share the batch lane's CPU, the
    /// batch cannot have had this part of it.
    #[serde(default)]
    pub helper_utilisation: f64,
    /// Of each request, in order; no file has them.
    #[serde(skip)]
    pub latencies_ms: Vec<f64>,
    /// Of a run on an emulated core, what a simulation of it takes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub served: Vec<Served>,
    /// Who ran on a pair's lanes, as `elfen shim` recorded it, if that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shim: Option<PathBuf>,
    /// What the generator warned of.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// Seconds since 1970.
    #[serde(default)]
    pub ended_s: u64,
}

impl Run {
    pub fn met_the_requests_of(&self, other: &Self) -> bool {
        (self.invocation, self.seed) == (other.invocation, other.seed)
            && (self.rps - other.rps).abs() <= self.rps * 1e-9
    }
}

/// A request that was answered: when it was due, from the beginning of the run on, and how long it
/// worked, without what an emulated core made of that.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(from = "(f64, f64)", into = "(f64, f64)")]
pub struct Served {
    pub due_us: f64,
    pub work_us: f64,
}

impl From<(f64, f64)> for Served {
    fn from((due_us, work_us): (f64, f64)) -> Self {
        Self { due_us, work_us }
    }
}

impl From<Served> for (f64, f64) {
    fn from(served: Served) -> Self {
        (served.due_us, served.work_us)
    }
}

/// The lines of a file, in their order.
#[derive(Clone, Debug, PartialEq)]
pub struct Written {
    pub lines: Vec<Line>,
    /// How many bytes they take: all, unless the last line is cut off.
    pub bytes: usize,
    /// The number of a last line without its end, which is left out: the run was interrupted.
    pub cut: Option<usize>,
}

/// Why a file is no results file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadLine {
    #[error("line {0} is no text")]
    NoText(usize),
    #[error("line {line}: {why}")]
    NoLine { line: usize, why: String },
}

/// Reads all lines, or names the first that is wrong.
pub fn read(file: &[u8]) -> Result<Written, BadLine> {
    let mut written = Written { lines: Vec::new(), bytes: 0, cut: None };
    for (line, bytes) in (1..).zip(file.split_inclusive(|&byte| byte == b'\n')) {
        let Some(whole) = bytes.strip_suffix(b"\n") else {
            written.cut = Some(line);
            break;
        };
        let text = std::str::from_utf8(whole).map_err(|_| BadLine::NoText(line))?;
        written.lines.push(serde_json::from_str(text).map_err(|error| {
            // The parser saw this line alone, and calls it line 1.
            let text = error.to_string();
            let why = text.rsplit_once(" at line ").map_or(text.as_str(), |(why, _)| why);
            BadLine::NoLine { line, why: why.to_owned() }
        })?);
        written.bytes += bytes.len();
    }
    Ok(written)
}
