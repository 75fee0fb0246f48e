//! Requests that have no answer: who else may be asked, and what their clients are told.

use super::Exchanges;
use crate::hedge::head::{NO_SERVER, Refusal, TOO_LATE};
use crate::hedge::link::Failure;

impl Exchanges {
    /// A server has not answered a request: another connection or the other server may, if that
    /// does no harm.
    pub(super) fn failed(&mut self, at: usize, failure: Failure) {
        let Failure { server, fresh, unsent, heard } = failure;
        let Some(exchange) = self.clients.get(at).and_then(|client| client.exchange.as_mut())
        else {
            return;
        };
        let (id, other) = (exchange.id, server.other());
        exchange.links[server.index()] = None;
        let may_repeat = exchange.repeats || unsent;
        // A server may close what has waited for long.
        if !fresh && !heard && may_repeat {
            return self.send(at, server, true);
        }
        exchange.failed[server.index()] = true;
        let works = exchange.links[other.index()].is_some();
        let may_move = may_repeat && !exchange.failed[other.index()];
        if fresh && !heard {
            self.down[server.index()] = true;
            if !self.down[other.index()] && self.hedge.died(server) {
                self.warming.died(server);
            }
        }
        if works {
            return;
        }
        if may_move {
            self.hedge.moved(id, other);
            self.counts.moved += 1;
            return self.send(at, other, false);
        }
        self.unanswered(at, NO_SERVER);
    }

    fn unanswered(&mut self, at: usize, refusal: Refusal) {
        let Some(client) = self.clients.get(at) else { return };
        let Some(exchange) = client.exchange.take() else { return };
        self.hedge.gone(exchange.id);
        self.by_id.remove(&exchange.id);
        self.counts.unanswered += 1;
        for link in exchange.links.into_iter().flatten() {
            self.close(link);
        }
        self.refuse(at, refusal);
    }

    /// Gives up requests that have waited for too long; when there is the next to give up.
    pub(in super::super) fn expire(&mut self, now_ns: u64) -> Option<u64> {
        while let Some(&(deadline_ns, id)) = self.deadlines.front() {
            let at = self.by_id.get(&id).copied();
            if deadline_ns > now_ns && at.is_some() {
                return Some(deadline_ns);
            }
            self.deadlines.pop_front();
            let Some(at) = at else { continue };
            let of = self.clients.get(at).and_then(|client| client.exchange.as_ref());
            if of.is_some_and(|exchange| exchange.winner.is_none()) {
                self.unanswered(at, TOO_LATE);
            }
        }
        None
    }
}
