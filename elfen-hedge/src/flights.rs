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
    /// There is a request, after a time without any.
    pub(crate) begin: Notify,
}

#[derive(Debug)]
struct State {
    hedge: Hedge,
    /// Tells a request to go to this server as well.
    double: HashMap<Id, oneshot::Sender<Server>>,
    last_id: Id,
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
        let state = State { hedge, double: HashMap::new(), last_id: 0 };
        Self { state: Lock::new(state), begin: Notify::new() }
    }

    pub(crate) fn begin(self: &Arc<Self>, may_repeat: bool) -> Flight {
        let (tell, double) = oneshot::channel();
        let (id, server) = self.state.with(|state| {
            if state.hedge.is_idle() {
                self.begin.notify_one();
            }
            state.last_id += 1;
            let id = state.last_id;
            state.double.insert(id, tell);
            (id, state.hedge.comes(id, monotonic_ns(), may_repeat))
        });
        Flight { flights: Arc::clone(self), id, server, double }
    }

    /// Asks the policy, which may have requests sent again.
    pub(crate) fn decide<R>(&self, decide: impl FnOnce(&mut Hedge) -> (Vec<Double>, R)) -> R {
        self.state.with(|state| {
            let (doubles, result) = decide(&mut state.hedge);
            for Double { id, to } in doubles {
                let told = state.double.remove(&id).is_some_and(|tell| tell.send(to).is_ok());
                if !told {
                    state.hedge.not_sent(id);
                }
            }
            result
        })
    }

    pub(crate) fn tell<R>(&self, tell: impl FnOnce(&mut Hedge) -> R) -> R {
        self.state.with(|state| tell(&mut state.hedge))
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
