//! `elfen lab simulate`: simulates one service, one batch program and one policy on SMT cores. The
//! machine that it runs on needs no SMT.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::time::{Duration, Instant};

use elfen_console::failure::{Failure, Status};
use elfen_console::{duration, table};
use elfen_rt::clock::nanos;
use elfen_rt::policy::Policy;
use elfen_rt::policy::slo::Slo;
use serde::Serialize;

use super::batch_args::{Parameters, Usual};
use super::model_args::{self, ModelArgs};
use crate::expected::{self, Expected, expected};
use crate::live::plan::Spec;
use crate::report::timeline::Timeline;
use simulator::outcome::{Outcome, Summary};
use simulator::pair::{Control, PrintedFixedBudget, Signal};
use simulator::plan::Budgeted;
use simulator::time::{milliseconds, real};
use simulator::windows::Watch;
use simulator::{Model, trace};

const EXAMPLES: &str = "\
Examples:
  elfen lab simulate --rps 100                          a service alone
  elfen lab simulate --rps 100 --policy borrow-idle     a batch in its idle time
  elfen lab simulate --rps 80 --policy fixed-budget --budget 37ms --json
  elfen lab simulate --rps 10 --noon-rps 70 --burst-rps 30 --duration 86400s \\
      --policy slo-budget --slo p99=100ms           a day, with bursts
  elfen lab simulate --rps 1200 --demand file:alone.csv --nap spin \\
      --nap-slowdown 1 --scenario none,borrow-idle  like `lab experiment`
  elfen lab simulate --rps 60 --scenario unrestrained,borrow-idle \\
      --timeline pair.svg --between 100ms..200ms    the lanes over time

In the JSON, all fractions are of a core's time. Their sum is the utilisation, which is 2.0 if \
both lanes are always busy: request_lane_utilisation + borrowed_fraction + overlapped_fraction.";

#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum PolicyName {
    /// No batch program
    None,
    /// A batch program that never naps
    Unrestrained,
    BorrowIdle,
    FixedBudget,
    RefreshBudget,
    /// refresh-budget with a constant factor on the budget: in the model, the IPC is exact,
    /// constant and known immediately
    DynamicBudget,
    SloBudget,
    /// The code of the thesis's Figure 5.9(b), which also lends to requests that waited
    FixedBudgetAsPrinted,
}

use PolicyName as Name;

/// Simulate a service next to a batch program, under the policies of `elfen run`
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct SimulateArgs {
    #[command(flatten)]
    model: ModelArgs,

    /// The policy that decides when the batch runs
    #[arg(long, value_enum, default_value = "none")]
    policy: PolicyName,

    /// How long the batch may share a core with a request
    #[arg(long, value_name = "TIME", value_parser = duration::parse, allow_hyphen_values = true)]
    budget: Option<Duration>,

    /// The latency to keep, as in p99=100ms: slo-budget adapts to it, and windows that keep it are
    /// counted
    #[arg(long, value_name = "SLO")]
    slo: Option<Slo>,

    /// The length of the windows in which the SLO is kept or broken
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "60s")]
    window: Duration,

    /// How often slo-budget sets the budget
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "1s")]
    control_window: Duration,

    /// Write every request to this CSV, which --trace can read
    #[arg(long, value_name = "FILE")]
    trace_out: Option<PathBuf>,

    /// The number of threads; the outcome does not depend on it [default: the number of CPUs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024),
        conflicts_with = "trace_out")]
    threads: Option<u16>,

    /// Predict what `elfen lab experiment` measures in each of these scenarios: none, unrestrained,
    /// borrow-idle, fixed-budget:2ms, dynamic-budget:2ms:0.9, slo-budget:p99=20ms
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = Spec::from_str,
        conflicts_with_all = ["policy", "budget", "slo", "trace_out", "threads"])]
    scenario: Vec<Spec>,

    /// Draw the lanes of the first core in each scenario over time, as this SVG file
    #[arg(long, value_name = "FILE", requires = "scenario")]
    timeline: Option<PathBuf>,

    /// The part of the time that --timeline shows, as in 200ms..240ms
    #[arg(long, value_name = "FROM..TO", value_parser = between, default_value = "0ms..50ms",
        requires = "timeline")]
    between: (u64, u64),

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &SimulateArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let parameters = args.model.parameters(Usual::Thesis)?;
    let mut model = args.model.model(Usual::Thesis)?;
    if !args.scenario.is_empty() {
        model_args::validate(&model)?;
        return compare(&model, args, parameters, out);
    }
    if args.policy == Name::FixedBudgetAsPrinted && parameters.has_guard() {
        let why = "it requires checks in the batch, and a guard polls instead";
        return Err(wrong_policy(&name_of(args.policy), why, "add --batch-checks source"));
    }
    let blind = model.batch.signal == Signal::Tasks;
    if blind && matches!(args.policy, Name::RefreshBudget | Name::DynamicBudget | Name::SloBudget) {
        let why = "with only the task map, it is the same as borrow-idle";
        return Err(wrong_policy(&name_of(args.policy), why, "use fixed-budget or borrow-idle"));
    }
    model.control = args.control()?;
    model.watch = args.watch();
    model_args::validate(&model)?;
    let began = Instant::now();
    let outcome = match (&args.trace_out, args.threads) {
        (Some(file), _) => run_into(&model, file)?,
        (None, Some(threads)) => model.run_on(threads.into()),
        (None, None) => model.run(),
    };
    let report = SimulateReport::new(args, parameters, &model, &outcome, began.elapsed());
    elfen_console::output::print(out, args.json, &report, || report.text())?;
    Ok(ExitCode::SUCCESS)
}

impl SimulateArgs {
    fn control(&self) -> Result<Control, Failure> {
        let wrong = |why, fix| Err(wrong_policy(&name_of(self.policy), why, fix));
        let policy = match (self.policy, self.budget.map(nanos)) {
            (Name::None, None) => return Ok(Control::NoBatch),
            (Name::Unrestrained, None) => return Ok(Control::Unrestrained),
            (Name::BorrowIdle, None) => Policy::BorrowIdle,
            (Name::SloBudget, None) if self.slo.is_none() => {
                return wrong("it requires --slo", "add --slo p99=100ms");
            }
            // The budget is 0 until the first window ends.
            (Name::SloBudget, None) => Policy::SloBudget { budget_ns: 0, until_ns: 0 },
            (Name::FixedBudget, Some(budget_ns)) => Budgeted::Fixed.with(budget_ns),
            (Name::RefreshBudget, Some(budget_ns)) => Budgeted::Refresh.with(budget_ns),
            (Name::DynamicBudget, Some(budget_ns)) => Budgeted::Dynamic.with(budget_ns),
            (Name::FixedBudgetAsPrinted, Some(budget_ns)) => {
                return Ok(Control::Printed(PrintedFixedBudget { budget_ns }));
            }
            (_, None) => return wrong("it requires --budget", "add --budget 20ms"),
            (_, Some(_)) => return wrong("it does not use --budget", "omit --budget"),
        };
        Ok(Control::Policy(policy))
    }

    fn watch(&self) -> Option<Watch> {
        let steered = self.policy == PolicyName::SloBudget;
        let control_ns = steered.then(|| nanos(self.control_window));
        self.slo.map(|slo| Watch { slo, judge_ns: nanos(self.window), control_ns })
    }
}

fn name_of(policy: PolicyName) -> String {
    let value = clap::ValueEnum::to_possible_value(&policy);
    value.map_or_else(String::new, |value| value.get_name().to_owned())
}

fn wrong_policy(name: &str, why: &str, fix: &str) -> Failure {
    Failure::new(Status::Usage, format!("policy {name}"), why, fix)
}

fn run_into(model: &Model, file: &Path) -> Result<Outcome, Failure> {
    let failed = |error: io::Error| Failure::unwritable("trace", file, error);
    let mut csv = BufWriter::new(File::create(file).map_err(failed)?);
    let mut written = writeln!(csv, "{}", trace::HEADING);
    let outcome = model.run_into(&mut |served: &trace::Served| {
        if written.is_ok() {
            written = trace::write(&mut csv, served);
        }
    });
    written.and_then(|()| csv.flush()).map_err(failed)?;
    Ok(outcome)
}

/// What `--json` prints. The table shows the same numbers.
#[derive(Serialize)]
struct SimulateReport {
    policy: String,
    budget_ms: Option<f64>,
    machines: u64,
    cores: u64,
    seed: u64,
    #[serde(flatten)]
    summary: Summary,
    /// The number of windows with requests. `slo_held` is the part of them in which the SLO was
    /// met.
    slo_windows: Option<u64>,
    slo_held: Option<f64>,
    simulated_seconds: f64,
    simulated_requests_per_second: f64,
    parameters: Parameters,
}

impl SimulateReport {
    fn new(
        args: &SimulateArgs,
        parameters: Parameters,
        model: &Model,
        outcome: &Outcome,
        took: Duration,
    ) -> Self {
        let core_seconds = outcome.core_seconds();
        Self {
            parameters,
            policy: name_of(args.policy),
            budget_ms: args.budget.map(|budget| milliseconds(nanos(budget))),
            machines: model.machines,
            cores: model.cores,
            seed: model.seed,
            summary: outcome.summary(&model.batch),
            slo_windows: model.watch.map(|_| outcome.windows),
            slo_held: model.watch.map(|_| outcome.held_fraction()),
            simulated_seconds: core_seconds / real(model.machines * model.cores),
            simulated_requests_per_second: real(outcome.requests) / took.as_secs_f64(),
        }
    }

    fn text(&self) -> String {
        let Summary { p50_ms, p95_ms, p99_ms, mean_ms, mean_wait_ms, .. } = self.summary;
        let part = |part: f64| format!("{part:.3}");
        let summary = &self.summary;
        let mut rows = vec![
            row("seed", self.seed.to_string()),
            row("requests", summary.requests.to_string()),
            row("p50, p95, p99", times(&[p50_ms, p95_ms, p99_ms])),
            row("mean, mean wait in the queue", times(&[mean_ms, mean_wait_ms])),
            row("utilisation of a core (2.0: both lanes)", part(summary.utilisation)),
            row("  request lane busy", part(summary.request_lane_utilisation)),
            row("  batch next to an idle lane (borrowed)", part(summary.borrowed_fraction)),
            row("  batch next to a request (overlapped)", part(summary.overlapped_fraction)),
            row("batch work (1.0: with a lane to itself)", part(summary.batch_work)),
        ];
        if let (Some(windows), Some(held)) = (self.slo_windows, self.slo_held) {
            let held = format!("{:.2} % of {windows} windows", held * 100.0);
            rows.push(row("SLO held in", held));
        }
        let speed = format!("{:.1} million", self.simulated_requests_per_second / 1e6);
        rows.push(row("simulated requests per second", speed));
        table::lines(&["policy", &self.policy], &rows) + &self.parameters.text()
    }
}

fn row(name: &str, value: String) -> Vec<String> {
    vec![name.to_owned(), value]
}

fn times(ms: &[f64]) -> String {
    let times: Vec<String> = ms.iter().map(|ms| format!("{ms:.2}")).collect();
    times.join(", ") + " ms"
}

/// Simulates the scenarios again, for the spans of their lanes.
fn timeline(service: &Model, args: &SimulateArgs, scenarios: &[Expected]) -> Timeline {
    let row = |(spec, expected): (&Spec, &Expected)| {
        expected::timeline(service, spec, expected.summary.overlapped, args.between)
    };
    Timeline {
        between: args.between,
        rows: args.scenario.iter().zip(scenarios).filter_map(row).collect(),
        made_with: format!(
            "Simulated by elfen lab simulate. A request takes {} times as long next to the batch.",
            real(service.batch.request_slowdown_milli) / 1e3
        ),
    }
}

/// The parser for clap: two times, in nanoseconds.
fn between(text: &str) -> Result<(u64, u64), String> {
    let ends = text.split_once("..").ok_or("expected two times, as in 200ms..240ms")?;
    let (from, to) = (nanos(duration::parse(ends.0)?), nanos(duration::parse(ends.1)?));
    if from < to { Ok((from, to)) } else { Err("the second time is not after the first".into()) }
}

/// What `--scenario --json` prints. The table shows the same numbers, in the columns of `elfen lab
/// experiment`.
#[derive(Serialize)]
struct Comparison {
    seed: u64,
    scenarios: Vec<Expected>,
    parameters: Parameters,
}

type Cell = fn(&Expected) -> String;

const COLUMNS: [(&str, Cell); 9] = [
    ("scenario", |row| row.scenario.clone()),
    ("p50 ms", |row| format!("{:.3}", row.summary.p50_ms)),
    ("p99 ms", |row| format!("{:.3}", row.summary.p99_ms)),
    ("p99 / none", |row| format!("{:.3}", row.p99_to_none)),
    ("batch work", |row| format!("{:.1} %", row.summary.batch_work * 100.0)),
    ("request lane", |row| format!("{:.1} %", row.summary.request_lane_utilisation * 100.0)),
    ("batch lane", |row| format!("{:.1} %", row.summary.batch_lane_utilisation * 100.0)),
    ("utilisation", |row| format!("{:.3}", row.summary.utilisation)),
    ("overlap", |row| format!("{:.2} %", row.summary.overlapped * 100.0)),
];

/// Simulates the same requests in each scenario.
fn compare(
    service: &Model,
    args: &SimulateArgs,
    parameters: Parameters,
    out: &mut dyn Write,
) -> Result<ExitCode, Failure> {
    let scenarios = expected(service, &args.scenario).ok_or_else(|| {
        let why = "the model cannot simulate core scheduling";
        Failure::new(Status::Usage, "the scenarios", why, "omit core-scheduling")
    })?;
    if let Some(file) = &args.timeline {
        let picture = timeline(service, args, &scenarios).svg();
        fs::write(file, picture).map_err(|error| Failure::unwritable("timeline", file, error))?;
    }
    let report = Comparison { seed: service.seed, scenarios, parameters };
    elfen_console::output::print(out, args.json, &report, || {
        let cells = |row: &Expected| COLUMNS.map(|(_, cell)| cell(row)).to_vec();
        let rows: Vec<Vec<String>> = report.scenarios.iter().map(cells).collect();
        table::lines(&COLUMNS.map(|(name, _)| name), &rows) + &report.parameters.text()
    })?;
    Ok(ExitCode::SUCCESS)
}
