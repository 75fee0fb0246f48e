//! `fixed-budget`: the first request after an idle moment with an empty queue shares the core for
//! one budget. Figure 5.9(b).
//!
//! That request never waited, so its latency grows only by what sharing adds to its processing. A
//! request that follows it without an idle moment between them has waited, and gets the core alone.
//!
//! It works on the task map alone, too: where no service says what a request is, each busy period
//! of the lane shares for one budget. All requests of a period wait for each other, so none is
//! delayed by more than that budget (one that sleeps in its middle has a period on either side).

use super::period::{Met, begin, expire, idle, met, named};
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
        Sharing { request, since_ns, finished } => match met(request, finished, &service) {
            Met::Same => Sharing { request: named(request, &service), since_ns, finished },
            Met::Another => Spent,
        },
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
        // It idled between two checks, and is busy again.
        Sharing { since_ns, .. } => since_ns.max(began_ns),
        Spent => return (Spent, Verdict::Nap),
    };
    expire(Sharing { request: 0, since_ns, finished: 0 }, budget_ns, now_ns)
}
