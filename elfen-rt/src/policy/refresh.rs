//! `refresh-budget`: as `fixed-budget`, and a new budget when the running request changes while the
//! queue is empty. Figure 5.9(c).
//!
//! The old budget protected a request that is done; no request stands behind the new one to suffer
//! with it. While others do wait, the new request may use what the old one left.

use super::borrow_idle;
use super::period::{Met, begin, expire, idle, met, named};
use super::state::State::{Fresh, Sharing, Spent};
use super::state::{Sample, State, Verdict};

/// One check. A budget of 0 is `borrow-idle`.
#[inline]
pub fn check(state: State, budget_ns: u64, lane: &Sample, now_ns: u64) -> (State, Verdict) {
    let Some(service) = lane.service else { return (Spent, borrow_idle::check(lane)) };
    if !lane.busy {
        return (idle(state, &service, now_ns), Verdict::Run);
    }
    let nobody_waits = service.queue_len == 0;
    let state = match state {
        Fresh { idle_ns, finished } if finished == service.finished || nobody_waits => {
            begin(&service, idle_ns, now_ns)
        }
        Sharing { request, since_ns, finished } => match met(request, finished, &service) {
            Met::Same => Sharing { request: named(request, &service), since_ns, finished },
            Met::Another if nobody_waits => begin(&service, since_ns, now_ns),
            Met::Another => state,
        },
        Fresh { .. } | Spent => Spent,
    };
    expire(state, budget_ns, now_ns)
}
