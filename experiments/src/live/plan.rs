//! Which runs there are, and in which order: interleaved, so that drift cancels.
//!
//! Companies take turns within one load of one invocation, in an order drawn from the seed, so that
//! what is compared was measured within a minute. All of them meet the same requests at the same
//! times.

use std::fmt;
use std::str::FromStr;

use elfen_console::duration;
use elfen_rt::clock::nanos;
use elfen_rt::policy::slo::Slo;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::own;
use crate::record::{Company, Plan, Run};

/// The batch programs of `elfen-batch`.
pub const BATCHES: [&str; 6] = ["loop", "matrix", "flush", "stall", "spin", "compress"];

/// What shares the core with the service, as a user writes it: `none`, `fixed-budget:2ms`,
/// `slo-budget:p99=20ms`.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    pub company: Company,
    /// What its policy takes, in the words of `elfen run`.
    detail: Detail,
}

#[derive(Clone, Debug, PartialEq)]
enum Detail {
    Nothing,
    Budget(String),
    /// A budget, and the IPC of the service alone.
    BudgetAndIpc(String, String),
    Slo(String),
}

/// Every company by its name, with an example of what it takes.
const NAMES: [(&str, Company, Option<&str>); 10] = [
    ("none", Company::None, None),
    ("unrestrained", Company::Unrestrained, None),
    ("nice19", Company::Nice19, None),
    ("sched-idle", Company::SchedIdle, None),
    ("core-scheduling", Company::CoreScheduling, None),
    ("borrow-idle", Company::BorrowIdle, None),
    ("fixed-budget", Company::FixedBudget, Some("2ms")),
    ("refresh-budget", Company::RefreshBudget, Some("2ms")),
    ("dynamic-budget", Company::DynamicBudget, Some("2ms:0.9")),
    ("slo-budget", Company::SloBudget, Some("p99=20ms")),
];

impl FromStr for Spec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, rest) = match text.split_once(':') {
            Some((name, rest)) => (name, Some(rest)),
            None => (text, None),
        };
        let known = || NAMES.map(|(name, ..)| name).join(", ");
        let &(name, company, example) = NAMES
            .iter()
            .find(|(known, ..)| *known == name)
            .ok_or_else(|| format!("{name:?} is none of {}", known()))?;
        let detail = Detail::of(company, rest).ok_or_else(|| match example {
            Some(example) => format!("{name} takes more, as in {name}:{example}"),
            None => format!("{name} takes nothing after a colon"),
        })?;
        Ok(Self { company, detail })
    }
}

impl Detail {
    fn of(company: Company, text: Option<&str>) -> Option<Self> {
        let budget = |text: &str| budget_ns(text).map(|_| text.to_owned());
        Some(match (company, text) {
            (Company::FixedBudget | Company::RefreshBudget, text) => Self::Budget(budget(text?)?),
            (Company::DynamicBudget, text) => {
                let (time, ipc) = text?.split_once(':')?;
                ipc.parse().ok().filter(|ipc: &f64| *ipc > 0.0)?;
                Self::BudgetAndIpc(budget(time)?, ipc.to_owned())
            }
            (Company::SloBudget, text) => {
                text?.parse::<Slo>().ok()?;
                Self::Slo(text?.to_owned())
            }
            (_, None) => Self::Nothing,
            (_, Some(_)) => return None,
        })
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(name_of(self.company))?;
        match &self.detail {
            Detail::Nothing => Ok(()),
            Detail::Budget(text) | Detail::Slo(text) => write!(f, ":{text}"),
            Detail::BudgetAndIpc(budget, ipc) => write!(f, ":{budget}:{ipc}"),
        }
    }
}

impl Spec {
    /// One without a budget or an objective.
    pub fn plain(company: Company) -> Self {
        Self { company, detail: Detail::Nothing }
    }

    pub(crate) fn has_batch(&self) -> bool {
        self.company != Company::None
    }

    /// As `elfen run` takes the policy.
    pub(super) fn options(&self) -> Vec<&str> {
        let mut options = vec!["--policy", name_of(self.company)];
        match &self.detail {
            Detail::Nothing => {}
            Detail::Budget(budget) => options.extend(["--budget", budget]),
            Detail::BudgetAndIpc(budget, ipc) => {
                options.extend(["--budget", budget, "--ref-ipc", ipc]);
            }
            Detail::Slo(slo) => options.extend(["--slo", slo]),
        }
        options
    }

    pub(crate) fn budget_ns(&self) -> Option<u64> {
        match &self.detail {
            Detail::Budget(budget) | Detail::BudgetAndIpc(budget, _) => budget_ns(budget),
            Detail::Nothing | Detail::Slo(_) => None,
        }
    }

    /// Of the service alone, as the user takes it to be.
    pub(crate) fn ref_ipc(&self) -> Option<f64> {
        match &self.detail {
            Detail::BudgetAndIpc(_, ipc) => ipc.parse().ok(),
            _ => None,
        }
    }

    pub(crate) fn slo(&self) -> Option<String> {
        match &self.detail {
            Detail::Slo(slo) => Some(slo.clone()),
            _ => None,
        }
    }
}

/// The name of a company, as it is written without its budget.
pub fn name_of(company: Company) -> &'static str {
    let known = NAMES.iter().find(|(_, known, _)| *known == company);
    known.map_or("", |&(name, ..)| name)
}

fn budget_ns(text: &str) -> Option<u64> {
    duration::parse(text).ok().map(nanos)
}

/// One run to be made.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    pub spec: Spec,
    pub batch: Option<String>,
    pub load: f64,
    pub rps: f64,
    pub invocation: u32,
    /// Of the requests: the same for all companies of an invocation.
    pub seed: u64,
}

impl Job {
    /// Whether this run has been made already.
    pub fn is(&self, run: &Run) -> bool {
        run.asked == self.spec.to_string()
            && run.batch == self.batch
            // JSON may lose the last bit of a number.
            && (run.rps - self.rps).abs() <= self.rps * 1e-9
            && run.invocation == self.invocation
    }
}

/// The companies of a plan, or what is wrong with it.
pub fn check(plan: &Plan) -> Result<Vec<Spec>, String> {
    let specs: Vec<Spec> = plan.companies.iter().map(|c| c.parse()).collect::<Result<_, _>>()?;
    if specs.is_empty() || plan.invocations == 0 {
        return Err("it has no company or no invocation, so nothing to measure".to_owned());
    }
    if plan.loads.is_empty() && plan.rates.is_empty() {
        return Err("it has neither loads nor rates".to_owned());
    }
    if let Some(load) = plan.loads.iter().find(|load| !(0.01..=2.0).contains(*load)) {
        return Err(format!("a load of {} % is outside 1 to 200 % of the capacity", load * 100.0));
    }
    if let Some(rate) = plan.rates.iter().find(|rate| !(0.1..=1e6).contains(*rate)) {
        return Err(format!("a rate of {rate} requests a second is outside 0.1 to 1,000,000"));
    }
    if let Some(unknown) = plan.batches.iter().find(|batch| !BATCHES.contains(&batch.as_str())) {
        return Err(format!("batch program {unknown:?} is none of {}", BATCHES.join(", ")));
    }
    let own = own::label(&plan.command);
    if let Some(label) = own.as_ref().filter(|label| plan.batches.contains(label)) {
        return Err(format!("{label} is a program of elfen-batch as well: leave one of them out"));
    }
    if own.is_some() && plan.emulate_smt.is_some() {
        return Err(
            "only the programs of elfen-batch run on an emulated core: leave --emulate-smt \
                    or the program out"
                .to_owned(),
        );
    }
    check_service(plan, &specs)?;
    if plan.batches.is_empty() && own.is_none() && specs.iter().any(Spec::has_batch) {
        return Err(
            "companies need a batch program, as in --batch loop or -- xz -k FILE".to_owned()
        );
    }
    if !(0.1..=86_400.0).contains(&plan.duration_s) || !(0.0..=3_600.0).contains(&plan.warmup_s) {
        return Err("a run takes from 100 ms to a day, and its warm-up at most an hour".to_owned());
    }
    let twice =
        |values: &[String]| values.iter().enumerate().any(|(at, v)| values[..at].contains(v));
    if twice(&plan.companies) || twice(&plan.batches) {
        return Err("a company or a batch program is named twice".to_owned());
    }
    Ok(specs)
}

/// Refuses what cannot be had with a service of the user's own.
fn check_service(plan: &Plan, specs: &[Spec]) -> Result<(), String> {
    let Some(service) = &plan.service else { return Ok(()) };
    if plan.emulate_smt.is_some() {
        return Err("only elfen-search runs on an emulated core: leave --emulate-smt or the \
                    service out"
            .to_owned());
    }
    let by_its_page = |spec: &&Spec| {
        use Company::{DynamicBudget, RefreshBudget, SloBudget};
        matches!(spec.company, RefreshBudget | DynamicBudget | SloBudget)
    };
    match specs.iter().find(by_its_page) {
        Some(spec) if service.name.is_none() => Err(format!(
            "{spec} goes by the requests that a service publishes: name its page with --service"
        )),
        _ => Ok(()),
    }
}

/// The batch programs of a plan, as rows name them.
pub(super) fn batches(plan: &Plan) -> impl Iterator<Item = String> {
    plan.batches.iter().cloned().chain(own::label(&plan.command))
}

/// All runs of a plan in their order. `capacity_rps` turns shares into rates.
pub fn jobs(plan: &Plan, specs: &[Spec], capacity_rps: f64) -> Vec<Job> {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(plan.seed);
    let shares = plan.loads.iter().map(|&load| (load, load * capacity_rps));
    let mut loads: Vec<(f64, f64)> =
        shares.chain(plan.rates.iter().map(|&rps| (rps / capacity_rps, rps))).collect();
    let batches: Vec<String> = batches(plan).collect();
    let mut jobs = Vec::new();
    for invocation in 0..plan.invocations {
        loads.shuffle(&mut rng);
        for &(load, rps) in &loads {
            let seed = rng.random::<u64>() >> 16;
            let mut turns: Vec<(&Spec, Option<&String>)> = Vec::new();
            for spec in specs {
                match spec.has_batch() {
                    true => turns.extend(batches.iter().map(|batch| (spec, Some(batch)))),
                    false => turns.push((spec, None)),
                }
            }
            turns.shuffle(&mut rng);
            jobs.extend(turns.into_iter().map(|(spec, batch)| Job {
                spec: spec.clone(),
                batch: batch.cloned(),
                load,
                rps,
                invocation,
                seed,
            }));
        }
    }
    jobs
}

#[cfg(test)]
mod tests;
