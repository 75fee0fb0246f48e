//! The requests that have no answer yet, as the policy knows them.

use std::collections::HashMap;
use std::sync::Arc;

use elfen_hedge_policy::{Double, Hedge, Id, Server};
use elfen_rt::clock::monotonic_ns;
use tokio::sync::{Notify, oneshot};

use crate::lock::Lock;

#[derive(Debug)]
pub(crate) struct Flights {
    state: Lock<State>,
    /// There is a request that the policy has to be asked about, and no time is set for that.
    pub(crate) begin: Notify,
}

#[derive(Debug)]
struct State {
    hedge: Hedge,
    /// Tells a request to go to this server as well.
    double: HashMap<Id, oneshot::Sender<Server>>,
    last_id: Id,
    /// The policy will be asked again at some time.
    is_due: bool,
}

/// One request; the policy forgets it with this.
#[derive(Debug)]
pub(crate) struct Flight {
    flights: Arc<Flights>,
    id: Id,
    /// Where it is sent first.
    pub(crate) server: Server,
    /// The policy has it sent to this server as well, at most once.
    pub(crate) double: oneshot::Receiver<Server>,
}

impl Flights {
    pub(crate) fn new(hedge: Hedge) -> Self {
        let state = State { hedge, double: HashMap::new(), last_id: 0, is_due: false };
        Self { state: Lock::new(state), begin: Notify::new() }
    }

    pub(crate) fn begin(self: &Arc<Self>, may_repeat: bool) -> Flight {
        let (tell, double) = oneshot::channel();
        let (id, server) = self.state.with(|state| {
            state.last_id += 1;
            let id = state.last_id;
            state.double.insert(id, tell);
            let server = state.hedge.comes(id, monotonic_ns(), may_repeat);
            let is_asked = state.hedge.looks() || state.hedge.next_due_ns().is_some();
            if !state.is_due && is_asked {
                self.begin.notify_one();
            }
            (id, server)
        });
        Flight { flights: Arc::clone(self), id, server, double }
    }

    /// Asks the policy what it is time for, which also says when it is to be asked again.
    pub(crate) fn decide_on_time(
        &self,
        decide: impl FnOnce(&mut Hedge) -> (Vec<Double>, Option<u64>),
    ) -> Option<u64> {
        self.state.with(|state| {
            let (doubles, due_ns) = decide(&mut state.hedge);
            state.is_due = due_ns.is_some();
            state.send(doubles);
            due_ns
        })
    }

    /// Asks the policy, which may have requests sent again.
    pub(crate) fn decide(&self, decide: impl FnOnce(&mut Hedge) -> Vec<Double>) {
        self.state.with(|state| {
            let doubles = decide(&mut state.hedge);
            state.send(doubles);
        });
    }

    pub(crate) fn tell<R>(&self, tell: impl FnOnce(&mut Hedge) -> R) -> R {
        self.state.with(|state| tell(&mut state.hedge))
    }
}

impl State {
    fn send(&mut self, doubles: Vec<Double>) {
        for Double { id, to } in doubles {
            let told = self.double.remove(&id).is_some_and(|tell| tell.send(to).is_ok());
            if !told {
                self.hedge.not_sent(id);
            }
        }
    }
}

impl Flight {
    pub(crate) fn answered(&self, by: Server) {
        self.flights.tell(|hedge| hedge.answered(self.id, monotonic_ns(), by));
    }

    /// It goes to another server, because the first one takes no connections.
    pub(crate) fn moved(&self, to: Server) {
        self.flights.tell(|hedge| hedge.moved(self.id, to));
    }

    /// Whether it may go to another server, after the first one dropped it.
    pub(crate) fn retry(&self, to: Server) -> bool {
        self.flights.tell(|hedge| hedge.retry(self.id, to))
    }

    /// The second server has nothing of it.
    pub(crate) fn not_sent(&self) {
        self.flights.tell(|hedge| hedge.not_sent(self.id));
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.flights.state.with(|state| {
            state.double.remove(&self.id);
            state.hedge.gone(self.id);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use elfen_hedge_policy::Policy;

    /// Goal: the policy is asked in time about every request, also while others are under way that
    /// it has no decision for. Method: a request that may not be sent twice, then one that may.
    #[test]
    fn the_policy_is_asked_about_every_request() {
        let flights = Arc::new(Flights::new(Hedge::new(Policy::After(1), 1_000_000)));
        let on_time =
            || flights.decide_on_time(|hedge| (hedge.due(monotonic_ns()), hedge.next_due_ns()));
        let is_woken = || std::pin::pin!(flights.begin.notified()).enable();
        let _post = flights.begin(false);
        assert!(!is_woken() && on_time().is_none());
        let mut get = flights.begin(true);
        assert!(is_woken());
        assert!(on_time().is_none(), "it is time already");
        assert_eq!(get.double.try_recv(), Ok(Server::Backup));
    }
}
