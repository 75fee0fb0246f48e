//! The generator's decisions, without sockets and without a clock: what to send when and where, and
//! what an event means.
//!
//! The caller says what time it is and what happened; the engine says what to send. So the same
//! code runs against the kernel ([`super::driver`]) and, in tests, against a simulated service and
//! a simulated clock.
//!
//! A request is due at its intended time whatever the service does. If no connection has room, it
//! waits here, and the wait is part of its latency and of its lateness: to be late is a failure,
//! whether the generator or the service is the cause.

use super::plan::Arrival;
use super::protocol::{Fault, Reply, Timing};
use super::record::{Recorder, Sample};
use crate::units::Nanos;
use std::collections::{BTreeSet, VecDeque};
use std::iter::Peekable;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) connections: usize,
    /// Requests that may be under way on one connection.
    pub(crate) pipeline: usize,
    /// From the intended send time.
    pub(crate) timeout_ns: Nanos,
    /// How late a send may be before the run fails; `None` lets it go on.
    pub(crate) most_late_ns: Option<Nanos>,
}

/// The schedule was not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overrun {
    pub(crate) late_ns: Nanos,
    pub(crate) bound_ns: Nanos,
    /// The request waited for a connection rather than for the generator.
    pub(crate) starved: bool,
}

/// What the caller is to write now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Send {
    pub(crate) connection: usize,
    pub(crate) query: u32,
}

/// A request and a moment: when it was sent, or when the generator saw that no connection had room.
#[derive(Clone, Copy, Debug)]
struct Request {
    arrival: Arrival,
    since_ns: Nanos,
}

/// The order in which connections are taken: first those with the fewest requests under way, of
/// these the one that has been so for longest.
type Rank = (usize, u64, usize);

#[derive(Debug, Default)]
struct Connection {
    usable: bool,
    in_flight: VecDeque<Request>,
    /// `None` while it has no room.
    rank: Option<Rank>,
}

/// The plan, in the order of intended times.
pub(crate) type Arrivals = Box<dyn Iterator<Item = Arrival> + std::marker::Send>;

pub(crate) struct Engine {
    /// `None` once stopped.
    plan: Option<Peekable<Arrivals>>,
    limits: Limits,
    waiting: VecDeque<Request>,
    connections: Vec<Connection>,
    ranks: BTreeSet<Rank>,
    /// How many ranks were ever given.
    ranked: u64,
    /// Requests in the order in which they were sent, to find the oldest that is under way: index,
    /// deadline and connection of each.
    deadlines: VecDeque<(u64, Nanos, usize)>,
    in_flight: usize,
    recorder: Recorder,
}

impl Engine {
    /// No connection is usable before it was `opened`.
    pub(crate) fn new(plan: Arrivals, limits: Limits, recorder: Recorder) -> Self {
        Self {
            plan: Some(plan.peekable()),
            waiting: VecDeque::new(),
            connections: (0..limits.connections).map(|_| Connection::default()).collect(),
            ranks: BTreeSet::new(),
            ranked: 0,
            deadlines: VecDeque::new(),
            in_flight: 0,
            limits,
            recorder,
        }
    }

    /// The next request that is due and has a connection. Call until `None`, then wait.
    pub(crate) fn next_send(&mut self, now: Nanos) -> Result<Option<Send>, Overrun> {
        while let Some(plan) = &mut self.plan
            && let Some(arrival) = plan.next_if(|arrival| arrival.at_ns <= now)
        {
            let request = Request { arrival, since_ns: now };
            if self.waiting.is_empty()
                && let Some(connection) = self.pick()
            {
                self.hold_to_bound(request, now)?;
                return Ok(Some(self.send(arrival, connection, now)));
            }
            if self.recorder.measures(arrival.at_ns) {
                self.recorder.waited += 1;
            }
            self.waiting.push_back(request);
        }
        let Some(first) = self.waiting.front().copied() else { return Ok(None) };
        self.hold_to_bound(first, now)?;
        let Some(connection) = self.pick() else { return Ok(None) };
        self.waiting.pop_front();
        Ok(Some(self.send(first.arrival, connection, now)))
    }

    /// When there is something to do even if nothing happens: the next intended send, or the next
    /// timeout.
    pub(crate) fn wake_at(&mut self) -> Option<Nanos> {
        let due = self.next_due();
        let waiting = self.waiting.front().map(|first| {
            let at = first.arrival.at_ns;
            let bound = self.limits.most_late_ns.filter(|_| self.recorder.measures(at));
            let timeout = self.limits.timeout_ns;
            at + bound.map_or(timeout, |bound| timeout.min(bound + 1))
        });
        let timeout = self.oldest().map(|(deadline, _)| deadline);
        [due, waiting, timeout].into_iter().flatten().min()
    }

    /// The next intended send alone: what deserves to be met to the microsecond.
    pub(crate) fn next_due(&mut self) -> Option<Nanos> {
        self.plan.as_mut()?.peek().map(|arrival| arrival.at_ns)
    }

    pub(crate) fn is_done(&mut self) -> bool {
        self.in_flight == 0 && self.waiting.is_empty() && self.next_due().is_none()
    }

    /// No request is sent any more; those under way are waited for.
    pub(crate) fn stop(&mut self) {
        self.plan = None;
        self.waiting.clear();
    }

    /// The connection takes bytes, or takes none: it was opened or is clogged.
    pub(crate) fn set_usable(&mut self, connection: usize, usable: bool) {
        self.connections[connection].usable = usable;
        self.rank(connection);
    }

    /// An answer to the oldest request under way on the connection. False: nothing was asked there.
    pub(crate) fn replied(&mut self, connection: usize, now: Nanos, reply: &Reply) -> bool {
        let Some(request) = self.connections[connection].in_flight.pop_front() else {
            return false;
        };
        self.in_flight -= 1;
        self.rank(connection);
        let sent = Some((connection, request.since_ns));
        self.record(request.arrival, sent, now, reply.result, reply.timing);
        true
    }

    /// The connection is gone: what was under way on it failed, the oldest for `reason`, those
    /// behind it because it closed.
    pub(crate) fn closed(&mut self, connection: usize, now: Nanos, reason: Fault) {
        let lost = std::mem::take(&mut self.connections[connection].in_flight);
        self.set_usable(connection, false);
        self.in_flight -= lost.len();
        for (behind, request) in lost.into_iter().enumerate() {
            let failure = if behind == 0 { reason } else { Fault::Closed };
            let sent = Some((connection, request.since_ns));
            self.record(request.arrival, sent, now, Err(failure), Timing::default());
        }
    }

    /// Gives up on requests that waited too long for a connection, and names a connection whose
    /// oldest request timed out, to be closed by the caller. Call until `None`.
    pub(crate) fn expired(&mut self, now: Nanos) -> Option<usize> {
        let timeout = self.limits.timeout_ns;
        let is_over = |first: &mut Request| first.arrival.at_ns + timeout <= now;
        while let Some(request) = self.waiting.pop_front_if(is_over) {
            self.record(request.arrival, None, now, Err(Fault::Timeout), Timing::default());
        }
        let (_, connection) = self.oldest().filter(|(deadline, _)| *deadline <= now)?;
        Some(connection)
    }

    pub(crate) fn into_recorder(self) -> Recorder {
        self.recorder
    }

    fn send(&mut self, arrival: Arrival, connection: usize, now: Nanos) -> Send {
        let request = Request { arrival, since_ns: now };
        self.connections[connection].in_flight.push_back(request);
        self.in_flight += 1;
        let deadline = arrival.at_ns + self.limits.timeout_ns;
        self.deadlines.push_back((arrival.index, deadline, connection));
        self.rank(connection);
        Send { connection, query: arrival.query }
    }

    /// Refuses to go on with a request that is too late; it is starved if it was looked at in time.
    fn hold_to_bound(&self, request: Request, now: Nanos) -> Result<(), Overrun> {
        let Some(bound_ns) = self.limits.most_late_ns else { return Ok(()) };
        let at_ns = request.arrival.at_ns;
        let late_ns = now.saturating_sub(at_ns);
        if late_ns <= bound_ns || !self.recorder.measures(at_ns) {
            return Ok(());
        }
        let starved = request.since_ns.saturating_sub(at_ns) <= bound_ns;
        Err(Overrun { late_ns, bound_ns, starved })
    }

    /// `sent` says on which connection, and when.
    fn record(
        &mut self,
        arrival: Arrival,
        sent: Option<(usize, Nanos)>,
        now: Nanos,
        result: Result<(), Fault>,
        timing: Timing,
    ) {
        self.recorder.record(&Sample {
            index: arrival.index,
            query: arrival.query,
            connection: sent.map(|(connection, _)| connection),
            intended_ns: arrival.at_ns,
            sent_ns: sent.map(|(_, sent_ns)| sent_ns),
            done_ns: now,
            result,
            timing,
        });
    }

    /// The oldest request under way: its deadline and its connection.
    fn oldest(&mut self) -> Option<(Nanos, usize)> {
        while let Some((index, deadline, connection)) = self.deadlines.front().copied() {
            let first = self.connections[connection].in_flight.front();
            // A connection answers in order: what is older than its first request is answered.
            if first.is_some_and(|request| request.arrival.index <= index) {
                return Some((deadline, connection));
            }
            self.deadlines.pop_front();
        }
        None
    }

    /// Gives the connection the rank that it now has.
    fn rank(&mut self, at: usize) {
        let connection = &mut self.connections[at];
        if let Some(rank) = connection.rank.take() {
            self.ranks.remove(&rank);
        }
        let under_way = connection.in_flight.len();
        if connection.usable && under_way < self.limits.pipeline {
            self.ranked += 1;
            let rank = (under_way, self.ranked, at);
            connection.rank = Some(rank);
            self.ranks.insert(rank);
        }
    }

    fn pick(&self) -> Option<usize> {
        self.ranks.first().map(|(.., connection)| *connection)
    }
}

#[cfg(test)]
mod tests;
