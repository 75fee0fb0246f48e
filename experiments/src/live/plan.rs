//! The runs of a plan and their order, which is interleaved so that slow changes of the machine
//! affect all scenarios.
//!
//! The scenarios of one load and one invocation run directly after each other, in a random order
//! that depends on the seed. So the runs that are compared follow each other closely. All runs of a
//! plan get the same requests, at times that only depend on the load.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use elfen_console::duration;
use elfen_rt::clock::nanos;
use elfen_rt::policy::slo::Slo;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::record::{Plan, Run, Scenario};

/// The batch programs of `elfen-batch`.
pub const BATCHES: [&str; 6] = ["loop", "matrix", "flush", "stall", "spin", "compress"];

/// A scenario as a user writes it: `none`, `fixed-budget:2ms`, `slo-budget:p99=20ms`.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    pub scenario: Scenario,
    /// The values of the policy's options, as `elfen run` takes them.
    values: Vec<String>,
}

/// The options of `elfen run` that are parameters of a scenario.
const BUDGET: &str = "--budget";
const REF_IPC: &str = "--ref-ipc";
const SLO: &str = "--slo";

/// Every scenario, its name, the options of its policy, and an example of their values.
const SCENARIOS: [(&str, Scenario, &[&str], &str); 10] = [
    ("none", Scenario::None, &[], ""),
    ("unrestrained", Scenario::Unrestrained, &[], ""),
    ("nice19", Scenario::Nice19, &[], ""),
    ("sched-idle", Scenario::SchedIdle, &[], ""),
    ("core-scheduling", Scenario::CoreScheduling, &[], ""),
    ("borrow-idle", Scenario::BorrowIdle, &[], ""),
    ("fixed-budget", Scenario::FixedBudget, &[BUDGET], "2ms"),
    ("refresh-budget", Scenario::RefreshBudget, &[BUDGET], "2ms"),
    ("dynamic-budget", Scenario::DynamicBudget, &[BUDGET, REF_IPC], "2ms:0.9"),
    ("slo-budget", Scenario::SloBudget, &[SLO], "p99=20ms"),
];

impl FromStr for Spec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(':').map(str::to_owned);
        let name = parts.next().unwrap_or_default();
        let row = SCENARIOS.iter().find(|(known, ..)| *known == name);
        let &(_, scenario, options, example) = row.ok_or_else(|| {
            let known = SCENARIOS.map(|(name, ..)| name).join(", ");
            format!("unknown scenario {name:?}, expected one of: {known}")
        })?;
        let values: Vec<String> = parts.collect();
        let mut given = options.iter().zip(&values);
        if values.len() == options.len() && given.all(|(option, value)| is_valid(option, value)) {
            return Ok(Self { scenario, values });
        }
        Err(match example {
            "" => format!("{name} has no parameter: omit the colon and the text after it"),
            _ => format!("{name} requires a parameter, as in {name}:{example}"),
        })
    }
}

fn is_valid(option: &str, value: &str) -> bool {
    match option {
        BUDGET => budget_ns(value).is_some(),
        REF_IPC => value.parse().is_ok_and(|ipc: f64| ipc > 0.0),
        _ => value.parse::<Slo>().is_ok(),
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(scenario_name(self.scenario))?;
        self.values.iter().try_for_each(|value| write!(f, ":{value}"))
    }
}

impl Spec {
    /// Returns the specification of a scenario without parameters.
    pub fn plain(scenario: Scenario) -> Self {
        Self { scenario, values: Vec::new() }
    }

    pub(crate) fn has_batch(&self) -> bool {
        self.scenario != Scenario::None
    }

    /// Returns the options of `elfen run` for this policy.
    pub(super) fn options(&self) -> Vec<&str> {
        let name = ["--policy", scenario_name(self.scenario)];
        name.into_iter()
            .chain(self.parameters().flat_map(|(option, value)| [option, value]))
            .collect()
    }

    fn parameters(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let of = |(_, known, ..): &&(&str, Scenario, _, _)| *known == self.scenario;
        let options = SCENARIOS.iter().find(of).map_or(&[][..], |&(_, _, options, _)| options);
        options.iter().copied().zip(self.values.iter().map(String::as_str))
    }

    fn parameter(&self, option: &str) -> Option<&str> {
        self.parameters().find(|(known, _)| *known == option).map(|(_, value)| value)
    }

    pub(crate) fn budget_ns(&self) -> Option<u64> {
        budget_ns(self.parameter(BUDGET)?)
    }

    /// Returns the IPC of the service alone, as the user gave it.
    pub(crate) fn ref_ipc(&self) -> Option<f64> {
        self.parameter(REF_IPC)?.parse().ok()
    }

    pub(crate) fn slo(&self) -> Option<String> {
        self.parameter(SLO).map(str::to_owned)
    }
}

/// Returns the name of a scenario without its parameters.
pub fn scenario_name(scenario: Scenario) -> &'static str {
    let known = SCENARIOS.iter().find(|(_, known, ..)| *known == scenario);
    known.map_or("", |&(name, ..)| name)
}

fn budget_ns(text: &str) -> Option<u64> {
    duration::parse(text).ok().map(nanos)
}

/// Returns the name of the user's own program in results: the last part of its path.
pub(super) fn label(command: &[String]) -> Option<String> {
    let program = Path::new(command.first()?);
    let name = program.file_name().unwrap_or(program.as_os_str());
    Some(name.to_string_lossy().into_owned())
}

/// A planned run.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    pub spec: Spec,
    pub batch: Option<String>,
    pub load: f64,
    pub rps: f64,
    pub invocation: u32,
    /// The seed of the requests, which all runs of a plan share.
    pub seed: u64,
}

impl Job {
    /// Whether `run` is the result of this job.
    pub fn matches(&self, run: &Run) -> bool {
        run.asked == self.spec.to_string()
            && run.batch == self.batch
            // JSON may change the last bit of a number.
            && (run.rps - self.rps).abs() <= self.rps * 1e-9
            && run.invocation == self.invocation
    }
}

/// Returns the scenarios of a plan, or an error that names its first mistake.
pub fn check(plan: &Plan) -> Result<Vec<Spec>, String> {
    let specs: Vec<Spec> = plan.scenarios.iter().map(|c| c.parse()).collect::<Result<_, _>>()?;
    if specs.is_empty() || plan.runs == 0 {
        return Err("there is nothing to measure: no scenario, or no runs".to_owned());
    }
    if plan.loads.is_empty() && plan.rates.is_empty() {
        return Err("it has neither loads nor rates".to_owned());
    }
    if let Some(load) = plan.loads.iter().find(|load| !(0.01..=2.0).contains(*load)) {
        return Err(format!(
            "a load of {} % is not within 1 to 200 % of the capacity",
            load * 100.0
        ));
    }
    if let Some(rate) = plan.rates.iter().find(|rate| !(0.1..=1e6).contains(*rate)) {
        return Err(format!("a rate of {rate} requests per second is not within 0.1 to 1,000,000"));
    }
    if let Some(unknown) = plan.batches.iter().find(|batch| !BATCHES.contains(&batch.as_str())) {
        let known = BATCHES.join(", ");
        return Err(format!("unknown batch program {unknown:?}, expected one of: {known}"));
    }
    let own = label(&plan.command);
    if let Some(label) = own.as_ref().filter(|label| plan.batches.contains(label)) {
        return Err(format!(
            "{label} is also the name of a program of elfen-batch: omit one of the two"
        ));
    }
    if own.is_some() && plan.emulate_smt.is_some() {
        return Err(
            "only the programs of elfen-batch run on an emulated core: omit --emulate-smt or the \
                    program"
                .to_owned(),
        );
    }
    check_service(plan, &specs)?;
    if plan.batches.is_empty() && own.is_none() && specs.iter().any(Spec::has_batch) {
        return Err(
            "scenarios need a batch program, as in --batch loop or -- xz -k FILE".to_owned()
        );
    }
    if !(0.1..=86_400.0).contains(&plan.duration_s) || !(0.0..=3_600.0).contains(&plan.warmup_s) {
        return Err(
            "a run must last from 100 ms to a day, and its warm-up at most an hour".to_owned()
        );
    }
    let twice =
        |values: &[String]| values.iter().enumerate().any(|(at, v)| values[..at].contains(v));
    if twice(&plan.scenarios) || twice(&plan.batches) {
        return Err("a scenario or a batch program is named twice".to_owned());
    }
    Ok(specs)
}

/// Refuses plans that a service of the user's own does not support.
fn check_service(plan: &Plan, specs: &[Spec]) -> Result<(), String> {
    let Some(service) = &plan.service else { return Ok(()) };
    if plan.emulate_smt.is_some() {
        return Err(
            "only elfen-search runs on an emulated core: omit --emulate-smt or the service"
                .to_owned(),
        );
    }
    let needs_page = |spec: &&Spec| {
        use Scenario::{DynamicBudget, RefreshBudget, SloBudget};
        matches!(spec.scenario, RefreshBudget | DynamicBudget | SloBudget)
    };
    match specs.iter().find(needs_page) {
        Some(spec) if service.name.is_none() => Err(format!(
            "{spec} requires a service that publishes its requests: name it with --service"
        )),
        _ => Ok(()),
    }
}

/// Returns the batch programs of a plan, by their names in results.
pub(super) fn batch_labels(plan: &Plan) -> impl Iterator<Item = String> {
    plan.batches.iter().cloned().chain(label(&plan.command))
}

/// Returns all runs of a plan in order. `capacity_rps` converts loads to rates.
pub fn jobs(plan: &Plan, specs: &[Spec], capacity_rps: f64) -> Vec<Job> {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(plan.seed);
    let shares = plan.loads.iter().map(|&load| (load, load * capacity_rps));
    let mut loads: Vec<(f64, f64)> =
        shares.chain(plan.rates.iter().map(|&rps| (rps / capacity_rps, rps))).collect();
    let batches: Vec<String> = batch_labels(plan).collect();
    let mut jobs = Vec::new();
    let seed = rng.random::<u64>() >> 16;
    for invocation in 0..plan.runs {
        loads.shuffle(&mut rng);
        for &(load, rps) in &loads {
            let mut turns: Vec<(&Spec, Option<&String>)> = Vec::new();
            for spec in specs {
                if spec.has_batch() {
                    turns.extend(batches.iter().map(|batch| (spec, Some(batch))));
                } else {
                    turns.push((spec, None));
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
mod tests {
    use super::*;

    fn plan() -> Plan {
        Plan {
            loads: vec![0.2, 0.5],
            rates: vec![40.0],
            scenarios: ["none", "borrow-idle", "fixed-budget:2ms"].map(str::to_owned).to_vec(),
            batches: ["loop", "spin"].map(str::to_owned).to_vec(),
            runs: 3,
            duration_s: 1.0,
            warmup_s: 0.0,
            seed: 7,
            source: "auto".to_owned(),
            ..Plan::default()
        }
    }

    /// Goal: a scenario is printed as it was parsed, and mistakes are reported. Method: one example
    /// of each form.
    #[test]
    fn scenarios_are_read_and_written() {
        for (name, scenario, _, example) in SCENARIOS {
            let text = format!("{name}:{example}").trim_end_matches(':').to_owned();
            let spec: Spec = text.parse().unwrap();
            assert_eq!((spec.to_string(), spec.scenario), (text, scenario));
        }
        for (text, says) in [
            ("idle", "unknown scenario"),
            ("none:2ms", "none has no parameter"),
            ("fixed-budget", "as in fixed-budget:2ms"),
            ("fixed-budget:2", "as in fixed-budget:2ms"),
            ("refresh-budget:xs", "as in refresh-budget:2ms"),
            ("slo-budget:2ms", "as in slo-budget:p99=20ms"),
            ("dynamic-budget:2ms", "as in dynamic-budget:2ms:0.9"),
            ("dynamic-budget:2ms:-1", "as in dynamic-budget:2ms:0.9"),
        ] {
            let error = text.parse::<Spec>().unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
        let fixed: Spec = "fixed-budget:2ms".parse().unwrap();
        assert_eq!(fixed.options(), ["--policy", "fixed-budget", "--budget", "2ms"]);
        assert_eq!((fixed.budget_ns(), fixed.slo()), (Some(2_000_000), None));
        let dynamic: Spec = "dynamic-budget:2ms:0.9".parse().unwrap();
        assert_eq!(dynamic.options()[2..], ["--budget", "2ms", "--ref-ipc", "0.9"]);
        let slo: Spec = "slo-budget:p99=20ms".parse().unwrap();
        assert_eq!(slo.options()[2..], ["--slo", "p99=20ms"]);
    }

    /// Goal: the plan has every run once. The scenarios of one invocation and load are adjacent and
    /// share a seed. The same seed gives the same order. Method: a plan with 3 loads, 3
    /// invocations, and 1 + 2 * 2 scenarios.
    #[test]
    fn runs_are_interleaved() {
        let specs = check(&plan()).unwrap();
        let jobs = jobs(&plan(), &specs, 100.0);
        assert_eq!(jobs.len(), 3 * 3 * 5);
        for block in jobs.chunks(5) {
            let first = &block[0];
            assert_eq!(first.seed, jobs[0].seed);
            for job in block {
                assert_eq!(
                    (job.rps, job.seed, job.invocation),
                    (first.rps, first.seed, first.invocation)
                );
            }
            assert_eq!(block.iter().filter(|job| job.batch.is_none()).count(), 1);
            for (at, job) in block.iter().enumerate() {
                assert!(!block[..at].contains(job), "twice: {job:?}");
            }
        }
        assert_eq!(jobs, super::jobs(&plan(), &specs, 100.0));
        let firsts: Vec<String> = jobs.chunks(5).map(|b| b[0].spec.to_string()).collect();
        assert!(firsts.iter().any(|first| *first != firsts[0]), "always the same first");
    }

    /// Goal: invalid plans are refused. Method: the mistakes that the tests in tests/live leave
    /// out.
    #[test]
    fn invalid_plans_are_refused() {
        type Mistake = fn(&mut Plan);
        let mistakes: [(Mistake, &str); 4] = [
            (|plan| (plan.loads, plan.rates) = (vec![], vec![]), "neither loads nor rates"),
            (|plan| plan.batches = vec![], "need a batch program"),
            (
                |plan| plan.command = vec!["bin/loop".to_owned()],
                "also the name of a program of elfen-batch",
            ),
            (|plan| plan.scenarios.push("none".to_owned()), "named twice"),
        ];
        for (mistake, says) in mistakes {
            let mut plan = plan();
            mistake(&mut plan);
            let error = check(&plan).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }
}
