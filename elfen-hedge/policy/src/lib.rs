//! When a request is sent a second time, to a backup server, and where requests go meanwhile.
//!
//! Pure: who asks says what time it is, what has come and gone, and which server has run; the proxy
//! of `elfen hedge` and the [`simulate`] of tests and benchmarks ask the same [`Hedge`]. It counts
//! what it decides, so that both count alike.
//!
//! A duplicate is allowed for requests that may be repeated, once each, and only out of what the
//! [`Budget`] has saved up: whatever happens, duplicates stay below their share of all requests.

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
    doubled: bool,
    /// Its duplicate was refused: that counts once.
    refused: bool,
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
    /// It was started anew, and gets no requests before it is warm.
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
        let flight = Flight {
            came_ns: now_ns,
            first: self.active,
            may_double,
            doubled: false,
            refused: false,
        };
        self.flying.insert(id, flight);
        self.active
    }

    /// The first answer has come: there is nothing more to do for this request.
    pub fn answered(&mut self, id: Id, now_ns: u64, by: Server) {
        let Some(flight) = self.flying.remove(&id) else { return };
        self.recent.add(now_ns.saturating_sub(flight.came_ns));
        if flight.doubled && by != flight.first {
            self.counts.won_by_backup += 1;
        }
    }

    /// Its client is gone, or there is no answer to be had.
    pub fn gone(&mut self, id: Id) {
        self.flying.remove(&id);
    }

    /// A server takes no connections, or has ended one without an answer: new requests go to the
    /// other. Whether it is to be warm before it gets any again, which policies ask for that see
    /// servers: for others it is one that took long.
    pub fn died(&mut self, server: Server) -> bool {
        if self.active == server {
            self.swap();
        }
        let sees = matches!(self.policy, Policy::Look | Policy::Hazard);
        self.cold[server.index()] |= sees;
        sees
    }

    /// A duplicate that was decided could not be sent: it costs nothing, and is not tried again.
    pub fn not_doubled(&mut self, id: Id) {
        if self.flying.get(&id).is_some_and(|flight| flight.doubled) {
            self.counts.duplicates -= 1;
            self.budget.give_back();
        }
    }

    /// A request was sent to the other server because its first one is dead: that is no duplicate,
    /// as nobody works on it twice.
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

    /// Another process serves there now, or the same one: nothing holds it that held it before.
    pub fn restarts(&mut self, server: Server) {
        (self.halted[server.index()], self.cold[server.index()]) = ([false; 2], true);
        if self.active == server && !self.cold[server.other().index()] {
            self.swap();
        }
    }

    /// It has worked for enough requests.
    pub fn is_warm(&mut self, server: Server) {
        self.cold[server.index()] = false;
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
        let waits = |flight: &&Flight| flight.may_double && !flight.doubled && !flight.refused;
        // Numbers and times rise together.
        Some(self.flying.values().find(waits)?.came_ns.saturating_add(delay_ns))
    }

    /// Requests that have waited long enough.
    pub fn due(&mut self, now_ns: u64) -> Vec<Double> {
        let Some(delay_ns) = self.delay_ns() else { return Vec::new() };
        let late = |flight: &Flight| now_ns.saturating_sub(flight.came_ns) >= delay_ns;
        // Asked at every turn of the proxy, mostly for nothing: numbers and times rise together.
        let mut undoubled = self.flying.values().filter(|f| f.may_double && !f.doubled);
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
            if !flight.may_double || flight.doubled || self.cold[to.index()] || !which(flight) {
                continue;
            }
            if self.budget.spend() {
                flight.doubled = true;
                self.counts.duplicates += 1;
                doubles.push(Double { id, to });
            } else if !flight.refused {
                flight.refused = true;
                self.counts.refused_by_budget += 1;
            }
        }
        doubles
    }
}

#[cfg(test)]
mod tests {
    use super::Server::{Backup, Primary};
    use super::*;

    const MS: u64 = 1_000_000;

    /// With a budget that is never short.
    fn hedge(policy: Policy) -> Hedge {
        Hedge::new(policy, 1_000_000)
    }

    fn free(_: Server) -> bool {
        true
    }

    #[test]
    fn a_server_that_stands_still_is_left() {
        let mut hedge = hedge(Policy::Look);
        assert_eq!(hedge.comes(1, 0, true), Primary);
        assert_eq!(hedge.look(MS, [false; 2], free), [], "the first look knows nothing");
        assert_eq!(hedge.comes(2, MS + 1, true), Primary);
        let both = [Double { id: 1, to: Backup }, Double { id: 2, to: Backup }];
        assert_eq!(hedge.look(2 * MS, [false, false], free), both);
        assert_eq!(hedge.comes(3, 2 * MS, true), Backup, "new requests follow");
        assert_eq!(hedge.look(3 * MS, [false, true], free), [], "nothing is sent three times");
        hedge.answered(1, 3 * MS, Backup);
        hedge.answered(2, 3 * MS, Primary);
        hedge.answered(3, 3 * MS, Backup);
        let expected =
            Counts { requests: 3, duplicates: 2, won_by_backup: 1, swaps: 1, refused_by_budget: 0 };
        assert_eq!(hedge.counts(), expected);
    }

    /// A long request is as long elsewhere; a server without requests has no need to run; a backup
    /// that is held as well is no help.
    #[test]
    fn a_server_that_works_is_left_to_work() {
        let mut hedge = hedge(Policy::Look);
        hedge.look(0, [false; 2], free);
        assert_eq!(hedge.look(MS, [false; 2], free), [], "idle");
        hedge.comes(1, MS, true);
        assert_eq!(hedge.look(2 * MS, [true, false], free), [], "works");
        assert_eq!(hedge.look(3 * MS, [false, false], |server| server == Primary), [], "held");
        hedge.comes(2, 3 * MS + 1, true);
        hedge.answered(1, 3 * MS + 2, Primary);
        assert_eq!(hedge.look(4 * MS, [false, false], free), [], "it may not have been there yet");
        assert_eq!((hedge.counts().swaps, hedge.counts().duplicates), (0, 0));
    }

    #[test]
    fn a_time_decides_and_methods_may_not_be_doubled() {
        let mut hedge = hedge(Policy::After(2 * MS));
        hedge.comes(1, 0, true);
        hedge.comes(2, 0, false);
        assert_eq!(hedge.due(2 * MS - 1), []);
        assert_eq!(hedge.due(2 * MS), [Double { id: 1, to: Backup }]);
        assert_eq!(hedge.due(3 * MS), [], "once");
        assert_eq!(hedge.look(3 * MS, [false; 2], free), []);
    }

    #[test]
    fn the_p95_is_of_recent_answers() {
        let mut hedge = hedge(Policy::AfterP95);
        for id in 0..200 {
            assert_eq!(hedge.delay_ns().is_some(), id >= 100, "{id}");
            hedge.comes(id, 0, true);
            hedge.answered(id, (id % 100 + 1) * MS, Primary);
        }
        assert_eq!(hedge.delay_ns(), Some(95 * MS));
    }

    /// Goal: requests go where nobody stands still, and back when a backup that stands goes on
    /// later; a server that was started anew gets none. Method: halts one upon the other.
    #[test]
    fn a_halt_sends_requests_to_the_other() {
        let mut hedge = hedge(Policy::Hazard);
        hedge.comes(1, 0, true);
        assert_eq!(hedge.halts(Primary, Halt::Pause, true), [Double { id: 1, to: Backup }]);
        assert_eq!(hedge.comes(2, 1, true), Backup);
        assert_eq!(hedge.halts(Backup, Halt::Stop, true), [], "both stand");
        assert_eq!(hedge.halts(Primary, Halt::Stop, true), []);
        assert_eq!(hedge.halts(Primary, Halt::Pause, false), [], "it is stopped as well");
        let back = [Double { id: 2, to: Primary }];
        assert_eq!(hedge.halts(Primary, Halt::Stop, false), back, "the first that goes on");
        assert_eq!(hedge.comes(3, 2, true), Primary);
        assert_eq!(hedge.halts(Backup, Halt::Stop, false), []);
        hedge.restarts(Backup);
        assert_eq!(hedge.halts(Primary, Halt::Pause, true), [], "the other is cold");
        hedge.is_warm(Backup);
        assert_eq!(hedge.halts(Primary, Halt::Pause, true), [Double { id: 3, to: Backup }]);
        hedge.restarts(Backup);
        assert_eq!(hedge.comes(4, 3, true), Primary);
        let counts = hedge.counts();
        assert_eq!((counts.duplicates, counts.swaps), (3, 4));
    }

    #[test]
    fn a_dead_server_is_left_and_costs_no_budget() {
        let mut hedge = Hedge::new(Policy::Look, 0);
        assert_eq!(hedge.comes(1, 0, false), Primary);
        assert!(hedge.died(Primary) && hedge.died(Primary));
        hedge.moved(1, Backup);
        assert_eq!(hedge.comes(2, 0, true), Backup);
        hedge.answered(1, MS, Backup);
        let counts = hedge.counts();
        assert_eq!((counts.swaps, counts.duplicates, counts.won_by_backup), (1, 0, 0));
        assert!(!Hedge::new(Policy::AfterP95, 0).died(Primary), "it sees nothing");
    }

    /// Goal: what was decided and not done is in no count and can be spent again. Method: a budget
    /// for one duplicate, decided for a server that has just failed.
    #[test]
    fn a_duplicate_that_is_not_sent_costs_nothing() {
        let mut hedge = Hedge::new(Policy::After(MS), 500_000);
        for id in 0..2 {
            hedge.comes(id, 0, true);
        }
        assert_eq!(hedge.due(MS), [Double { id: 0, to: Backup }]);
        assert_eq!((hedge.counts().duplicates, hedge.counts().refused_by_budget), (1, 1));
        hedge.not_doubled(0);
        hedge.not_doubled(1);
        assert_eq!(hedge.counts().duplicates, 0);
        hedge.answered(1, MS, Primary);
        assert_eq!(hedge.due(2 * MS), [], "it is not tried again");
        hedge.comes(2, 2 * MS, true);
        assert_eq!(hedge.due(3 * MS), [Double { id: 2, to: Backup }]);
    }
}
