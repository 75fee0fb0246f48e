//! Periods, which the budget policies have in common: when a period begins, which request it
//! belongs to, and when its budget is spent.
//!
//! A period is the time in which a batch may share the core with one request. [`super::fixed`] and
//! [`super::refresh`] differ in which requests begin a period.

use super::state::State::{Fresh, Sharing, Spent};
use super::state::{Service, State, Verdict};

/// The state of an idle lane: if the queue is empty, the next request gets a budget.
#[inline]
pub(super) fn idle(state: State, service: &Service, now_ns: u64) -> State {
    if service.queue_len == 0 {
        Fresh { idle_ns: now_ns, finished: service.finished }
    } else {
        state
    }
}

/// Begins a period for the running request; its budget counts from the request's start.
///
/// A published start before `not_before_ns` is stale, because the lane idled then or ran another
/// request. [`expire`] limits a start in the future to now.
#[inline]
pub(super) fn begin(service: &Service, not_before_ns: u64, now_ns: u64) -> State {
    let started_ns = service.request_started_ns;
    let known = service.running_request != 0 && started_ns != 0;
    Sharing {
        request: service.running_request,
        since_ns: if known { started_ns.max(not_before_ns) } else { now_ns },
        finished: service.finished,
    }
}

pub(super) enum RunningRequest {
    Same,
    Another,
}

/// Whether the lane still runs the request that has the budget. A lane that runs no request counts
/// as unchanged.
#[inline]
pub(super) fn compare_request(request: u64, finished: u64, service: &Service) -> RunningRequest {
    let running = service.running_request;
    // Both the id and the counter are compared: a service may use an id twice, and few services
    // count.
    let same = (request == 0 || running == request) && service.finished == finished;
    if same || running == 0 { RunningRequest::Same } else { RunningRequest::Another }
}

/// The id of the request that has the budget: the running one, if the period had none so far.
#[inline]
pub(super) fn request_id(request: u64, service: &Service) -> u64 {
    if request == 0 { service.running_request } else { request }
}

/// Ends the period when its budget is spent. The check that finds the budget spent naps.
#[inline]
pub(super) fn expire(state: State, budget_ns: u64, now_ns: u64) -> (State, Verdict) {
    match state {
        Sharing { request, since_ns, finished } => {
            let since_ns = since_ns.min(now_ns);
            if now_ns - since_ns < budget_ns {
                (Sharing { request, since_ns, finished }, Verdict::Run)
            } else {
                (Spent, Verdict::Nap)
            }
        }
        Fresh { .. } | Spent => (Spent, Verdict::Nap),
    }
}
