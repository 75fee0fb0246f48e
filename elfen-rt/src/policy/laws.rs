//! What holds for every policy whatever the lane says: order between policies and budgets, and no
//! panic.
//!
//! The lanes here make no sense on purpose (requests from nowhere, clocks that jump), because
//! another process writes them. Sensible ones, and what each rule means for them, stand in
//! `history`.

use std::vec::Vec;

use proptest::prelude::*;

use super::{Lane, Policy, Service, State, Verdict};

/// Mostly small numbers, so that they meet; sometimes any.
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

fn lanes() -> impl Strategy<Value = Lane> {
    let service = prop::option::weighted(0.95, services());
    (any::<bool>(), service, prop::option::of(words()))
        .prop_map(|(busy, service, ipc_milli)| Lane { busy, service, ipc_milli })
}

fn looks() -> impl Strategy<Value = Vec<(u64, Lane)>> {
    prop::collection::vec((words(), lanes()), 0..40)
}

fn verdicts(policy: Policy, looks: &[(u64, Lane)]) -> Vec<Verdict> {
    let mut state = State::default();
    let check = |&(now_ns, ref lane): &(u64, Lane)| {
        let verdict;
        (state, verdict) = policy.check(state, lane, now_ns);
        verdict
    };
    looks.iter().map(check).collect()
}

/// Wherever `less` runs, `more` runs.
fn borrows_no_more(less: &[Verdict], more: &[Verdict]) -> bool {
    less.iter().zip(more).all(|pair| pair != (&Verdict::Run, &Verdict::Nap))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn a_larger_budget_never_borrows_less(
        looks in looks(), budgets in (words(), words()),
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
            let less = verdicts(kind(small, ref_ipc_milli, until_ns), &looks);
            prop_assert!(borrows_no_more(&less, &verdicts(policy, &looks)), "{policy:?}");
        }
    }

    /// An IPC closer to the reference is headroom: pointwise higher counters, no check less.
    #[test]
    fn a_request_that_suffers_less_never_means_less_borrowing(
        looks in looks(), raises in prop::collection::vec(0u64..50, 40),
        budget_ns in words(), ref_ipc_milli in words(),
    ) {
        let policy = Policy::DynamicBudget { budget_ns, ref_ipc_milli };
        let raise = |(&(now_ns, lane), by): (&(u64, Lane), &u64)| {
            let ipc_milli = lane.ipc_milli.map(|ipc| ipc.saturating_add(*by));
            (now_ns, Lane { ipc_milli, ..lane })
        };
        let raised: Vec<_> = looks.iter().zip(&raises).map(raise).collect();
        prop_assert!(borrows_no_more(&verdicts(policy, &looks), &verdicts(policy, &raised)));
    }

    /// From the most careful to the boldest: each runs wherever the one before it runs.
    #[test]
    fn the_policies_are_ordered(looks in looks(), budget_ns in words(), ref_ipc_milli in words()) {
        let bolder = [
            Policy::BorrowIdle,
            Policy::FixedBudget { budget_ns },
            Policy::RefreshBudget { budget_ns },
            Policy::DynamicBudget { budget_ns, ref_ipc_milli },
        ];
        for pair in bolder.windows(2) {
            let (less, more) = (verdicts(pair[0], &looks), verdicts(pair[1], &looks));
            prop_assert!(borrows_no_more(&less, &more), "{pair:?}");
        }
    }

    /// A budget of 0, one that ran out, and a service that publishes nothing: all the same as
    /// mutual exclusion.
    #[test]
    fn without_a_budget_or_a_service_it_is_borrow_idle(looks in looks(), budget_ns in words()) {
        let exclusion = verdicts(Policy::BorrowIdle, &looks);
        for spent in [
            Policy::FixedBudget { budget_ns: 0 },
            Policy::RefreshBudget { budget_ns: 0 },
            Policy::SloBudget { budget_ns, until_ns: 0 },
        ] {
            prop_assert_eq!(&verdicts(spent, &looks), &exclusion);
        }
        let silent: Vec<_> =
            looks.iter().map(|&(now_ns, lane)| (now_ns, Lane { service: None, ..lane })).collect();
        let boldest = Policy::DynamicBudget { budget_ns, ref_ipc_milli: 1 };
        prop_assert_eq!(&verdicts(boldest, &silent), &exclusion);
        for ((_, lane), verdict) in looks.iter().zip(exclusion) {
            prop_assert_eq!(verdict == Verdict::Run, !lane.busy);
        }
    }

    /// Until the deadline nothing changes the verdict but the lane; at the deadline it is over.
    #[test]
    fn the_deadline_is_the_first_moment_that_naps(
        looks in looks(), budget_ns in 1u64..200,
        ref_ipc_milli in words(), until_ns in words(), dynamic: bool,
    ) {
        let policy = if dynamic {
            Policy::DynamicBudget { budget_ns, ref_ipc_milli }
        } else {
            Policy::SloBudget { budget_ns, until_ns }
        };
        let mut state = State::default();
        for (now_ns, lane) in looks {
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

    /// The state goes through shared memory unchanged, and whatever is found there is a state.
    #[test]
    fn a_state_is_four_words(looks in looks(), words: [u64; 4], budget_ns in words()) {
        let mut state = State::from(words);
        for (now_ns, lane) in looks {
            prop_assert_eq!(State::from(<[u64; 4]>::from(state)), state);
            (state, _) = Policy::RefreshBudget { budget_ns }.check(state, &lane, now_ns);
        }
    }
}

/// Figure 5.9, step by step: the states and verdicts of one request that outlives its budget.
#[test]
fn one_request_from_idle_to_idle() {
    let policy = Policy::FixedBudget { budget_ns: 10 };
    let lane = |busy: bool, queue_len| Lane {
        busy,
        service: Some(Service {
            queue_len,
            running_request: u64::from(busy) * 7,
            request_started_ns: 0,
            finished: 3,
        }),
        ipc_milli: None,
    };
    let fresh = |idle_ns| State::Fresh { idle_ns, finished: 3 };
    let sharing = State::Sharing { request: 7, since_ns: 105, finished: 3 };
    let story = [
        (90, lane(true, 0), State::Spent, Verdict::Nap),
        (95, lane(false, 1), State::Spent, Verdict::Run),
        (100, lane(false, 0), fresh(100), Verdict::Run),
        (103, lane(false, 1), fresh(100), Verdict::Run),
        (105, lane(true, 0), sharing, Verdict::Run),
        (114, lane(true, 5), sharing, Verdict::Run),
        (115, lane(true, 0), State::Spent, Verdict::Nap),
        (120, lane(false, 0), fresh(120), Verdict::Run),
    ];
    let mut state = State::default();
    for (now_ns, lane, next, verdict) in story {
        let decided = policy.check(state, &lane, now_ns);
        assert_eq!(decided, (next, verdict), "at {now_ns}");
        state = decided.0;
    }
}
