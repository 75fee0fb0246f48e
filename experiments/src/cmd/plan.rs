//! `elfen lab plan`: finds the policies that keep an SLO of a service, with their budgets, and how
//! much batch work they allow.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use elfen_console::failure::{Failure, Status};
use elfen_console::{duration, table};
use elfen_rt::clock::nanos;
use elfen_rt::policy::Policy;
use elfen_rt::policy::slo::Slo;
use serde::Serialize;

use super::batch_args::{Parameters, Usual};
use super::model_args::{self, ModelArgs};
use simulator::Model;
use simulator::outcome::{Outcome, Summary};
use simulator::pair::{Control, Signal};
use simulator::plan::{self, Budgeted, Goal};
use simulator::time::milliseconds;
use simulator::windows::Watch;

const EXAMPLES: &str = "\
Examples:
  elfen lab plan --slo p99=100ms --rps 60      the thesis's service, any program
  elfen lab plan --slo p99=100ms --rps 80 --nap device --batch-checks source
  elfen lab plan --slo p99=100ms --rps 9 --cores 7 --machines 20 --batch-load 60
  elfen lab plan --slo p99=5ms --rps 2000 --demand file:times.csv --slowdown 1.4
  elfen lab plan --slo p99=100ms --rps 10 --noon-rps 50 --burst-rps 45 \\
      --duration 86400s --held 99.9 --nap device

By default, the batch is as under `elfen run` for any program on any machine: a guard polls the \
request lane every 500us, and the batch lane naps with PAUSE, which slows requests down.

For each policy with a budget, the command searches for the highest budget that keeps the SLO, up \
to the SLO's latency. In the model the IPC is constant, so dynamic-budget is refresh-budget with a \
constant factor. Column batch work shows the gain of each policy; 1.0 is the work of a batch that \
has a lane to itself.

slo-budget reduces its budget after 17 requests that take 15/16 of the SLO or longer. With p99 and \
windows of 60s, that is early enough for 29 requests per second or more. At lower rates, 17 slow \
requests already break the SLO of a window.";

/// Find policies and budgets that keep an SLO, and how many machines they save
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct PlanArgs {
    #[command(flatten)]
    model: ModelArgs,

    /// The latency to keep, as in p99=100ms
    #[arg(long, value_name = "SLO")]
    slo: Slo,

    /// Keep the latency in this percentage of all windows, instead of over all requests
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    held: Option<f64>,

    /// The length of a window
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "60s")]
    window: Duration,

    /// How often slo-budget sets the budget
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "1s")]
    control_window: Duration,

    /// The batch load, as the number of cores that it keeps busy with one lane each
    #[arg(long, value_name = "CORES", value_parser = cores)]
    batch_load: Option<f64>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &PlanArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let mut model = args.model.model(Usual::Run)?;
    let control_ns = nanos(args.control_window);
    let watch = Watch { slo: args.slo, judge_ns: nanos(args.window), control_ns: None };
    let steered = Watch { control_ns: Some(control_ns), ..watch };
    model.watch = Some(steered);
    model_args::validate(&model)?;
    model.watch = Some(watch);
    let report = PlanReport::new(args, &model, steered)?;
    elfen_console::output::print(out, args.json, &report, || report.text(args))?;
    Ok(ExitCode::SUCCESS)
}

/// Parses a percentage above 0 for clap, and returns it as a fraction.
fn percent(text: &str) -> Result<f64, String> {
    let percent = text.parse().ok().filter(|percent: &f64| *percent > 0.0 && *percent <= 100.0);
    percent.map(|p| p / 100.0).ok_or_else(|| {
        "the percentage must be above 0 and at most \
        100"
        .to_owned()
    })
}

fn cores(text: &str) -> Result<f64, String> {
    let cores = text.parse().ok().filter(|cores| (0.0..=1e6).contains(cores));
    cores.ok_or_else(|| "the number of cores must be from 0 to 1,000,000".to_owned())
}

/// What `--json` prints. The table shows the same numbers.
#[derive(Serialize)]
struct PlanReport {
    slo: String,
    held: Option<f64>,
    seed: u64,
    service_machines: u64,
    batch_load_cores: Option<f64>,
    /// The highest load without a batch, as a multiple of the given rate; null for a trace.
    highest_load: Option<f64>,
    policies: Vec<PolicyReport>,
    parameters: Parameters,
}

#[derive(Serialize)]
struct PolicyReport {
    policy: &'static str,
    keeps_slo: bool,
    /// The highest budget that keeps the SLO; null if the policy has no fixed budget.
    budget_ms: Option<f64>,
    tail_ms: f64,
    held: f64,
    #[serde(flatten)]
    summary: Summary,
    /// The number of machines that the batch load needs in addition to the service's.
    batch_machines: Option<u64>,
    /// How many machines fewer the batch load needs than without sharing.
    machines_saved: Option<u64>,
}

impl PlanReport {
    fn new(args: &PlanArgs, model: &Model, steered: Watch) -> Result<Self, Failure> {
        let slo = args.slo;
        let goal = match args.held {
            None => Goal::Overall(slo),
            Some(part) => Goal::Windows { slo, part },
        };
        let alone = plan::run(model, Control::NoBatch);
        let highest_load = plan::highest_load(model, 4.0, |outcome| goal.is_met(outcome));
        if !goal.is_met(&alone) {
            return Err(too_much(args, &alone, highest_load));
        }
        let of = |policy, budget_ns, outcome: &Outcome| {
            PolicyReport::new(args, model, &goal, (policy, budget_ns, outcome), &alone)
        };
        let idle = plan::run(model, Control::Policy(Policy::BorrowIdle));
        let mut policies = vec![of("none", None, &alone), of("borrow-idle", None, &idle)];
        let signal = model.batch.signal;
        for policy in Budgeted::ALL.into_iter().filter(|policy| policy.works_by(signal)) {
            let safe = plan::highest_safe_budget(model, policy, &goal);
            let (budget_ns, outcome) = safe.unwrap_or_else(|| (0, idle.clone()));
            policies.push(of(policy.name(), Some(budget_ns), &outcome));
        }
        if signal == Signal::Service {
            policies.push(of("slo-budget", None, &plan::steered(model, steered)));
        }
        Ok(Self {
            slo: show_slo(slo),
            held: args.held,
            seed: model.seed,
            service_machines: model.machines,
            batch_load_cores: args.batch_load,
            highest_load,
            policies,
            parameters: args.model.parameters(Usual::Run)?,
        })
    }

    fn text(&self, args: &PlanArgs) -> String {
        let mut heading =
            vec!["policy", "SLO", "budget", "tail", "held", "utilisation", "batch work"];
        if self.batch_load_cores.is_some() {
            heading.extend(["added machines", "saved machines"]);
        }
        let rows: Vec<Vec<String>> = self.policies.iter().map(PolicyReport::cells).collect();
        let limit = self.highest_load.map_or_else(String::new, |factor| {
            let least = if factor > 3.99 { "at least " } else { "" };
            format!(
                "; without a batch, the service keeps it up to {least}{factor:.2} times this \
                load"
            )
        });
        let goal = match args.held {
            None => self.slo.clone(),
            Some(part) => {
                let window = duration::show(nanos(args.window));
                format!("{} in {} % of windows of {window}", self.slo, part * 100.0)
            }
        };
        let advice = self.parameters.advice().map_or_else(String::new, |line| format!("{line}\n"));
        table::lines(&heading, &rows)
            + &format!("SLO: {goal}{limit}\n")
            + &self.parameters.text()
            + &advice
    }
}

fn too_much(args: &PlanArgs, alone: &Outcome, highest_load: Option<f64>) -> Failure {
    let tail = milliseconds(alone.tail_ns(&args.slo));
    let held = alone.held_fraction() * 100.0;
    let why = format!(
        "even without a batch, the tail latency is {tail:.1} ms, and {held:.2} % of \
        windows keep the SLO"
    );
    let fix = match highest_load {
        Some(factor) if factor > 0.0 => format!(
            "reduce the load to {factor:.2} times the given \
            one or less"
        ),
        _ => "choose an SLO that the service keeps without a batch".to_owned(),
    };
    Failure::new(Status::Failed, format!("SLO {}", show_slo(args.slo)), why, fix)
}

fn show_slo(slo: Slo) -> String {
    let percentile = f64::from(slo.per_million) / 1e4;
    format!("p{percentile}={}", duration::show(slo.latency_ns))
}

impl PolicyReport {
    fn new(
        args: &PlanArgs,
        model: &Model,
        goal: &Goal,
        (policy, budget_ns, outcome): (&'static str, Option<u64>, &Outcome),
        alone: &Outcome,
    ) -> Self {
        let besides = |outcome, load| plan::machines_besides(model, outcome, load);
        let machines = args.batch_load.map(|load| besides(outcome, load));
        let unshared = args.batch_load.map(|load| besides(alone, load));
        Self {
            policy,
            keeps_slo: goal.is_met(outcome),
            budget_ms: budget_ns.map(milliseconds),
            tail_ms: milliseconds(outcome.tail_ns(&args.slo)),
            held: outcome.held_fraction(),
            summary: outcome.summary(&model.batch),
            batch_machines: machines,
            machines_saved: unshared.zip(machines).map(|(all, rest)| all - rest),
        }
    }

    fn cells(&self) -> Vec<String> {
        let mut cells = vec![
            self.policy.to_owned(),
            if self.keeps_slo { "kept" } else { "broken" }.to_owned(),
            self.budget_ms.map_or_else(|| "-".to_owned(), |ms| format!("{ms:.1} ms")),
            format!("{:.1} ms", self.tail_ms),
            format!("{:.2} %", self.held * 100.0),
            format!("{:.3}", self.summary.utilisation),
            format!("{:.3}", self.summary.batch_work),
        ];
        let machines = [self.batch_machines, self.machines_saved];
        cells.extend(machines.into_iter().flatten().map(|count| count.to_string()));
        cells
    }
}
