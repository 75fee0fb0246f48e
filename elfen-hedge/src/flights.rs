//! The policy's view of the requests without an answer.

use std::collections::HashMap;
use std::sync::Arc;

use elfen_rt::clock::monotonic_ns;
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use crate::policy::{Duplicate, Hedge, Id, Server};

#[derive(Debug)]
pub(crate) struct Flights {
    state: Mutex<State>,
    /// Notified if a request needs a decision by time and the driver has no timer.
    pub(crate) begin: Notify,
}

#[derive(Debug)]
struct State {
    hedge: Hedge,
    /// Channels to the tasks of requests. A message is the second server for that request.
    duplicate: HashMap<Id, oneshot::Sender<Server>>,
    last_id: Id,
    /// Whether the driver has a timer for the next call of the policy.
    is_due: bool,
}

/// A request in flight. Dropping it makes the policy forget the request.
#[derive(Debug)]
pub(crate) struct Flight {
    flights: Arc<Flights>,
    id: Id,
    /// The server that receives the request first.
    pub(crate) server: Server,
    /// Receives the second server from the policy, at most once.
    pub(crate) duplicate: oneshot::Receiver<Server>,
}

impl Flights {
    pub(crate) fn new(hedge: Hedge) -> Self {
        let state = State { hedge, duplicate: HashMap::new(), last_id: 0, is_due: false };
        Self { state: Mutex::new(state), begin: Notify::new() }
    }

    pub(crate) fn begin(self: &Arc<Self>, may_repeat: bool) -> Flight {
        let (sender, duplicate) = oneshot::channel();
        let mut state = self.state.lock();
        state.last_id += 1;
        let id = state.last_id;
        state.duplicate.insert(id, sender);
        let server = state.hedge.begin(id, monotonic_ns(), may_repeat);
        let needs_time = state.hedge.needs_samples() || state.hedge.next_due_ns().is_some();
        if !state.is_due && needs_time {
            self.begin.notify_one();
        }
        Flight { flights: Arc::clone(self), id, server, duplicate }
    }

    /// Calls the policy for decisions by time. `decide` also returns when the next call is due.
    pub(crate) fn decide_on_time(
        &self,
        decide: impl FnOnce(&mut Hedge) -> (Vec<Duplicate>, Option<u64>),
    ) -> Option<u64> {
        let mut state = self.state.lock();
        let (duplicates, due_ns) = decide(&mut state.hedge);
        state.is_due = due_ns.is_some();
        state.send(duplicates);
        due_ns
    }

    /// Calls the policy, which may return requests to send again.
    pub(crate) fn decide(&self, decide: impl FnOnce(&mut Hedge) -> Vec<Duplicate>) {
        let mut state = self.state.lock();
        let duplicates = decide(&mut state.hedge);
        state.send(duplicates);
    }

    pub(crate) fn with_policy<R>(&self, work: impl FnOnce(&mut Hedge) -> R) -> R {
        work(&mut self.state.lock().hedge)
    }
}

impl State {
    fn send(&mut self, duplicates: Vec<Duplicate>) {
        for Duplicate { id, to } in duplicates {
            let is_sent = self.duplicate.remove(&id).is_some_and(|sender| sender.send(to).is_ok());
            if !is_sent {
                self.hedge.not_sent(id);
            }
        }
    }
}

impl Flight {
    /// Tells the policy the outcome of this request.
    pub(crate) fn tell<R>(&self, tell: impl FnOnce(&mut Hedge, Id) -> R) -> R {
        tell(&mut self.flights.state.lock().hedge, self.id)
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        let mut state = self.flights.state.lock();
        state.duplicate.remove(&self.id);
        state.hedge.forget(self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Policy;

    /// Goal: the policy decides in time about every request, even while it cannot duplicate earlier
    /// requests. Method: a request that must not be sent twice, then a request that may be.
    #[test]
    fn the_policy_is_asked_about_every_request() {
        let flights = Arc::new(Flights::new(Hedge::new(Policy::After(1), 1_000_000)));
        let on_time = || {
            flights.decide_on_time(|hedge| (hedge.take_due(monotonic_ns()), hedge.next_due_ns()))
        };
        let is_woken = || std::pin::pin!(flights.begin.notified()).enable();
        let _post = flights.begin(false);
        assert!(!is_woken() && on_time().is_none());
        let mut get = flights.begin(true);
        assert!(is_woken());
        assert!(on_time().is_none(), "it is time already");
        assert_eq!(get.duplicate.try_recv(), Ok(Server::Backup));
    }
}
