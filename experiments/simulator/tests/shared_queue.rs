//! Checks requests of two cores that share a queue, one by one.

use elfen_rt::policy::Policy;
use simulator::pair::{Batch, Control, Polling, Signal};
use simulator::source::{Requests, Until};
use simulator::time::MS;
use simulator::trace::Served;
use simulator::{Model, Queue};

const CHECK_NS: u64 = 100;

/// A batch that does not slow requests and polls often. So all times are those of the trace.
const BATCH: Batch = Batch {
    request_slowdown_milli: 1000,
    batch_slowdown_milli: 1000,
    nap_slowdown_milli: 1000,
    polling: Polling::Checks { every_ns: CHECK_NS },
    signal: Signal::Service,
    sleep_ns: 0,
    wake_ns: 0,
    ipc_after_ns: 0,
};

fn serve(trace: &[(u64, u64)], policy: Policy) -> Vec<Served> {
    let model = Model {
        machines: 1,
        cores: 2,
        queue: Queue::Shared,
        requests: Requests::Trace(trace.into()),
        until: Until::Requests(1),
        batch: BATCH,
        control: Control::Policy(policy),
        watch: None,
        seed: 0,
    };
    let mut all = Vec::new();
    model.run_into(&mut |served: &Served| all.push(*served));
    all.sort_unstable_by_key(|served| served.started_ns);
    all
}

/// Goal: `refresh-budget` lends a request a new budget, counted from its start, when another core
/// drains the queue. Before that, the request shares its core for the rest of an earlier budget.
/// Method: the third request starts at 10 ms with the fourth behind it. The other core takes the
/// fourth half a millisecond later.
#[test]
fn a_queue_that_another_core_drains() {
    let trace = [(MS, 10 * MS), (MS + 1, 10 * MS + MS / 2), (2 * MS, 100 * MS), (3 * MS, MS)];
    let budget_ns = 12 * MS;
    let third = |policy| serve(&trace, policy)[2];
    let alone = third(Policy::BorrowIdle);
    assert_eq!((alone.core, alone.arrived_ns, alone.started_ns), (0, 2 * MS, 11 * MS));
    assert_eq!(alone.overlapped_ns, 0);
    // The request waited, so fixed-budget lends nothing to it.
    assert!(third(Policy::FixedBudget { budget_ns }).overlapped_ns < CHECK_NS + 1);
    let shared_ns = third(Policy::RefreshBudget { budget_ns }).overlapped_ns;
    assert!((budget_ns..budget_ns + 2 * CHECK_NS).contains(&shared_ns), "{shared_ns}");
    // With requests that keep the queue filled, only the rest of the first request's budget is
    // left: 2 ms.
    let fifth = [&trace[..], &[(3 * MS, MS)]].concat();
    let served = serve(&fifth, Policy::RefreshBudget { budget_ns });
    assert!(served[2].overlapped_ns > budget_ns - MS, "drained by the fourth's end");
    let crowd: Vec<(u64, u64)> = trace[..3].iter().copied().chain([(3 * MS, 90 * MS); 2]).collect();
    let left_ns = serve(&crowd, Policy::RefreshBudget { budget_ns })[2].overlapped_ns;
    assert!((2 * MS..2 * MS + 2 * CHECK_NS).contains(&left_ns), "{left_ns}");
}

/// Goal: the core that has idled for the longest time takes the next request. Method: four short
/// requests.
#[test]
fn idle_cores_take_turns() {
    let trace = [(MS, 10), (2 * MS, 10), (3 * MS, 10), (4 * MS, 10)];
    let cores: Vec<u64> = serve(&trace, Policy::BorrowIdle).iter().map(|s| s.core).collect();
    assert_eq!(cores, [0, 1, 0, 1]);
}
