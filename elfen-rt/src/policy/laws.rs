//! Laws that hold for every policy on any lane: the order of policies and budgets, and no panic.
//!
//! The samples here are arbitrary on purpose (requests without a start, clocks that jump), because
//! other processes write them. Module `history` tests the rules on plausible samples.

use std::vec::Vec;

use proptest::prelude::*;

use super::{Policy, Sample, Service, State, Verdict};

/// Mostly small numbers, so that equal ones are frequent; sometimes any number.
fn words() -> impl Strategy<Value = u64> {
    prop_oneof![8 => 0u64..4, 4 => 0u64..100, 1 => any::<u64>(), 1 => Just(u64::MAX)]
}

fn services() -> impl Strategy<Value = Service> {
    let words = (words(), words(), words(), words());
    words.prop_map(|(queue_len, running_request, request_started_ns, finished)| Service {
        queue_len,
        running_request,
        request_started_ns,
        finished,
    })
}

fn lanes() -> impl Strategy<Value = Sample> {
    let service = prop::option::weighted(0.95, services());
    let (since, ipc) = (prop::option::of(words()), prop::option::of(words()));
    (any::<bool>(), since, service, ipc).prop_map(|(busy, busy_since_ns, service, ipc_milli)| {
        Sample { busy, busy_since_ns, service, ipc_milli }
    })
}

fn checks() -> impl Strategy<Value = Vec<(u64, Sample)>> {
    prop::collection::vec((words(), lanes()), 0..40)
}

fn verdicts(policy: Policy, checks: &[(u64, Sample)]) -> Vec<Verdict> {
    let mut state = State::default();
    let check = |&(now_ns, ref lane): &(u64, Sample)| {
        let verdict;
        (state, verdict) = policy.check(state, lane, now_ns);
        verdict
    };
    checks.iter().map(check).collect()
}

/// Whether `more` runs wherever `less` runs.
fn borrows_no_more(less: &[Verdict], more: &[Verdict]) -> bool {
    less.iter().zip(more).all(|pair| pair != (&Verdict::Run, &Verdict::Nap))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn a_larger_budget_never_borrows_less(
        checks in checks(), budgets in (words(), words()),
        ref_ipc_milli in words(), until_ns in words(),
    ) {
        let (small, large) = (budgets.0.min(budgets.1), budgets.0.max(budgets.1));
        let kinds: [fn(u64, u64, u64) -> Policy; 4] = [
            |budget_ns, _, _| Policy::FixedBudget { budget_ns },
            |budget_ns, _, _| Policy::RefreshBudget { budget_ns },
            |budget_ns, ref_ipc_milli, _| Policy::DynamicBudget { budget_ns, ref_ipc_milli },
            |budget_ns, _, until_ns| Policy::SloBudget { budget_ns, until_ns },
        ];
        for kind in kinds {
            let policy = kind(large, ref_ipc_milli, until_ns);
            let less = verdicts(kind(small, ref_ipc_milli, until_ns), &checks);
            prop_assert!(borrows_no_more(&less, &verdicts(policy, &checks)), "{policy:?}");
        }
    }

    /// With a higher IPC at each check, the batch runs at no fewer checks.
    #[test]
    fn a_request_that_slows_down_less_never_means_less_borrowing(
        checks in checks(), raises in prop::collection::vec(0u64..50, 40),
        budget_ns in words(), ref_ipc_milli in words(),
    ) {
        let policy = Policy::DynamicBudget { budget_ns, ref_ipc_milli };
        let raise = |(&(now_ns, lane), by): (&(u64, Sample), &u64)| {
            let ipc_milli = lane.ipc_milli.map(|ipc| ipc.saturating_add(*by));
            (now_ns, Sample { ipc_milli, ..lane })
        };
        let raised: Vec<_> = checks.iter().zip(&raises).map(raise).collect();
        prop_assert!(borrows_no_more(&verdicts(policy, &checks), &verdicts(policy, &raised)));
    }

    /// From the most careful policy to the boldest: each runs wherever the one before it runs, as
    /// long as a service publishes. (Without a service, only `fixed-budget` gives a budget.)
    #[test]
    fn the_policies_are_ordered(
        checks in checks(), budget_ns in words(), ref_ipc_milli in words(),
    ) {
        let published = |(_, lane): &(u64, Sample)| lane.service.is_some();
        let checks: Vec<_> = checks.into_iter().filter(published).collect();
        let bolder = [
            Policy::BorrowIdle,
            Policy::FixedBudget { budget_ns },
            Policy::RefreshBudget { budget_ns },
            Policy::DynamicBudget { budget_ns, ref_ipc_milli },
        ];
        for pair in bolder.windows(2) {
            let (less, more) = (verdicts(pair[0], &checks), verdicts(pair[1], &checks));
            prop_assert!(borrows_no_more(&less, &more), "{pair:?}");
        }
    }

    /// After a verdict to nap, no check lets the thread run before a check finds the lane idle.
    #[test]
    fn a_nap_lasts_until_the_lane_idles(
        checks in checks(), budget_ns in words(), ref_ipc_milli in words(), until_ns in words(),
    ) {
        for policy in [
            Policy::BorrowIdle,
            Policy::FixedBudget { budget_ns },
            Policy::RefreshBudget { budget_ns },
            Policy::DynamicBudget { budget_ns, ref_ipc_milli },
            Policy::SloBudget { budget_ns, until_ns },
        ] {
            let verdicts = verdicts(policy, &checks);
            for (at, pair) in verdicts.windows(2).enumerate() {
                let woken = pair == [Verdict::Nap, Verdict::Run];
                prop_assert!(!woken || !checks[at + 1].1.busy, "{policy:?} at {}", at + 1);
            }
        }
    }

    /// A budget of 0, an expired budget, and a service that publishes nothing are all the same as
    /// mutual exclusion.
    #[test]
    fn without_a_budget_or_a_service_it_is_borrow_idle(checks in checks(), budget_ns in words()) {
        let exclusion = verdicts(Policy::BorrowIdle, &checks);
        for spent in [
            Policy::FixedBudget { budget_ns: 0 },
            Policy::RefreshBudget { budget_ns: 0 },
            Policy::SloBudget { budget_ns, until_ns: 0 },
        ] {
            prop_assert_eq!(&verdicts(spent, &checks), &exclusion);
        }
        let alone = |&(now_ns, lane)| (now_ns, Sample { service: None, ..lane });
        let silent: Vec<_> = checks.iter().map(alone).collect();
        let boldest = Policy::DynamicBudget { budget_ns, ref_ipc_milli: 1 };
        prop_assert_eq!(&verdicts(boldest, &silent), &exclusion);
        for ((_, lane), verdict) in checks.iter().zip(exclusion) {
            prop_assert_eq!(verdict == Verdict::Run, !lane.busy);
        }
    }

    /// Until the deadline, only a change of the lane changes the verdict. At the deadline the
    /// verdict is to nap.
    #[test]
    fn the_deadline_is_the_first_moment_that_naps(
        checks in checks(), budget_ns in 1u64..200,
        ref_ipc_milli in words(), until_ns in words(), dynamic: bool,
    ) {
        let policy = if dynamic {
            Policy::DynamicBudget { budget_ns, ref_ipc_milli }
        } else {
            Policy::SloBudget { budget_ns, until_ns }
        };
        let mut state = State::default();
        for (now_ns, lane) in checks {
            let verdict;
            (state, verdict) = policy.check(state, &lane, now_ns);
            if !lane.busy || verdict == Verdict::Nap {
                continue;
            }
            let deadline_ns = policy.deadline_ns(state, &lane, now_ns).expect("the lane is shared");
            if deadline_ns == u64::MAX {
                continue; // after the end of time
            }
            prop_assert!(deadline_ns > now_ns);
            prop_assert_eq!(policy.check(state, &lane, deadline_ns - 1).1, Verdict::Run);
            prop_assert_eq!(policy.check(state, &lane, deadline_ns).1, Verdict::Nap);
        }
    }

    /// Only whether requests wait matters, and not how many. The simulator relies on this.
    #[test]
    fn a_queue_is_empty_or_not(checks in checks(), budget_ns in words()) {
        let one = |&(now_ns, lane): &(u64, Sample)| {
            let shorten = |mut service: Service| {
                service.queue_len = service.queue_len.min(1);
                service
            };
            (now_ns, Sample { service: lane.service.map(shorten), ..lane })
        };
        let short: Vec<_> = checks.iter().map(one).collect();
        for policy in [Policy::FixedBudget { budget_ns }, Policy::RefreshBudget { budget_ns }] {
            prop_assert_eq!(verdicts(policy, &checks), verdicts(policy, &short));
        }
    }

    /// The state survives shared memory unchanged, and any words there are a state.
    #[test]
    fn a_state_is_four_words(checks in checks(), words: [u64; 4], budget_ns in words()) {
        let mut state = State::from(words);
        for (now_ns, lane) in checks {
            prop_assert_eq!(State::from(<[u64; 4]>::from(state)), state);
            (state, _) = Policy::RefreshBudget { budget_ns }.check(state, &lane, now_ns);
        }
    }
}

/// One check and its expected outcome: time, busy, queue, request, start, finished; the new state
/// and the verdict.
type Step = (u64, bool, u64, u64, u64, u64, State, Verdict);

fn expect_steps(policy: Policy, steps: &[Step]) {
    let mut state = State::default();
    for &(now_ns, busy, queue_len, running_request, request_started_ns, finished, next, verdict) in
        steps
    {
        let service = Service { queue_len, running_request, request_started_ns, finished };
        let lane = Sample { busy, busy_since_ns: None, service: Some(service), ipc_milli: None };
        let decided = policy.check(state, &lane, now_ns);
        assert_eq!(decided, (next, verdict), "{policy:?} at {now_ns}");
        state = decided.0;
    }
}

fn fresh(idle_ns: u64, finished: u64) -> State {
    State::Fresh { idle_ns, finished }
}

fn sharing(request: u64, since_ns: u64, finished: u64) -> State {
    State::Sharing { request, since_ns, finished }
}

/// Figure 5.9(b), step by step: one request that outlasts its budget. Its start is not published.
#[test]
fn one_request_from_idle_to_idle() {
    expect_steps(
        Policy::FixedBudget { budget_ns: 10 },
        &[
            (90, true, 0, 6, 0, 2, State::Spent, Verdict::Nap),
            (95, false, 1, 0, 0, 3, State::Spent, Verdict::Run),
            (100, false, 0, 0, 0, 3, fresh(100, 3), Verdict::Run),
            (103, false, 1, 0, 0, 3, fresh(100, 3), Verdict::Run),
            (105, true, 0, 7, 0, 3, sharing(7, 105, 3), Verdict::Run),
            (114, true, 5, 7, 0, 3, sharing(7, 105, 3), Verdict::Run),
            (115, true, 0, 7, 0, 3, State::Spent, Verdict::Nap),
            (120, false, 0, 0, 0, 4, fresh(120, 4), Verdict::Run),
        ],
    );
}

/// The lane runs a kernel thread, a request, the worker between two requests, and the next request.
/// Only another id, or another finished count, makes a request a new one.
#[test]
fn a_busy_lane_without_a_request() {
    let begin = [
        (100, false, 0, 0, 0, 3, fresh(100, 3), Verdict::Run),
        (101, true, 0, 0, 50, 3, sharing(0, 101, 3), Verdict::Run),
        (102, true, 0, 7, 102, 3, sharing(7, 101, 3), Verdict::Run),
        (103, true, 0, 0, 102, 4, sharing(7, 101, 3), Verdict::Run),
    ];
    let another = [(104, true, 0, 8, 104, 4, State::Spent, Verdict::Nap)];
    expect_steps(Policy::FixedBudget { budget_ns: 10 }, &[&begin[..], &another].concat());
    let another = [(104, true, 0, 8, 104, 3, State::Spent, Verdict::Nap)];
    expect_steps(Policy::FixedBudget { budget_ns: 10 }, &[&begin[..3], &another].concat());
    let another = [(104, true, 0, 8, 104, 3, sharing(8, 104, 3), Verdict::Run)];
    expect_steps(Policy::RefreshBudget { budget_ns: 10 }, &[&begin[..3], &another].concat());
    let another = [(104, true, 1, 8, 104, 3, sharing(7, 101, 3), Verdict::Run)];
    expect_steps(Policy::RefreshBudget { budget_ns: 10 }, &[&begin[..3], &another].concat());
}

/// A start from before the lane idled belongs to the last request. A start in the future is
/// invalid.
#[test]
fn a_start_that_cannot_be() {
    for (started_ns, since_ns) in [(40, 100), (107, 105)] {
        expect_steps(
            Policy::FixedBudget { budget_ns: 10 },
            &[
                (100, false, 0, 0, 0, 3, fresh(100, 3), Verdict::Run),
                (105, true, 0, 7, started_ns, 3, sharing(7, since_ns, 3), Verdict::Run),
            ],
        );
    }
}

/// Without a service, each busy period has one budget, from its beginning. This includes a period
/// that began between two checks.
#[test]
fn a_busy_period_has_one_budget() {
    let policy = Policy::FixedBudget { budget_ns: 10 };
    let mut state = State::default();
    let steps = [
        (90, Some(80), Verdict::Nap, State::Spent),
        (100, None, Verdict::Run, fresh(100, 0)),
        (106, Some(103), Verdict::Run, sharing(0, 103, 0)),
        (112, Some(103), Verdict::Run, sharing(0, 103, 0)),
        // The lane idled at 114, and no check saw that.
        (118, Some(115), Verdict::Run, sharing(0, 115, 0)),
        (125, Some(115), Verdict::Nap, State::Spent),
        (130, Some(128), Verdict::Nap, State::Spent),
        (140, None, Verdict::Run, fresh(140, 0)),
        // Busy since before the lane was seen idle: the clocks of two CPUs differ.
        (145, Some(120), Verdict::Run, sharing(0, 140, 0)),
    ];
    for (now_ns, busy_since_ns, verdict, next) in steps {
        let busy = busy_since_ns.is_some();
        let lane = Sample { busy, busy_since_ns, service: None, ipc_milli: None };
        let decided = policy.check(state, &lane, now_ns);
        assert_eq!(decided, (next, verdict), "at {now_ns}");
        state = decided.0;
    }
}
