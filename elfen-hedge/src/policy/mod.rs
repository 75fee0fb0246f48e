//! Decides when a request is sent a second time, to a backup server, and which server gets new
//! requests meanwhile.
//!
//! The module is pure. The caller passes the time, the requests that arrived and were answered, and
//! which server has run. The proxy `elfen-hedge` and the simulator [`simulate`] of tests and
//! benchmarks use the same [`Hedge`], which also counts its decisions.
//!
//! A request is sent a second time at most once, as a duplicate or as a retry. This requires that
//! its method may be repeated, and that the [`Budget`] has saved enough. So duplicates and retries
//! together stay below their share of all requests.

pub mod simulate;

use std::collections::{BTreeMap, VecDeque};
use std::str::FromStr;

use elfen_console::duration;
use elfen_rt::clock::nanos;
use serde::Serialize;

/// One of two equivalent servers.
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

    /// Its index in arrays of both servers.
    pub fn index(self) -> usize {
        match self {
            Self::Primary => 0,
            Self::Backup => 1,
        }
    }
}

/// When a request is sent a second time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Policy {
    /// No request is sent a second time.
    None,
    /// After the request has waited for this long.
    After(u64),
    /// After the request has waited longer than 95 % of earlier requests took.
    AfterP95,
    /// When the server has not run between two polls, and the other server is free.
    Look,
    /// When an event reports that the server is halted, and the other server is not.
    Hazard,
}

impl FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Some(Self::None),
            "look" => Some(Self::Look),
            "hazard" => Some(Self::Hazard),
            "after=p95" => Some(Self::AfterP95),
            _ => text
                .strip_prefix("after=")
                .and_then(|time| duration::parse(time).ok())
                .map(|time| Self::After(nanos(time))),
        }
        .ok_or_else(|| {
            "it must be look, hazard, after=TIME as after=2ms, after=p95, or none".into()
        })
    }
}

/// Why a server is halted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Halt {
    /// A signal has stopped it.
    Stop,
    /// Its runtime has paused its threads, for example for a garbage collection.
    Pause,
}

/// Numbers of requests in ascending order, which the caller chooses.
pub type Id = u64;

/// A request without an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Flight {
    arrived_ns: u64,
    /// The server that received the request first, or that replaced it after a failure.
    first: Server,
    may_repeat: bool,
    /// Set when the second attempt is decided.
    second: Option<SecondAttempt>,
    /// Whether the budget was exhausted when the request needed it. This is counted once.
    is_refused: bool,
}

/// Why a request was sent a second time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SecondAttempt {
    /// The first server stood still, or took too long.
    Duplicate,
    /// The first server ended the connection without an answer.
    Retry,
}

/// A decision to send a request to a second server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Duplicate {
    pub id: Id,
    pub to: Server,
}

/// Counts of the decisions so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Counts {
    pub requests: u64,
    pub duplicates: u64,
    /// Requests whose first answer came from the duplicate.
    pub won_by_backup: u64,
    /// How often new requests were switched to the other server.
    pub swaps: u64,
    /// Requests sent to the other server because the first one ended the connection without an
    /// answer.
    pub retries: u64,
    /// Requests that were neither duplicated nor retried, because the budget was exhausted.
    pub refused_by_budget: u64,
}

#[derive(Clone, Debug)]
pub struct Hedge {
    policy: Policy,
    budget: Budget,
    recent: RecentLatencies,
    /// The server that gets new requests.
    active: Server,
    in_flight: BTreeMap<Id, Flight>,
    /// The time of the last sample.
    sampled_ns: Option<u64>,
    /// For each server: whether a signal has stopped it, and whether its runtime has paused it.
    halted: [[bool; 2]; 2],
    /// Servers that are down or were restarted. They get no requests until they are warm.
    cold: [bool; 2],
    counts: Counts,
}

impl Hedge {
    /// At most `extra_per_million` of a million requests are sent twice.
    pub fn new(policy: Policy, extra_per_million: u64) -> Self {
        Self {
            policy,
            budget: Budget::new(extra_per_million),
            recent: RecentLatencies::default(),
            active: Server::Primary,
            in_flight: BTreeMap::new(),
            sampled_ns: None,
            halted: [[false; 2]; 2],
            cold: [false; 2],
            counts: Counts::default(),
        }
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Registers a new request. Returns the server to send it to.
    pub fn begin(&mut self, id: Id, now_ns: u64, may_repeat: bool) -> Server {
        self.counts.requests += 1;
        self.budget.earn();
        let flight = Flight {
            arrived_ns: now_ns,
            first: self.active,
            may_repeat,
            second: None,
            is_refused: false,
        };
        self.in_flight.insert(id, flight);
        self.active
    }

    /// Registers the first answer to a request, which completes it.
    pub fn answered(&mut self, id: Id, now_ns: u64, by: Server) {
        let Some(flight) = self.in_flight.remove(&id) else { return };
        self.recent.add(now_ns.saturating_sub(flight.arrived_ns));
        if flight.second == Some(SecondAttempt::Duplicate) && by != flight.first {
            self.counts.won_by_backup += 1;
        }
    }

    /// Forgets a request whose client has disconnected, or that cannot be answered.
    pub fn forget(&mut self, id: Id) {
        self.in_flight.remove(&id);
    }

    /// Registers that a server ended the connection without an answer. Returns whether the request
    /// may go to the other server, which is possible once and within the budget.
    pub fn retry(&mut self, id: Id, to: Server) -> bool {
        let Some(flight) = self.in_flight.get_mut(&id) else { return false };
        let may = flight.may_repeat && flight.second.is_none();
        if !may || !flight.spend(&mut self.budget, &mut self.counts, SecondAttempt::Retry) {
            return false;
        }
        flight.first = to;
        true
    }

    /// Registers that a decision could not be carried out. It costs nothing and is not repeated.
    pub fn not_sent(&mut self, id: Id) {
        let second = self.in_flight.get(&id).and_then(|flight| flight.second);
        match second {
            Some(SecondAttempt::Duplicate) => self.counts.duplicates -= 1,
            Some(SecondAttempt::Retry) => self.counts.retries -= 1,
            None => return,
        }
        self.budget.give_back();
    }

    /// Registers that a request was sent to the other server because the first one accepts no
    /// connections. This does not count as a duplicate, because the first server received nothing.
    pub fn moved(&mut self, id: Id, to: Server) {
        if let Some(flight) = self.in_flight.get_mut(&id) {
            flight.first = to;
        }
    }

    /// Registers that a server halts or continues. Requests of a halted server go to the other one
    /// if that one runs.
    pub fn set_halted(&mut self, server: Server, why: Halt, is_halted_now: bool) -> Vec<Duplicate> {
        self.halted[server.index()][usize::from(why == Halt::Pause)] = is_halted_now;
        let from = if is_halted_now { server } else { server.other() };
        let is_halted = |server: Server| self.halted[server.index()].contains(&true);
        let to = from.other();
        let is_better = is_halted(from) && !is_halted(to) && !self.cold[to.index()];
        if self.policy != Policy::Hazard || !is_better {
            return Vec::new();
        }
        if self.active == from {
            self.swap();
        }
        self.duplicate_where(|flight| flight.first == from)
    }

    /// Registers that a server accepts no connections, or was replaced by another process. New
    /// requests go to the other server, and this server gets no duplicates until it is warm. Halts
    /// of the old process do not apply to the new one.
    pub fn set_cold(&mut self, server: Server) {
        self.halted[server.index()] = [false; 2];
        self.cold[server.index()] = true;
        self.leave(server);
    }

    /// Registers that a server takes requests again.
    pub fn set_warm(&mut self, server: Server) {
        self.cold[server.index()] = false;
        // While both servers were down, new requests stayed at the active one.
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

    /// Whether the policy needs samples of the servers.
    pub fn needs_samples(&self) -> bool {
        self.policy == Policy::Look
    }

    /// How long a request waits before it is duplicated. `None` if the policy does not decide by
    /// time, or if too few requests have been answered.
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
        let is_waiting =
            |flight: &&Flight| flight.may_repeat && flight.second.is_none() && !flight.is_refused;
        // Requests are sorted by arrival.
        Some(self.in_flight.values().find(is_waiting)?.arrived_ns.saturating_add(delay_ns))
    }

    /// Takes the duplicates of requests that have waited long enough.
    pub fn take_due(&mut self, now_ns: u64) -> Vec<Duplicate> {
        let Some(delay_ns) = self.delay_ns() else { return Vec::new() };
        let late = |flight: &Flight| now_ns.saturating_sub(flight.arrived_ns) >= delay_ns;
        // The proxy calls this in every iteration, mostly without result. So it tests the oldest
        // request first.
        let mut waiting = self.in_flight.values().filter(|f| f.may_repeat && f.second.is_none());
        if !waiting.next().is_some_and(late) {
            return Vec::new();
        }
        self.duplicate_where(late)
    }

    /// Takes a sample: whether each server has run since the last sample. `is_free` returns whether
    /// a server could take requests. It is called only for a server that is needed.
    pub fn sample(
        &mut self,
        now_ns: u64,
        ran: [bool; 2],
        mut is_free: impl FnMut(Server) -> bool,
    ) -> Vec<Duplicate> {
        let Some(before_ns) = self.sampled_ns.replace(now_ns) else { return Vec::new() };
        if self.policy != Policy::Look {
            return Vec::new();
        }
        let mut duplicates = Vec::new();
        for server in Server::BOTH {
            // If a request was waiting at the last sample, its server should have run since.
            let is_waiting =
                |flight: &Flight| flight.first == server && flight.arrived_ns <= before_ns;
            let stands_still = !ran[server.index()] && self.in_flight.values().any(is_waiting);
            let other = server.other();
            if !stands_still || self.cold[other.index()] || !is_free(other) {
                continue;
            }
            if self.active == server {
                self.swap();
            }
            duplicates.extend(self.duplicate_where(|flight| flight.first == server));
        }
        duplicates
    }

    /// Forgets the last sample, because polling was interrupted. For example, no request was in
    /// flight.
    pub fn forget_sample(&mut self) {
        self.sampled_ns = None;
    }

    pub fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    fn duplicate_where(&mut self, selects: impl Fn(&Flight) -> bool) -> Vec<Duplicate> {
        let mut duplicates = Vec::new();
        for (&id, flight) in &mut self.in_flight {
            let to = flight.first.other();
            let may = flight.may_repeat && flight.second.is_none() && !self.cold[to.index()];
            if !may || !selects(flight) {
                continue;
            }
            if flight.spend(&mut self.budget, &mut self.counts, SecondAttempt::Duplicate) {
                duplicates.push(Duplicate { id, to });
            }
        }
        duplicates
    }
}

impl Flight {
    /// Takes the cost of a second attempt from the budget, if the budget has enough.
    fn spend(&mut self, budget: &mut Budget, counts: &mut Counts, second: SecondAttempt) -> bool {
        if !budget.spend() {
            if !self.is_refused {
                self.is_refused = true;
                counts.refused_by_budget += 1;
            }
            return false;
        }
        self.second = Some(second);
        match second {
            SecondAttempt::Duplicate => counts.duplicates += 1,
            SecondAttempt::Retry => counts.retries += 1,
        }
        true
    }
}

const LATENCIES_MAX: usize = 1_000;
/// The p95 of fewer latencies is not meaningful.
const LATENCIES_MIN: usize = 100;
/// How many latencies are added between two sorts. Sorting a thousand numbers for each request
/// would dominate its cost.
const REFRESH_EVERY: u32 = 100;

/// The latencies of the last requests.
#[derive(Clone, Debug, Default)]
struct RecentLatencies {
    latencies: VecDeque<u64>,
    since: u32,
    p95_ns: Option<u64>,
}

impl RecentLatencies {
    fn add(&mut self, latency_ns: u64) {
        if self.latencies.len() == LATENCIES_MAX {
            self.latencies.pop_front();
        }
        self.latencies.push_back(latency_ns);
        self.since += 1;
        if self.since >= REFRESH_EVERY && self.latencies.len() >= LATENCIES_MIN {
            self.since = 0;
            let mut sorted: Vec<u64> = self.latencies.iter().copied().collect();
            sorted.sort_unstable();
            let rank = (sorted.len() * 95).div_ceil(100);
            self.p95_ns = Some(sorted[rank - 1]);
        }
    }

    fn p95(&self) -> Option<u64> {
        self.p95_ns
    }
}

const WHOLE: u64 = 1_000_000;
/// The maximum number of saved duplicates: about as many requests as are in flight when a busy
/// server stops.
const SAVED_MAX: u64 = 32;

/// How many duplicates are allowed. Each request earns a part of a duplicate. Savings are bounded,
/// so that one bad second cannot spend the savings of a day.
#[derive(Clone, Copy, Debug)]
struct Budget {
    per_request: u64,
    saved: u64,
}

impl Budget {
    fn new(per_million: u64) -> Self {
        // The budget starts empty, so that duplicates never exceed their share.
        Self { per_request: per_million.min(WHOLE), saved: 0 }
    }

    fn earn(&mut self) {
        self.saved = (self.saved + self.per_request).min(SAVED_MAX * WHOLE);
    }

    /// Takes one duplicate from the savings, if possible.
    fn spend(&mut self) -> bool {
        match self.saved.checked_sub(WHOLE) {
            Some(left) => {
                self.saved = left;
                true
            }
            None => false,
        }
    }

    /// Returns a duplicate that was not used.
    fn give_back(&mut self) {
        self.saved = (self.saved + WHOLE).min(SAVED_MAX * WHOLE);
    }
}

#[cfg(test)]
mod tests;
