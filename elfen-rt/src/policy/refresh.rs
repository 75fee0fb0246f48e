//! `refresh-budget`: like `fixed-budget`, with a new budget when the running request changes while
//! the queue is empty. Figure 5.9(c).
//!
//! The old budget limited the delay of a request that is done. With an empty queue, no other
//! request is delayed together with the new one. While requests wait, the new request gets what is
//! left of the old budget.

use super::borrow_idle;
use super::period::{RunningRequest, begin, compare_request, expire, idle, request_id};
use super::state::State::{Fresh, Sharing, Spent};
use super::state::{Sample, State, Verdict};

/// One check. A budget of 0 is `borrow-idle`.
#[inline]
pub fn check(state: State, budget_ns: u64, lane: &Sample, now_ns: u64) -> (State, Verdict) {
    let Some(service) = lane.service else { return (Spent, borrow_idle::check(lane)) };
    if !lane.busy {
        return (idle(state, &service, now_ns), Verdict::Run);
    }
    let is_queue_empty = service.queue_len == 0;
    let state = match state {
        Fresh { idle_ns, finished } if finished == service.finished || is_queue_empty => {
            begin(&service, idle_ns, now_ns)
        }
        Sharing { request, since_ns, finished } => {
            match compare_request(request, finished, &service) {
                RunningRequest::Same => {
                    Sharing { request: request_id(request, &service), since_ns, finished }
                }
                RunningRequest::Another if is_queue_empty => begin(&service, since_ns, now_ns),
                RunningRequest::Another => state,
            }
        }
        Fresh { .. } | Spent => Spent,
    };
    expire(state, budget_ns, now_ns)
}
