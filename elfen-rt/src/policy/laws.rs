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

    /// How many wait does not matter, only whether any do: the simulator counts on it.
    #[test]
    fn a_queue_is_empty_or_not(looks in looks(), budget_ns in words()) {
        let one = |&(now_ns, lane): &(u64, Lane)| {
            let shorten = |service: Service| Service { queue_len: service.queue_len.min(1), ..service };
            (now_ns, Lane { service: lane.service.map(shorten), ..lane })
        };
        let short: Vec<_> = looks.iter().map(one).collect();
        for policy in [Policy::FixedBudget { budget_ns }, Policy::RefreshBudget { budget_ns }] {
            prop_assert_eq!(verdicts(policy, &looks), verdicts(policy, &short));
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

/// One look and what must follow: time, busy, queue, request, start, finished; the new state and
/// the verdict.
type Step = (u64, bool, u64, u64, u64, u64, State, Verdict);

fn tell(policy: Policy, story: &[Step]) {
    let mut state = State::default();
    for &(now_ns, busy, queue_len, running_request, request_started_ns, finished, next, verdict) in
        story
    {
        let service = Service { queue_len, running_request, request_started_ns, finished };
        let lane = Lane { busy, service: Some(service), ipc_milli: None };
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

/// Figure 5.9(b), step by step: one request that outlives its budget; its start is not published.
#[test]
fn one_request_from_idle_to_idle() {
    tell(
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

/// A kernel thread, then a request, then the worker between two requests, then the next: only a
/// request with another name, or one after another count, is another request.
#[test]
fn a_busy_lane_without_a_request() {
    let begin = [
        (100, false, 0, 0, 0, 3, fresh(100, 3), Verdict::Run),
        (101, true, 0, 0, 50, 3, sharing(0, 101, 3), Verdict::Run),
        (102, true, 0, 7, 102, 3, sharing(7, 101, 3), Verdict::Run),
        (103, true, 0, 0, 102, 4, sharing(7, 101, 3), Verdict::Run),
    ];
    let another = [(104, true, 0, 8, 104, 4, State::Spent, Verdict::Nap)];
    tell(Policy::FixedBudget { budget_ns: 10 }, &[&begin[..], &another].concat());
    let another = [(104, true, 0, 8, 104, 3, State::Spent, Verdict::Nap)];
    tell(Policy::FixedBudget { budget_ns: 10 }, &[&begin[..3], &another].concat());
    let another = [(104, true, 0, 8, 104, 3, sharing(8, 104, 3), Verdict::Run)];
    tell(Policy::RefreshBudget { budget_ns: 10 }, &[&begin[..3], &another].concat());
    let another = [(104, true, 1, 8, 104, 3, sharing(7, 101, 3), Verdict::Run)];
    tell(Policy::RefreshBudget { budget_ns: 10 }, &[&begin[..3], &another].concat());
}

/// A start from before the lane idled is the last request's; one from the future is broken.
#[test]
fn a_start_that_cannot_be() {
    for (started_ns, since_ns) in [(40, 100), (107, 105)] {
        tell(
            Policy::FixedBudget { budget_ns: 10 },
            &[
                (100, false, 0, 0, 0, 3, fresh(100, 3), Verdict::Run),
                (105, true, 0, 7, started_ns, 3, sharing(7, since_ns, 3), Verdict::Run),
            ],
        );
    }
}
