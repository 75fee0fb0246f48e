//! `fixed-budget`: the first request after an idle moment with an empty queue shares the core for
//! one budget. Figure 5.9(b).
//!
//! That request never waited, so its latency grows only by what sharing adds to its processing. A
//! request that follows it without an idle moment in between has waited, and gets the core to
//! itself.
//!
//! The policy also works with a task map only. Where no service publishes requests, each busy
//! period of the lane shares the core for one budget. All requests of a period wait for each other,
//! so no request is delayed by more than that budget. An exception is a request that sleeps in its
//! middle: it has one period before the sleep and one after it.

use super::period::{RunningRequest, begin, compare_request, expire, idle, request_id};
use super::state::State::{Fresh, Sharing, Spent};
use super::state::{Sample, State, Verdict};

/// One check. A budget of 0 is `borrow-idle`.
#[inline]
pub fn check(state: State, budget_ns: u64, lane: &Sample, now_ns: u64) -> (State, Verdict) {
    let Some(service) = lane.service else { return busy_period(state, budget_ns, lane, now_ns) };
    if !lane.busy {
        return (idle(state, &service, now_ns), Verdict::Run);
    }
    let state = match state {
        Fresh { idle_ns, finished } if finished == service.finished => {
            begin(&service, idle_ns, now_ns)
        }
        Sharing { request, since_ns, finished } => {
            match compare_request(request, finished, &service) {
                RunningRequest::Same => {
                    Sharing { request: request_id(request, &service), since_ns, finished }
                }
                RunningRequest::Another => Spent,
            }
        }
        Fresh { .. } | Spent => Spent,
    };
    expire(state, budget_ns, now_ns)
}

/// One check where no service publishes requests.
#[inline]
fn busy_period(state: State, budget_ns: u64, lane: &Sample, now_ns: u64) -> (State, Verdict) {
    if !lane.busy {
        return (Fresh { idle_ns: now_ns, finished: 0 }, Verdict::Run);
    }
    let began_ns = lane.busy_since_ns.unwrap_or(0);
    let since_ns = match state {
        Fresh { .. } if began_ns == 0 => now_ns,
        Fresh { idle_ns, .. } => began_ns.max(idle_ns),
        // The lane may have idled between two checks: then the latest busy period counts.
        Sharing { since_ns, .. } => since_ns.max(began_ns),
        Spent => return (Spent, Verdict::Nap),
    };
    expire(Sharing { request: 0, since_ns, finished: 0 }, budget_ns, now_ns)
}
