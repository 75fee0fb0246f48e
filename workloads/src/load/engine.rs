//! The generator's decisions: which request is sent when and on which connection, and how each
//! event counts. This module has no sockets and no clock.
//!
//! The caller passes the time and the events, and the engine returns what to send. So the same code
//! runs with real sockets ([`super::driver`]) and, in tests, with a simulated service and clock.
//!
//! A request is due at its intended time, whatever the service does. If no connection has room, the
//! request waits in the engine. The wait is part of the request's latency and lateness. Too much
//! lateness is a failure, whether the generator or the service causes it.

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
    /// Counted from the intended send time.
    pub(crate) timeout_ns: Nanos,
    /// How late a send may be before the run fails. `None` means no bound.
    pub(crate) most_late_ns: Option<Nanos>,
}

/// A request was sent later than allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overrun {
    pub(crate) late_ns: Nanos,
    pub(crate) bound_ns: Nanos,
    /// The request was late because no connection had room, and not because the generator was slow.
    pub(crate) starved: bool,
}

/// A request for the caller to send now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Send {
    pub(crate) connection: usize,
    pub(crate) query: u32,
}

/// A request, and the time when it was sent or when the engine found that no connection had room.
#[derive(Clone, Copy, Debug)]
struct Request {
    arrival: Arrival,
    since_ns: Nanos,
}

/// The order in which connections are chosen: the fewest requests under way first, then the
/// connection that has had this number for longest.
type Rank = (usize, u64, usize);

#[derive(Debug, Default)]
struct Connection {
    usable: bool,
    in_flight: VecDeque<Request>,
    /// `None` while the connection has no room.
    rank: Option<Rank>,
}

/// The plan, in the order of intended times.
pub(crate) type Arrivals = Box<dyn Iterator<Item = Arrival> + std::marker::Send>;

pub(crate) struct Engine {
    /// `None` after `stop`.
    plan: Option<Peekable<Arrivals>>,
    limits: Limits,
    waiting: VecDeque<Request>,
    connections: Vec<Connection>,
    ranks: BTreeSet<Rank>,
    /// How many ranks have been assigned so far.
    ranked: u64,
    /// Index, deadline and connection of each request, in the order in which they were sent. This
    /// finds the oldest request under way.
    deadlines: VecDeque<(u64, Nanos, usize)>,
    in_flight: usize,
    recorder: Recorder,
}

impl Engine {
    /// Every connection starts unusable. `set_usable` makes it usable.
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

    /// Returns the next request that is due and has a connection. Call it until `None`, then wait.
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

    /// When the engine must run again if no event occurs: the next intended send, or the next
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

    /// The next intended send. The driver polls for this time, to be exact to the microsecond.
    pub(crate) fn next_due(&mut self) -> Option<Nanos> {
        self.plan.as_mut()?.peek().map(|arrival| arrival.at_ns)
    }

    pub(crate) fn is_done(&mut self) -> bool {
        self.in_flight == 0 && self.waiting.is_empty() && self.next_due().is_none()
    }

    /// Sends no more requests. Requests under way still get their answers.
    pub(crate) fn stop(&mut self) {
        self.plan = None;
        self.waiting.clear();
    }

    /// Says whether the connection accepts bytes. A new connection does, a blocked connection does
    /// not.
    pub(crate) fn set_usable(&mut self, connection: usize, usable: bool) {
        self.connections[connection].usable = usable;
        self.rank(connection);
    }

    /// Records an answer to the connection's oldest request. Returns false if no request is under
    /// way there.
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

    /// Records that the connection closed. Its oldest request failed for `reason`, and the later
    /// requests failed because the connection closed.
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

    /// Gives up requests that waited too long for a connection. Returns a connection whose oldest
    /// request timed out, for the caller to close. Call it until `None`.
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

    /// Fails if a request is later than the bound. The request counts as starved if the engine saw
    /// it in time.
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

    /// `sent` is the connection and the time of the send.
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
            // A connection answers in order, so requests older than its first request are answered.
            if first.is_some_and(|request| request.arrival.index <= index) {
                return Some((deadline, connection));
            }
            self.deadlines.pop_front();
        }
        None
    }

    /// Updates the connection's rank.
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
