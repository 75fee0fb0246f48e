//! What users write of companies and plans, and the runs that follow from it.

use super::*;
use crate::record::Service;

fn plan() -> Plan {
    Plan {
        loads: vec![0.2, 0.5],
        rates: vec![40.0],
        companies: ["none", "borrow-idle", "fixed-budget:2ms"].map(str::to_owned).to_vec(),
        batches: ["loop", "spin"].map(str::to_owned).to_vec(),
        invocations: 3,
        duration_s: 1.0,
        warmup_s: 0.0,
        seed: 7,
        signal: "auto".to_owned(),
        ..Plan::default()
    }
}

/// Goal: what a user writes comes back as it was written, and mistakes are named. Method: one
/// of each form.
#[test]
fn companies_are_read_and_written() {
    for (name, company, example) in NAMES {
        let text = example.map_or(name.to_owned(), |example| format!("{name}:{example}"));
        let spec: Spec = text.parse().unwrap();
        assert_eq!((spec.to_string(), spec.company), (text, company));
    }
    for (text, says) in [
        ("idle", "is none of"),
        ("none:2ms", "nothing after a colon"),
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

/// Goal: every run once, companies of one invocation and load together under one seed, and the
/// same order for the same seed. Method: a plan of 3 loads, 3 invocations, and 1 + 2 * 2
/// companies.
#[test]
fn runs_are_interleaved() {
    let specs = check(&plan()).unwrap();
    let jobs = jobs(&plan(), &specs, 100.0);
    assert_eq!(jobs.len(), 3 * 3 * 5);
    for block in jobs.chunks(5) {
        let first = &block[0];
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

/// Goal: a program of the user's own is one more batch, or the only one, by the last part of its
/// name. Method: the jobs of both plans.
#[test]
fn a_program_of_ones_own_is_a_batch() {
    let command = ["/usr/bin/xz", "-k", "f"].map(str::to_owned).to_vec();
    for (batches, per_block) in [(vec!["loop".to_owned()], 5), (vec![], 3)] {
        let plan = Plan { command: command.clone(), batches, ..plan() };
        let jobs = jobs(&plan, &check(&plan).unwrap(), 100.0);
        assert_eq!(jobs.len(), 3 * 3 * per_block);
        let own = jobs.iter().filter(|job| job.batch.as_deref() == Some("xz"));
        assert_eq!(own.count(), 3 * 3 * 2);
    }
}

#[test]
fn plans_without_sense_are_refused() {
    type Mistake = fn(&mut Plan);
    let mistakes: [(Mistake, &str); 11] = [
        (|plan| plan.invocations = 0, "nothing to measure"),
        (|plan| (plan.loads, plan.rates) = (vec![], vec![]), "neither loads nor rates"),
        (|plan| plan.loads = vec![20.0], "2000 %"),
        (|plan| plan.batches = vec!["xz".to_owned()], "is none of loop"),
        (|plan| plan.batches = vec![], "need a batch program"),
        (|plan| plan.command = vec!["bin/loop".to_owned()], "program of elfen-batch as well"),
        (
            |plan| (plan.command, plan.emulate_smt) = (vec!["xz".to_owned()], Some(1.5)),
            "leave --emulate-smt",
        ),
        (
            |plan| (plan.service, plan.emulate_smt) = (Some(Service::default()), Some(1.5)),
            "only elfen-search runs on an emulated core",
        ),
        (
            |plan| {
                plan.service = Some(Service::default());
                plan.companies.push("refresh-budget:2ms".to_owned());
            },
            "refresh-budget:2ms goes by the requests that a service publishes",
        ),
        (|plan| plan.duration_s = 0.0, "100 ms to a day"),
        (|plan| plan.companies.push("none".to_owned()), "named twice"),
    ];
    for (mistake, says) in mistakes {
        let mut plan = plan();
        mistake(&mut plan);
        let error = check(&plan).unwrap_err();
        assert!(error.contains(says), "{error}");
    }
}
