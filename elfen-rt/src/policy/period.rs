//! Common to the budget policies: when a period begins, which request's it is, and when its budget
//! is spent.
//!
//! A period is the time in which a batch may share with one request. [`super::fixed`] and
//! [`super::refresh`] differ in which requests begin one.

use super::state::State::{Fresh, Sharing, Spent};
use super::state::{Service, State, Verdict};

/// The lane idles: with an empty queue, the next request gets a budget.
#[inline]
pub(super) fn idle(state: State, service: &Service, now_ns: u64) -> State {
    if service.queue_len == 0 {
        Fresh { idle_ns: now_ns, finished: service.finished }
    } else {
        state
    }
}

/// A budget for the running request, counted from its start.
///
/// A start before `not_before_ns` (the lane idled then, or another request ran) is a stale word;
/// one after now is cut by [`expire`].
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

pub(super) enum Met {
    Same,
    Another,
}

/// Whether the lane still runs the request that the budget was given for, or nothing that counts as
/// another one.
#[inline]
pub(super) fn met(request: u64, finished: u64, service: &Service) -> Met {
    let running = service.running_request;
    // An id alone would not do: a service may give the same one twice. Nor the counter alone: few
    // services count.
    let same = (request == 0 || running == request) && service.finished == finished;
    if same || running == 0 { Met::Same } else { Met::Another }
}

/// The request that the budget was given for, as soon as it has a name.
#[inline]
pub(super) fn named(request: u64, service: &Service) -> u64 {
    if request == 0 { service.running_request } else { request }
}

/// Ends the period when its budget is spent; the check that finds it spent already naps.
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
