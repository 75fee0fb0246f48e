//! The results file of a live experiment, in JSON lines. The first line is a [`Setup`]. Each
//! finished run adds a [`Run`].
//!
//! A crash can only cut off the last line. [`read`] leaves such a line out, so that the experiment
//! can continue. The report is drawn from these lines. Users may give it any file, so [`read`]
//! checks everything.

use std::path::PathBuf;

use elfen_run::report::RunReport;
use serde::{Deserialize, Serialize};

/// One line of a results file.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Line {
    Setup(Setup),
    Run(Run),
}

/// The version of the format, which is in the first line. Other versions are refused.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct Schema;

impl Schema {
    const NUMBER: u32 = 2;
}

impl TryFrom<u32> for Schema {
    type Error = String;

    fn try_from(number: u32) -> Result<Self, String> {
        let why = || format!("schema {number}; this version reads schema {}", Self::NUMBER);
        (number == Self::NUMBER).then_some(Self).ok_or_else(why)
    }
}

impl From<Schema> for u32 {
    fn from(_: Schema) -> Self {
        Schema::NUMBER
    }
}

/// What is needed to repeat the runs that follow.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Setup {
    pub schema: Schema,
    pub elfen: String,
    pub kernel: String,
    pub cpu: String,
    pub cpus: u32,
    /// Whether the lanes of every pair are hyperthreads of one core in the kernel's topology.
    pub smt: bool,
    /// The value of `--lanes`.
    pub lanes: String,
    /// The command that created the file.
    pub command: String,
    /// When the experiment started, in seconds since 1970.
    pub started_s: u64,
    pub seed: u64,
    /// The capacity of the service. Loads are shares of it.
    pub capacity_rps: f64,
    pub documents: u64,
    /// What this experiment does not show, one sentence for each limit.
    pub limits: Vec<String>,
    /// The requested plan. Runs are added to a file only for the same plan.
    pub plan: Option<Plan>,
    /// The CPUs and the priority of coordinator and generator.
    #[serde(default)]
    pub helpers: String,
    /// Whether the coordinator and the generator share the batch lane, because all CPUs are in
    /// pairs.
    #[serde(default)]
    pub helpers_share_a_lane: bool,
    /// The work of every batch program alone, on one lane.
    #[serde(default)]
    pub alone: Vec<Alone>,
}

/// The parameters that determine the runs of an experiment.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Plan {
    /// Shares of the service's capacity.
    pub loads: Vec<f64>,
    /// More loads, in requests per second.
    pub rates: Vec<f64>,
    /// The scenarios as the user writes them: `none`, `fixed-budget:2ms`.
    pub scenarios: Vec<String>,
    pub batches: Vec<String>,
    /// How often each combination of load, scenario and batch is run.
    pub runs: u32,
    pub duration_s: f64,
    pub warmup_s: f64,
    pub seed: u64,
    /// The value of `elfen run --source`.
    pub source: String,
    /// The value of `--emulate-smt`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub emulate_smt: Option<f64>,
    /// A batch program of the user's own, with its arguments.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// The value of `elfen run --checks`; `None` means auto.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checks: Option<String>,
    /// A service of the user's own, instead of `elfen-search`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service: Option<Service>,
}

/// A service of the user's own. Its processes are not part of the plan, because they change when
/// the service restarts.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Service {
    pub url: String,
    /// The name under which the service publishes its requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The file of queries. Each request has one line of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queries: Option<PathBuf>,
}

/// The work of a batch program alone on a lane.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Alone {
    pub batch: String,
    pub per_second: f64,
    pub unit: String,
    pub checksum: String,
}

/// What runs next to the service, and how it is restrained.
#[derive(
    Clone, Copy, Debug, Default, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Scenario {
    /// The service runs alone.
    #[default]
    None,
    /// A batch program runs at normal priority.
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

/// One measurement: the service under one load, in one scenario.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Run {
    pub scenario: Scenario,
    pub budget_ns: Option<u64>,
    pub batch: Option<String>,
    /// The requested load, as a share of the service's capacity.
    pub load: f64,
    pub rps: f64,
    /// The number of this run among the runs of the same load, scenario and batch, from 0.
    pub invocation: u32,
    pub seed: u64,
    pub duration_s: f64,
    pub requests: u64,
    pub errors: u64,
    pub achieved_rps: f64,
    /// The percentiles are over all requests. A failed request counts as 10 s, the generator's
    /// timeout.
    pub p50_ms: f64,
    pub p95_ms: f64,
    pub p99_ms: f64,
    pub p999_ms: f64,
    pub max_ms: f64,
    pub mean_ms: f64,
    /// The 99th percentile of the generator's delay in sending.
    pub late_p99_ms: f64,
    /// The utilisations are parts of the wall time, averaged over all pairs.
    pub request_lane_utilisation: f64,
    pub batch_lane_utilisation: f64,
    /// The work of the batch per second, in the program's own unit. `None` without a batch, or if
    /// the batch got too little time to end.
    pub batch_per_second: Option<f64>,
    /// Whether the results of the batch are correct.
    pub batch_verified: Option<bool>,
    /// The report of `elfen run`; `None` for the baselines.
    pub report: Option<Box<RunReport>>,
    /// The reports of the batch lanes after the first.
    #[serde(default)]
    pub more_reports: Vec<RunReport>,
    /// The scenario as the plan writes it: `fixed-budget:2ms`.
    #[serde(default)]
    pub asked: String,
    /// The SLO of slo-budget, which is the value of `--slo`.
    pub slo: Option<String>,
    pub batch_unit: Option<String>,
    pub batch_checksum: Option<String>,
    /// How often a program of the user's own ended and was started again.
    #[serde(default)]
    pub batch_ends: u32,
    /// The CPU time of the coordinator and the generator, in CPUs. If they share the batch lane,
    /// the batch cannot use this part of the lane.
    #[serde(default)]
    pub helper_utilisation: f64,
    /// The latency of each request, in the order in which they were due.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub latencies_us: Vec<f64>,
    /// The part of the time of the measured CPUs that the hypervisor gave to other machines.
    #[serde(default)]
    pub steal: f64,
    /// The requests of a run on an emulated core, as the input of a simulation.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub served: Vec<Served>,
    /// The recording of `elfen shim`, if it was requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shim: Option<PathBuf>,
    #[serde(default)]
    pub warnings: Vec<String>,
    /// When the run ended, in seconds since 1970.
    #[serde(default)]
    pub ended_s: u64,
}

impl Run {
    /// Whether both runs got the same requests at the same times.
    pub fn met_the_same_requests(&self, other: &Self) -> bool {
        (self.invocation, self.seed) == (other.invocation, other.seed)
            && (self.rps - other.rps).abs() <= self.rps * 1e-9
    }
}

/// An answered request: when it was due, counted from the start of the run, its service time
/// without the slowdown of an emulated core, and this slowdown.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(from = "(f64, f64, f64)", into = "(f64, f64, f64)")]
pub struct Served {
    pub due_us: f64,
    pub work_us: f64,
    pub added_us: f64,
}

impl From<(f64, f64, f64)> for Served {
    fn from((due_us, work_us, added_us): (f64, f64, f64)) -> Self {
        Self { due_us, work_us, added_us }
    }
}

impl From<Served> for (f64, f64, f64) {
    fn from(served: Served) -> Self {
        (served.due_us, served.work_us, served.added_us)
    }
}

/// Returns the setup in the first line, if the file has it.
pub fn setup(lines: &[Line]) -> Option<&Setup> {
    lines.first().and_then(|line| match line {
        Line::Setup(setup) => Some(setup),
        Line::Run(_) => None,
    })
}

/// Returns the runs among these lines.
pub fn runs(lines: &[Line]) -> impl Iterator<Item = &Run> {
    lines.iter().filter_map(|line| match line {
        Line::Run(run) => Some(run),
        Line::Setup(_) => None,
    })
}

/// The lines of a file, in order.
#[derive(Clone, Debug, PartialEq)]
pub struct Written {
    pub lines: Vec<Line>,
    /// The length of the complete lines in bytes. It is less than the file's length if the last
    /// line is cut off.
    pub bytes: usize,
    /// The number of the last line if it is cut off by an interruption. It is not in `lines`.
    pub cut: Option<usize>,
}

/// Why a file is not a results file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadLine {
    #[error("line {0} is not text")]
    NoText(usize),
    #[error("line {line}: {why}")]
    NoLine { line: usize, why: String },
}

/// Reads all lines. Fails at the first invalid line.
pub fn read(file: &[u8]) -> Result<Written, BadLine> {
    let mut written = Written { lines: Vec::new(), bytes: 0, cut: None };
    for (line, bytes) in (1..).zip(file.split_inclusive(|&byte| byte == b'\n')) {
        let Some(whole) = bytes.strip_suffix(b"\n") else {
            written.cut = Some(line);
            break;
        };
        let text = std::str::from_utf8(whole).map_err(|_| BadLine::NoText(line))?;
        written.lines.push(serde_json::from_str(text).map_err(|error| {
            // The parser sees only this line, and calls it line 1.
            let text = error.to_string();
            let why = text.rsplit_once(" at line ").map_or(text.as_str(), |(why, _)| why);
            BadLine::NoLine { line, why: why.to_owned() }
        })?);
        written.bytes += bytes.len();
    }
    Ok(written)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a file of another version is refused, and the message names its schema. Method: a
    /// setup as this version writes it, with another number, and without a number.
    #[test]
    fn files_of_another_schema_are_refused() {
        let setup = serde_json::to_string(&Line::Setup(Setup::default())).unwrap() + "\n";
        assert!(read(setup.as_bytes()).is_ok());
        for (schema, says) in [("\"schema\":3,", "schema 3; this version reads"), ("", "`schema`")]
        {
            let other = setup.replace("\"schema\":2,", schema);
            let refused = read(other.as_bytes()).unwrap_err().to_string();
            assert!(refused.starts_with("line 1: ") && refused.contains(says), "{refused}");
        }
    }
}
