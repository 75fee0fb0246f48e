//! When a request is sent a second time, to a backup server, and where requests go meanwhile.
//!
//! Pure: the caller passes the time, which requests came and were answered, and which server has
//! run. The proxy `elfen-hedge` and the [`simulate`] of tests and benchmarks ask the same
//! [`Hedge`], which also counts what it decides.
//!
//! A request is sent a second time at most once, as a duplicate or as a retry, only if its method
//! may be repeated, and only out of what the [`Budget`] has saved. So duplicates and retries
//! together stay below their share of all requests.

#![forbid(unsafe_code)]

mod budget;
mod recent;
pub mod simulate;

use std::collections::BTreeMap;

use serde::Serialize;

use budget::Budget;
use recent::Recent;

/// One of two servers that answer alike.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Server {
    Primary,
    Backup,
}

impl Server {
    pub const BOTH: [Self; 2] = [Self::Primary, Self::Backup];

    pub fn other(self) -> Self {
        match self {
            Self::Primary => Self::Backup,
            Self::Backup => Self::Primary,
        }
    }

    /// Where it is in pairs of both.
    pub fn index(self) -> usize {
        match self {
            Self::Primary => 0,
            Self::Backup => 1,
        }
    }
}

/// What makes a request be sent again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Policy {
    /// Nothing does.
    None,
    /// It has waited for so long.
    After(u64),
    /// It has waited for longer than 95 % of those before it took.
    AfterP95,
    /// Its server has not run between two looks, and the other is free of the same.
    Look,
    /// Its server is brought to a halt, which is told as it happens, and the other is not.
    Hazard,
}

/// What brings a server to a halt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Halt {
    /// A signal.
    Stop,
    /// Its runtime: a collection, or any other time in which its threads may not run.
    Pause,
}

/// Numbers of requests, which rise; who asks chooses them.
pub type Id = u64;

/// A request that has no answer yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Flight {
    came_ns: u64,
    /// Where it was sent first, or after that server had died.
    first: Server,
    may_double: bool,
    /// It was sent a second time, or was to be.
    again: Option<Again>,
    /// The budget had nothing left for it: that counts once.
    refused: bool,
}

/// Why a request was sent a second time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Again {
    /// Its first server stood still, or took long.
    Duplicate,
    /// Its first server ended the connection without an answer.
    Retry,
}

/// A request is to be sent to a server as well.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Double {
    pub id: Id,
    pub to: Server,
}

/// What was decided so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Counts {
    pub requests: u64,
    pub duplicates: u64,
    /// Answers that came from the duplicate first.
    pub won_by_backup: u64,
    /// New requests go to the other server from then on.
    pub swaps: u64,
    /// Sent to the other server because the first one ended the connection without an answer.
    pub retries: u64,
    /// Neither doubled nor tried again, because the budget was spent.
    pub refused_by_budget: u64,
}

#[derive(Clone, Debug)]
pub struct Hedge {
    policy: Policy,
    budget: Budget,
    recent: Recent,
    /// Where new requests go.
    active: Server,
    flying: BTreeMap<Id, Flight>,
    /// When the servers were looked at last.
    looked_ns: Option<u64>,
    /// Of each server: whether it is stopped, and whether its runtime halts it.
    halted: [[bool; 2]; 2],
    /// It is down or was restarted, and gets no requests before it is warm.
    cold: [bool; 2],
    counts: Counts,
}

impl Hedge {
    /// Of a million requests, at most `extra_per_million` are sent twice.
    pub fn new(policy: Policy, extra_per_million: u64) -> Self {
        Self {
            policy,
            budget: Budget::new(extra_per_million),
            recent: Recent::default(),
            active: Server::Primary,
            flying: BTreeMap::new(),
            looked_ns: None,
            halted: [[false; 2]; 2],
            cold: [false; 2],
            counts: Counts::default(),
        }
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Where a request that has come is sent.
    pub fn comes(&mut self, id: Id, now_ns: u64, may_double: bool) -> Server {
        self.counts.requests += 1;
        self.budget.earn();
        let flight =
            Flight { came_ns: now_ns, first: self.active, may_double, again: None, refused: false };
        self.flying.insert(id, flight);
        self.active
    }

    /// The first answer has come: there is nothing more to do for this request.
    pub fn answered(&mut self, id: Id, now_ns: u64, by: Server) {
        let Some(flight) = self.flying.remove(&id) else { return };
        self.recent.add(now_ns.saturating_sub(flight.came_ns));
        if flight.again == Some(Again::Duplicate) && by != flight.first {
            self.counts.won_by_backup += 1;
        }
    }

    /// Its client is gone, or there is no answer to be had.
    pub fn gone(&mut self, id: Id) {
        self.flying.remove(&id);
    }

    /// A server ended the connection without an answer. Whether the request may go to the other
    /// one: once, and within the budget.
    pub fn retry(&mut self, id: Id, to: Server) -> bool {
        let Some(flight) = self.flying.get_mut(&id) else { return false };
        let may = flight.may_double && flight.again.is_none();
        if !may || !flight.spend(&mut self.budget, &mut self.counts, Again::Retry) {
            return false;
        }
        flight.first = to;
        true
    }

    /// What was decided could not be sent: it costs nothing, and is not tried again.
    pub fn not_sent(&mut self, id: Id) {
        let again = self.flying.get(&id).and_then(|flight| flight.again);
        match again {
            Some(Again::Duplicate) => self.counts.duplicates -= 1,
            Some(Again::Retry) => self.counts.retries -= 1,
            None => return,
        }
        self.budget.give_back();
    }

    /// A request was sent to the other server because the first one takes no connections. That is
    /// no duplicate: the first server has nothing of it.
    pub fn moved(&mut self, id: Id, to: Server) {
        if let Some(flight) = self.flying.get_mut(&id) {
            flight.first = to;
        }
    }

    /// A server is brought to a halt, or goes on: what stands at one goes to the one that runs.
    pub fn halts(&mut self, server: Server, why: Halt, is_so: bool) -> Vec<Double> {
        self.halted[server.index()][usize::from(why == Halt::Pause)] = is_so;
        let from = if is_so { server } else { server.other() };
        let stands = |server: Server| self.halted[server.index()].contains(&true);
        let to = from.other();
        let helps = stands(from) && !stands(to) && !self.cold[to.index()];
        if self.policy != Policy::Hazard || !helps {
            return Vec::new();
        }
        if self.active == from {
            self.swap();
        }
        self.double(|flight| flight.first == from)
    }

    /// A server takes no connections, or another process serves there now. New requests go to the
    /// other server, and nothing is sent to this one a second time before it is warm. What halted
    /// the old process does not halt a new one.
    pub fn restarts(&mut self, server: Server) {
        self.halted[server.index()] = [false; 2];
        self.cold[server.index()] = true;
        self.leave(server);
    }

    /// A server takes requests again.
    pub fn is_warm(&mut self, server: Server) {
        self.cold[server.index()] = false;
        // While both were down, new requests had no better place.
        if self.cold[self.active.index()] {
            self.swap();
        }
    }

    fn leave(&mut self, server: Server) {
        if self.active == server && !self.cold[server.other().index()] {
            self.swap();
        }
    }

    fn swap(&mut self) {
        self.active = self.active.other();
        self.counts.swaps += 1;
    }

    /// Whether servers are to be looked at.
    pub fn looks(&self) -> bool {
        self.policy == Policy::Look
    }

    /// For how long a request waits before it is doubled; `None` if that is not how it is decided,
    /// or too few were answered yet.
    pub fn delay_ns(&self) -> Option<u64> {
        match self.policy {
            Policy::None | Policy::Look | Policy::Hazard => None,
            Policy::After(ns) => Some(ns),
            Policy::AfterP95 => self.recent.p95(),
        }
    }

    /// When the next request will have waited long enough.
    pub fn next_due_ns(&self) -> Option<u64> {
        let delay_ns = self.delay_ns()?;
        let waits =
            |flight: &&Flight| flight.may_double && flight.again.is_none() && !flight.refused;
        // Numbers and times rise together.
        Some(self.flying.values().find(waits)?.came_ns.saturating_add(delay_ns))
    }

    /// Requests that have waited long enough.
    pub fn due(&mut self, now_ns: u64) -> Vec<Double> {
        let Some(delay_ns) = self.delay_ns() else { return Vec::new() };
        let late = |flight: &Flight| now_ns.saturating_sub(flight.came_ns) >= delay_ns;
        // Asked at every turn of the proxy, mostly for nothing: numbers and times rise together.
        let mut undoubled = self.flying.values().filter(|f| f.may_double && f.again.is_none());
        if !undoubled.next().is_some_and(late) {
            return Vec::new();
        }
        self.double(late)
    }

    /// Looks at the servers: whether each has run since the last look, and whether one could take
    /// requests, which is asked only of a server that is needed.
    pub fn look(
        &mut self,
        now_ns: u64,
        ran: [bool; 2],
        mut is_free: impl FnMut(Server) -> bool,
    ) -> Vec<Double> {
        let Some(before_ns) = self.looked_ns.replace(now_ns) else { return Vec::new() };
        if self.policy != Policy::Look {
            return Vec::new();
        }
        let mut doubles = Vec::new();
        for server in Server::BOTH {
            // Since then a server with something to do should have run.
            let waits = |flight: &Flight| flight.first == server && flight.came_ns <= before_ns;
            let is_held = !ran[server.index()] && self.flying.values().any(waits);
            let other = server.other();
            if !is_held || self.cold[other.index()] || !is_free(other) {
                continue;
            }
            if self.active == server {
                self.swap();
            }
            doubles.extend(self.double(|flight| flight.first == server));
        }
        doubles
    }

    /// Nothing is in flight, or nobody looked: what a server did since tells nothing.
    pub fn rests(&mut self) {
        self.looked_ns = None;
    }

    pub fn is_idle(&self) -> bool {
        self.flying.is_empty()
    }

    fn double(&mut self, which: impl Fn(&Flight) -> bool) -> Vec<Double> {
        let mut doubles = Vec::new();
        for (&id, flight) in &mut self.flying {
            let to = flight.first.other();
            let may = flight.may_double && flight.again.is_none() && !self.cold[to.index()];
            if !may || !which(flight) {
                continue;
            }
            if flight.spend(&mut self.budget, &mut self.counts, Again::Duplicate) {
                doubles.push(Double { id, to });
            }
        }
        doubles
    }
}

impl Flight {
    /// Takes what sending it a second time costs, if there is enough.
    fn spend(&mut self, budget: &mut Budget, counts: &mut Counts, again: Again) -> bool {
        if !budget.spend() {
            if !self.refused {
                self.refused = true;
                counts.refused_by_budget += 1;
            }
            return false;
        }
        self.again = Some(again);
        match again {
            Again::Duplicate => counts.duplicates += 1,
            Again::Retry => counts.retries += 1,
        }
        true
    }
}

#[cfg(test)]
mod tests;
