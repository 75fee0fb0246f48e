//! Tests the policies against a second statement of their rules, which looks back over the whole
//! history instead of keeping a state.
//!
//! A history is a service with one worker, and a batch thread that checks while it runs and naps
//! until the lane idles. The oracle knows every arrival, start and end, and every check so far. It
//! decides each check from all of them.

use std::vec::Vec;

use proptest::prelude::*;

use super::dynamic::RATIO_MAX;
use super::{Policy, Sample, Service, State, Verdict};

#[derive(Clone, Copy, Debug)]
struct Request {
    arrived_ns: u64,
    started_ns: u64,
    ended_ns: u64,
}

/// Requests in the order of a queue with one worker. An idle lane takes `wake_ns` to start a
/// request.
#[derive(Clone, Debug)]
struct World {
    requests: Vec<Request>,
    wake_ns: u64,
}

impl World {
    fn new(arrivals: &[(u64, u64)], wake_ns: u64) -> Self {
        let mut requests: Vec<Request> = Vec::new();
        let (mut arrived_ns, mut free_ns) = (1_000, 0);
        for &(pause_ns, demand_ns) in arrivals {
            arrived_ns += pause_ns;
            // A request that finds the lane free has to wake it up first.
            let started_ns = if arrived_ns < free_ns { free_ns } else { arrived_ns + wake_ns };
            free_ns = started_ns + demand_ns;
            requests.push(Request { arrived_ns, started_ns, ended_ns: free_ns });
        }
        Self { requests, wake_ns }
    }

    fn running(&self, now_ns: u64) -> Option<usize> {
        self.requests.iter().position(|r| r.started_ns <= now_ns && now_ns < r.ended_ns)
    }

    fn queue_len(&self, now_ns: u64) -> usize {
        self.requests.iter().filter(|r| r.arrived_ns <= now_ns && now_ns < r.started_ns).count()
    }

    fn finished(&self, now_ns: u64) -> usize {
        self.requests.iter().filter(|r| r.ended_ns <= now_ns).count()
    }

    /// The lane as a check sees it. Ids repeat after two requests, so that an id does not identify
    /// a request.
    fn lane(&self, now_ns: u64, ipc_milli: Option<u64>) -> Sample {
        let running = self.running(now_ns);
        let service = Service {
            queue_len: self.queue_len(now_ns) as u64,
            running_request: running.map_or(0, |r| 1 + r as u64 % 2),
            request_started_ns: running.map_or(0, |r| self.requests[r].started_ns),
            finished: self.finished(now_ns) as u64,
        };
        let busy = running.is_some();
        Sample { busy, busy_since_ns: None, service: Some(service), ipc_milli }
    }

    /// When the lane next goes idle after `now_ns`, which wakes a napping thread.
    fn next_idle_ns(&self, now_ns: u64) -> u64 {
        let ends = self.requests.iter().map(|r| r.ended_ns).filter(|&end_ns| end_ns > now_ns);
        ends.filter(|&end_ns| self.running(end_ns).is_none()).min().unwrap_or(u64::MAX)
    }

    /// Whether the request arrived while another one ran or waited.
    fn waited(&self, request: usize) -> bool {
        let r = self.requests[request];
        request > 0 && r.arrived_ns < self.requests[request - 1].ended_ns
    }
}

#[derive(Clone, Copy, Debug)]
struct Check {
    now_ns: u64,
    ipc_milli: Option<u64>,
    verdict: Verdict,
}

/// The batch thread's checks until the last request is done. While the thread runs, they are a
/// `gap_ns` apart.
fn checks(world: &World, policy: &Policy, gaps: &[(u64, Option<u64>)]) -> Vec<Check> {
    let mut state = State::default();
    let mut now_ns = 0;
    let mut made = Vec::new();
    let last_ns = world.requests.last().map_or(0, |r| r.ended_ns);
    for &(gap_ns, ipc_milli) in gaps.iter().cycle() {
        if now_ns > last_ns || made.len() > 400 {
            break;
        }
        let (next, verdict) = policy.check(state, &world.lane(now_ns, ipc_milli), now_ns);
        made.push(Check { now_ns, ipc_milli, verdict });
        state = next;
        now_ns = match verdict {
            Verdict::Run => now_ns + gap_ns,
            Verdict::Nap => world.next_idle_ns(now_ns).saturating_add(world.wake_ns),
        };
    }
    made
}

/// The verdict of the last of `checks`, by the rules.
fn oracle(world: &World, policy: &Policy, checks: &[Check]) -> Verdict {
    let now_ns = checks[checks.len() - 1].now_ns;
    let Some(running) = world.running(now_ns) else { return Verdict::Run };
    let may_run = match *policy {
        Policy::BorrowIdle => false,
        Policy::FixedBudget { budget_ns } => {
            let before_ns = if running == 0 { 0 } else { world.requests[running - 1].ended_ns };
            let r = world.requests[running];
            let was_idle = |check: &Check| (before_ns..r.arrived_ns).contains(&check.now_ns);
            !world.waited(running)
                && checks.iter().any(was_idle)
                && now_ns - r.started_ns < budget_ns
        }
        Policy::RefreshBudget { budget_ns } => refreshed(world, checks, &|_| (budget_ns, 1, 1)),
        Policy::DynamicBudget { budget_ns, ref_ipc_milli } => {
            refreshed(world, checks, &|check| stretched(budget_ns, ref_ipc_milli, check.ipc_milli))
        }
        Policy::SloBudget { .. } => unreachable!("the same rule as refresh-budget"),
    };
    if may_run { Verdict::Run } else { Verdict::Nap }
}

/// The budget, and the part of it that a shared nanosecond uses up, as a fraction.
fn stretched(budget_ns: u64, ref_ipc: u64, ipc: Option<u64>) -> (u64, u64, u64) {
    match ipc {
        None => (budget_ns, 1, 1),
        Some(_) if ref_ipc == 0 => (budget_ns, 1, 1),
        Some(ipc) if ipc * RATIO_MAX >= ref_ipc * (RATIO_MAX - 1) => (budget_ns, 1, RATIO_MAX),
        Some(ipc) => (budget_ns, ref_ipc - ipc, ref_ipc),
    }
}

/// Whether the budget lasted at every check since the last idle moment with an empty queue. At each
/// check, compares the time since the start of the request that got the last budget with the budget
/// at that check.
fn refreshed(world: &World, checks: &[Check], budget: &dyn Fn(&Check) -> (u64, u64, u64)) -> bool {
    let idle = |check: &Check| world.running(check.now_ns).is_none();
    let empty = |check: &Check| world.queue_len(check.now_ns) == 0;
    let Some(fresh) = checks.iter().rposition(|check| idle(check) && empty(check)) else {
        return false;
    };
    let busy: Vec<&Check> = checks[fresh..].iter().filter(|check| !idle(check)).collect();
    let unseen = world.finished(busy[0].now_ns) > world.finished(checks[fresh].now_ns);
    if unseen && !empty(busy[0]) {
        return false;
    }
    (0..busy.len()).all(|at| {
        let given = busy[..=at].iter().rposition(|check| empty(check)).unwrap_or(0);
        let request = world.running(busy[given].now_ns).expect("the lane was busy");
        let shared_ns = busy[at].now_ns - world.requests[request].started_ns;
        let (budget_ns, lost, of) = budget(busy[at]);
        // Times are whole nanoseconds: the next nanosecond must still be within the budget.
        (shared_ns + 1) * lost <= budget_ns * of
    })
}

/// How long the batch thread really ran while each request did.
fn shared_ns(world: &World, checks: &[Check]) -> Vec<u64> {
    let overlap = |r: &Request, from: &Check, to: &Check| match from.verdict {
        Verdict::Nap => 0,
        Verdict::Run => to.now_ns.min(r.ended_ns).saturating_sub(from.now_ns.max(r.started_ns)),
    };
    let of = |r: &Request| checks.windows(2).map(|pair| overlap(r, &pair[0], &pair[1])).sum();
    world.requests.iter().map(of).collect()
}

/// The policy's own limit on sharing with one request.
fn most_shared_ns(policy: &Policy) -> u64 {
    match *policy {
        Policy::BorrowIdle => 0,
        Policy::DynamicBudget { budget_ns, ref_ipc_milli: 1.. } => budget_ns * RATIO_MAX,
        Policy::FixedBudget { budget_ns }
        | Policy::RefreshBudget { budget_ns }
        | Policy::DynamicBudget { budget_ns, .. }
        | Policy::SloBudget { budget_ns, .. } => budget_ns,
    }
}

fn worlds() -> impl Strategy<Value = World> {
    let arrivals = prop::collection::vec((0u64..60, 1u64..40), 1..25);
    (arrivals, 0u64..6).prop_map(|(arrivals, wake_ns)| World::new(&arrivals, wake_ns))
}

fn policies() -> impl Strategy<Value = Policy> {
    let budgets = 0u64..50;
    prop_oneof![
        Just(Policy::BorrowIdle),
        budgets.clone().prop_map(|budget_ns| Policy::FixedBudget { budget_ns }),
        budgets.clone().prop_map(|budget_ns| Policy::RefreshBudget { budget_ns }),
        (budgets, prop::sample::select(&[0, 1600][..])).prop_map(|(budget_ns, ref_ipc_milli)| {
            Policy::DynamicBudget { budget_ns, ref_ipc_milli }
        }),
    ]
}

fn gaps() -> impl Strategy<Value = Vec<(u64, Option<u64>)>> {
    prop::collection::vec((1u64..12, prop::option::of(0u64..2000)), 1..20)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// Every verdict equals the oracle's, for dense and sparse checks, short and long requests,
    /// bursts and quiet times.
    #[test]
    fn every_verdict_follows_from_the_history(
        world in worlds(), policy in policies(), gaps in gaps(), stretch in 1u64..30,
    ) {
        let gaps: Vec<_> = gaps.iter().map(|&(gap_ns, ipc)| (gap_ns * stretch, ipc)).collect();
        let checks = checks(&world, &policy, &gaps);
        for upto in 1..=checks.len() {
            let expected = oracle(&world, &policy, &checks[..upto]);
            prop_assert_eq!(checks[upto - 1].verdict, expected, "check {} of {:?}", upto, &checks);
        }
    }

    /// Sharing ends at most one check interval after the budget. Under `fixed-budget`, no check
    /// that sees a request that waited lets the batch run.
    #[test]
    fn no_request_is_shared_for_longer_than_the_budget(
        world in worlds(), policy in policies(), gaps in gaps(),
    ) {
        let checks = checks(&world, &policy, &gaps);
        let gap_ns = gaps.iter().map(|&(gap_ns, _)| gap_ns).max().unwrap_or(0);
        let most_ns = most_shared_ns(&policy);
        for (request, shared_ns) in shared_ns(&world, &checks).into_iter().enumerate() {
            let within = shared_ns <= most_ns + gap_ns;
            prop_assert!(within, "{} shared for {}: {:?}", request, shared_ns, checks);
        }
        for check in checks.iter().filter(|check| check.verdict == Verdict::Run) {
            let running = world.running(check.now_ns);
            prop_assert!(policy != Policy::BorrowIdle || running.is_none());
            if let (Policy::FixedBudget { .. }, Some(request)) = (policy, running) {
                prop_assert!(!world.waited(request), "{request} waited: {check:?}");
            }
        }
    }
}
