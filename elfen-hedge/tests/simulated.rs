//! Goal: each request is answered as often as it was sent, at most twice. Duplicates stay within
//! their share. Policies improve latencies as expected if servers stand still. Method: the proxy's
//! policies in simulated time.

use elfen_hedge::policy::Policy;
use elfen_hedge::policy::simulate::{Outcome, Plan, Request, simulate};
use elfen_rt::clock::nanos;
use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_distr::Exp1;
use rand_xoshiro::Xoshiro256PlusPlus;
use std::time::Duration;

const US: u64 = 1_000;
const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000_000_000;

/// Requests for 40 s: 300 per second, which need 0.4 ms each on average. The first server has
/// `pauses` pauses of 20 ms per second.
fn plan_with_pauses(pauses: u64) -> Plan {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(1);
    let mut exponential = |mean: Duration| nanos(mean.mul_f64(random.sample(Exp1)));
    let (mut at_ns, mut requests) = (0, Vec::new());
    while at_ns < 40 * SECOND {
        at_ns += exponential(Duration::from_nanos(3_333_333));
        let work_ns = 200 * US + exponential(Duration::from_micros(200));
        requests.push(Request { comes_ns: at_ns, work_ns, around_ns: 0, may_double: true });
    }
    let pause = |number: u64| {
        let from_ns = 2 * SECOND + number * SECOND / pauses.max(1) + number % 7 * MS;
        (from_ns, from_ns + 20 * MS)
    };
    let all: Vec<(u64, u64)> = (0..37 * pauses).map(pause).collect();
    Plan { requests, pauses: [all, Vec::new()], poll_interval_ns: 500 * US }
}

fn quantile(outcome: &Outcome, per_million: u64) -> u64 {
    let mut sorted: Vec<u64> =
        outcome.latencies_ns.iter().map(|ns| ns.expect("answered")).collect();
    sorted.sort_unstable();
    let per_million = usize::try_from(per_million).unwrap();
    sorted[(sorted.len() * per_million).div_ceil(1_000_000) - 1]
}

/// With five pauses per second, the p95 lies in a pause, so waiting for it helps little.
#[test]
fn look_is_a_third_of_waiting_for_the_p95() {
    let plan = plan_with_pauses(5);
    let [none, p95, look] = [Policy::None, Policy::AfterP95, Policy::Look]
        .map(|policy| simulate(&plan, policy, 50_000));
    let [none_p99, p95_p99, look_p99] =
        [&none, &p95, &look].map(|outcome| quantile(outcome, 990_000));
    assert!(none_p99 > 15 * MS && p95_p99 > 4 * MS, "{none_p99}, {p95_p99}");
    assert!(look_p99 * 3 <= p95_p99, "{look_p99} and {p95_p99}");
    assert!(quantile(&look, 999_000) * 5 <= quantile(&none, 999_000));
    let (few, many) = (look.counts.duplicates, p95.counts.duplicates);
    let all = look.counts.requests;
    assert!(few * 100 <= all * 3 && few * 3 <= many * 2, "{few} and {many} of {all}");
    let hazard = simulate(&plan, Policy::Hazard, 50_000);
    assert!(
        quantile(&hazard, 990_000) <= look_p99 && hazard.counts.duplicates <= few,
        "{hazard:?}"
    );
}

/// The first server never continues. Requests before its second sample may have no answer, but all
/// later requests have one.
#[test]
fn an_endless_pause_keeps_the_budget() {
    let mut plan = plan_with_pauses(0);
    plan.pauses[0] = vec![(5 * SECOND, u64::MAX)];
    let look = simulate(&plan, Policy::Look, 50_000);
    assert!(look.latencies_ns.iter().all(Option::is_some), "the budget had saved enough");
    assert_eq!(look.counts.swaps, 1);
    let after = simulate(&plan, Policy::After(2 * MS), 50_000);
    assert!(after.counts.duplicates * 20 <= after.counts.requests, "{:?}", after.counts);
    assert!(after.counts.refused_by_budget > 1_000, "{:?}", after.counts);
}

fn plan() -> impl Strategy<Value = Plan> {
    let request = (0..5 * MS, 1..3 * MS, any::<bool>());
    let pause = (MS..40 * MS, MS..60 * MS);
    let pauses = || proptest::collection::vec(pause.clone(), 0..12);
    let requests = proptest::collection::vec(request, 1..400);
    (requests, pauses(), pauses(), 50 * US..5 * MS).prop_map(|(gaps, first, second, look)| {
        let mut at_ns = 0;
        let requests = gaps.into_iter().map(|(gap_ns, work_ns, may_double)| {
            at_ns += gap_ns;
            Request { comes_ns: at_ns, work_ns, around_ns: 0, may_double }
        });
        let apart = |pauses: Vec<(u64, u64)>| {
            let mut end_ns = 0;
            let one = |(gap_ns, last_ns)| {
                let from_ns: u64 = end_ns + gap_ns;
                end_ns = from_ns + last_ns;
                (from_ns, end_ns)
            };
            pauses.into_iter().map(one).collect()
        };
        let requests = requests.collect();
        Plan { requests, pauses: [apart(first), apart(second)], poll_interval_ns: look }
    })
}

fn policy() -> impl Strategy<Value = Policy> {
    let after = (0..20 * MS).prop_map(Policy::After);
    let hazard = Just(Policy::Hazard);
    prop_oneof![Just(Policy::None), Just(Policy::Look), hazard, Just(Policy::AfterP95), after]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn each_is_answered_and_few_twice(
        plan in plan(), policy in policy(), extra in 0..300_000_u64, endless in any::<[bool; 2]>(),
    ) {
        let mut plan = plan;
        for (pauses, _) in plan.pauses.iter_mut().zip(endless).filter(|(_, endless)| *endless) {
            let last_ns = pauses.last().map_or(10 * MS, |(_, to_ns)| to_ns + MS);
            pauses.push((last_ns, u64::MAX));
        }
        let outcome = simulate(&plan, policy, extra);
        let counts = outcome.counts;
        prop_assert_eq!(counts.requests, plan.requests.len() as u64);
        prop_assert!(counts.duplicates * 1_000_000 <= counts.requests * extra, "{:?}", counts);
        prop_assert!(counts.won_by_backup <= counts.duplicates);
        for ((request, answers), latency) in
            plan.requests.iter().zip(&outcome.answers).zip(&outcome.latencies_ns)
        {
            prop_assert_eq!(*answers > 0, latency.is_some());
            prop_assert!(*answers <= 1 + u32::from(request.may_double));
            prop_assert!(latency.is_none_or(|ns| ns >= request.work_ns));
        }
        let answers: u64 = outcome.answers.iter().map(|answers| u64::from(*answers)).sum();
        if endless == [false; 2] {
            prop_assert!(outcome.latencies_ns.iter().all(Option::is_some));
            prop_assert_eq!(answers, counts.requests + counts.duplicates);
        } else {
            prop_assert!(answers <= counts.requests + counts.duplicates);
        }
    }
}
