//! Tests of single decisions. The tests of the simulator cover whole runs.

use super::Server::{Backup, Primary};
use super::*;

const MS: u64 = 1_000_000;

/// A policy with an unlimited budget.
fn hedge(policy: Policy) -> Hedge {
    Hedge::new(policy, 1_000_000)
}

fn free(_: Server) -> bool {
    true
}

#[test]
fn a_server_that_stands_still_is_left() {
    let mut hedge = hedge(Policy::Look);
    assert_eq!(hedge.begin(1, 0, true), Primary);
    assert_eq!(hedge.sample(MS, [false; 2], free), [], "the first look knows nothing");
    assert_eq!(hedge.begin(2, MS + 1, true), Primary);
    let both = [Duplicate { id: 1, to: Backup }, Duplicate { id: 2, to: Backup }];
    assert_eq!(hedge.sample(2 * MS, [false, false], free), both);
    assert_eq!(hedge.begin(3, 2 * MS, true), Backup, "new requests follow");
    assert_eq!(hedge.sample(3 * MS, [false, true], free), [], "nothing is sent three times");
    hedge.answered(1, 3 * MS, Backup);
    hedge.answered(2, 3 * MS, Primary);
    hedge.answered(3, 3 * MS, Backup);
    let expected =
        Counts { requests: 3, duplicates: 2, won_by_backup: 1, swaps: 1, ..Counts::default() };
    assert_eq!(hedge.counts(), expected);
}

/// A long request takes as long at the other server. A server without requests need not run. A
/// backup that stands still as well does not help.
#[test]
fn a_server_that_works_is_left_to_work() {
    let mut hedge = hedge(Policy::Look);
    hedge.sample(0, [false; 2], free);
    assert_eq!(hedge.sample(MS, [false; 2], free), [], "idle");
    hedge.begin(1, MS, true);
    assert_eq!(hedge.sample(2 * MS, [true, false], free), [], "works");
    assert_eq!(hedge.sample(3 * MS, [false, false], |server| server == Primary), [], "held");
    hedge.begin(2, 3 * MS + 1, true);
    hedge.answered(1, 3 * MS + 2, Primary);
    assert_eq!(hedge.sample(4 * MS, [false, false], free), [], "it may not have been there yet");
    assert_eq!((hedge.counts().swaps, hedge.counts().duplicates), (0, 0));
}

#[test]
fn duplicates_follow_the_time_limit_and_the_method() {
    let mut hedge = hedge(Policy::After(2 * MS));
    hedge.begin(1, 0, true);
    hedge.begin(2, 0, false);
    assert_eq!(hedge.take_due(2 * MS - 1), []);
    assert_eq!(hedge.take_due(2 * MS), [Duplicate { id: 1, to: Backup }]);
    assert_eq!(hedge.take_due(3 * MS), [], "once");
    assert_eq!(hedge.sample(3 * MS, [false; 2], free), []);
}

#[test]
fn the_p95_is_of_recent_answers() {
    let mut hedge = hedge(Policy::AfterP95);
    for id in 0..200 {
        assert_eq!(hedge.delay_ns().is_some(), id >= 100, "{id}");
        hedge.begin(id, 0, true);
        hedge.answered(id, (id % 100 + 1) * MS, Primary);
    }
    assert_eq!(hedge.delay_ns(), Some(95 * MS));
}

/// Goal: requests go to the server that does not stand still, even if a halted backup continues
/// later. A restarted server gets none. Method: overlapping halts.
#[test]
fn a_halt_sends_requests_to_the_other() {
    let mut hedge = hedge(Policy::Hazard);
    hedge.begin(1, 0, true);
    assert_eq!(hedge.set_halted(Primary, Halt::Pause, true), [Duplicate { id: 1, to: Backup }]);
    assert_eq!(hedge.begin(2, 1, true), Backup);
    assert_eq!(hedge.set_halted(Backup, Halt::Stop, true), [], "both stand");
    assert_eq!(hedge.set_halted(Primary, Halt::Stop, true), []);
    assert_eq!(hedge.set_halted(Primary, Halt::Pause, false), [], "it is stopped as well");
    let back = [Duplicate { id: 2, to: Primary }];
    assert_eq!(hedge.set_halted(Primary, Halt::Stop, false), back, "the first that goes on");
    assert_eq!(hedge.begin(3, 2, true), Primary);
    assert_eq!(hedge.set_halted(Backup, Halt::Stop, false), []);
    hedge.set_cold(Backup);
    assert_eq!(hedge.set_halted(Primary, Halt::Pause, true), [], "the other is cold");
    hedge.set_warm(Backup);
    assert_eq!(hedge.set_halted(Primary, Halt::Pause, true), [Duplicate { id: 3, to: Backup }]);
    hedge.set_cold(Backup);
    assert_eq!(hedge.begin(4, 3, true), Primary);
    let counts = hedge.counts();
    assert_eq!((counts.duplicates, counts.swaps), (3, 4));
}

#[test]
fn a_dead_server_is_left_and_costs_no_budget() {
    let mut hedge = Hedge::new(Policy::Look, 0);
    assert_eq!(hedge.begin(1, 0, false), Primary);
    hedge.set_cold(Primary);
    hedge.set_cold(Primary);
    hedge.moved(1, Backup);
    assert_eq!(hedge.begin(2, 0, true), Backup);
    hedge.answered(1, MS, Backup);
    let counts = hedge.counts();
    assert_eq!((counts.swaps, counts.duplicates, counts.won_by_backup), (1, 0, 0));
}

/// Goal: a server that is down gets no duplicates. If both are down, the first server that returns
/// gets new requests. Method: servers that become cold and warm in turn.
#[test]
fn requests_go_to_the_server_that_is_back() {
    let mut hedge = hedge(Policy::After(MS));
    hedge.set_cold(Backup);
    hedge.begin(1, 0, true);
    assert_eq!(hedge.take_due(MS), [], "the backup is down");
    hedge.set_cold(Primary);
    assert_eq!(hedge.begin(2, MS, true), Primary, "neither is better");
    hedge.set_warm(Backup);
    assert_eq!(hedge.begin(3, MS, true), Backup);
    hedge.set_warm(Primary);
    assert_eq!((hedge.begin(4, MS, true), hedge.counts().swaps), (Backup, 1));
}

/// Goal: a request that a server dropped is retried once, within the budget of duplicates. Method:
/// a budget for one retry, and requests that must not be repeated.
#[test]
fn a_dropped_request_is_retried_once() {
    let mut hedge = Hedge::new(Policy::After(MS), 250_000);
    for id in 0..4 {
        hedge.begin(id, 0, id != 0);
    }
    assert!(!hedge.retry(0, Backup), "its method may not be repeated");
    assert!(hedge.retry(1, Backup) && !hedge.retry(1, Primary), "once");
    assert!(!hedge.retry(2, Backup), "the budget is spent");
    assert_eq!(hedge.take_due(MS), [], "also for duplicates");
    hedge.answered(1, MS, Backup);
    let counts = hedge.counts();
    assert_eq!((counts.retries, counts.duplicates, counts.won_by_backup), (1, 0, 0));
    assert_eq!(counts.refused_by_budget, 2);
    assert!(!hedge.retry(1, Backup), "it has its answer");
}

/// Goal: a decision that was not carried out is not counted, and its budget is available again.
/// Method: a budget for one duplicate, decided for a server that has just failed.
#[test]
fn a_duplicate_that_is_not_sent_costs_nothing() {
    let mut hedge = Hedge::new(Policy::After(MS), 500_000);
    for id in 0..2 {
        hedge.begin(id, 0, true);
    }
    assert_eq!(hedge.take_due(MS), [Duplicate { id: 0, to: Backup }]);
    assert_eq!((hedge.counts().duplicates, hedge.counts().refused_by_budget), (1, 1));
    hedge.not_sent(0);
    hedge.not_sent(1);
    assert_eq!(hedge.counts().duplicates, 0);
    hedge.answered(1, MS, Primary);
    assert_eq!(hedge.take_due(2 * MS), [], "it is not tried again");
    hedge.begin(2, 2 * MS, true);
    assert_eq!(hedge.take_due(3 * MS), [Duplicate { id: 2, to: Backup }]);
}

#[test]
fn the_budget_is_a_twentieth_and_its_savings_are_bounded() {
    let mut budget = Budget::new(50_000);
    let mut spent = 0;
    for _ in 0..1_000 {
        budget.earn();
        spent += u32::from(budget.spend());
    }
    assert_eq!(spent, 50);
    for _ in 0..100_000 {
        budget.earn();
    }
    assert_eq!((0..100).filter(|_| budget.spend()).count(), 32);
    assert!(!Budget::new(0).spend());
}
