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

use super::arrivals::Arrival;
use super::outcome::{Failure, Reply, Timing};
use super::record::{Recorder, Sample};
use crate::units::{Nanos, show_nanos};
use std::collections::VecDeque;
use std::fmt;
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
    /// Whether waiting for a connection counts against that bound. A search lets it pass: to a
    /// service that is too slow, the objective says so.
    pub(crate) starving_fails: bool,
}

/// The schedule was not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overrun {
    pub(crate) late_ns: Nanos,
    pub(crate) bound_ns: Nanos,
    /// The request waited for a connection rather than for the generator.
    pub(crate) starved: bool,
}

impl fmt::Display for Overrun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (late, bound) = (show_nanos(self.late_ns), show_nanos(self.bound_ns));
        write!(f, "a request was sent {late} late (bound {bound}) because ")?;
        if self.starved {
            f.write_str(
                "no connection had room: use more --connections, --pipeline, or --allow-late",
            )
        } else {
            f.write_str(
                "the generator fell behind: give it a CPU of its own (--cpu), or --allow-late",
            )
        }
    }
}

/// What the caller is to write now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Send {
    pub(crate) connection: usize,
    pub(crate) query: u32,
}

#[derive(Debug)]
struct Waiting {
    arrival: Arrival,
    /// When it was due and the generator looked at it, and no connection had room.
    since_ns: Nanos,
}

#[derive(Debug)]
struct InFlight {
    arrival: Arrival,
    sent_ns: Nanos,
}

#[derive(Debug, Default)]
struct Connection {
    usable: bool,
    in_flight: VecDeque<InFlight>,
    listed_idle: bool,
    listed_shared: bool,
}

/// The plan, in the order of intended times.
pub(crate) type Arrivals = Box<dyn Iterator<Item = Arrival> + std::marker::Send>;

pub(crate) struct Engine {
    /// `None` once stopped.
    plan: Option<Peekable<Arrivals>>,
    limits: Limits,
    waiting: VecDeque<Waiting>,
    connections: Vec<Connection>,
    /// Connections with nothing under way, longest idle first. Entries may be stale: see `pick`.
    idle: VecDeque<usize>,
    /// Connections with something under way and room for more. Entries may be stale too.
    shared: VecDeque<usize>,
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
            idle: VecDeque::new(),
            shared: VecDeque::new(),
            deadlines: VecDeque::new(),
            in_flight: 0,
            limits,
            recorder,
        }
    }

    /// The next request that is due and has a connection. Call until `None`, then wait.
    pub(crate) fn next_send(&mut self, now: Nanos) -> Result<Option<Send>, Overrun> {
        while let Some(arrival) = self.take_due(now) {
            if self.waiting.is_empty()
                && let Some(connection) = self.pick()
            {
                self.hold_to_bound(&arrival, now, now)?;
                return Ok(Some(self.send(arrival, connection, now)));
            }
            if self.recorder.measures(arrival.at_ns) {
                self.recorder.waited += 1;
            }
            self.waiting.push_back(Waiting { arrival, since_ns: now });
        }
        let Some(first) = self.waiting.front() else { return Ok(None) };
        let (arrival, since) = (first.arrival, first.since_ns);
        self.hold_to_bound(&arrival, since, now)?;
        let Some(connection) = self.pick() else { return Ok(None) };
        self.waiting.pop_front();
        Ok(Some(self.send(arrival, connection, now)))
    }

    /// When there is something to do even if nothing happens: the next intended send, or the next
    /// timeout.
    pub(crate) fn wake_at(&mut self) -> Option<Nanos> {
        let due = self.next_due();
        let waiting = self.waiting.front().map(|first| {
            let at = first.arrival.at_ns;
            let bound = self.limits.most_late_ns;
            let bound = bound.filter(|_| self.limits.starving_fails && self.recorder.measures(at));
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

    pub(crate) fn opened(&mut self, connection: usize) {
        self.connections[connection].usable = true;
        self.list(connection);
    }

    /// The connection takes no more bytes for now, or takes them again.
    pub(crate) fn clogged(&mut self, connection: usize, clogged: bool) {
        self.connections[connection].usable = !clogged;
        if !clogged {
            self.list(connection);
        }
    }

    /// An answer to the oldest request under way on the connection. False: nothing was asked there.
    pub(crate) fn replied(&mut self, connection: usize, now: Nanos, reply: &Reply) -> bool {
        let Some(request) = self.connections[connection].in_flight.pop_front() else {
            return false;
        };
        self.in_flight -= 1;
        self.list(connection);
        self.recorder.record(&Sample {
            index: request.arrival.index,
            query: request.arrival.query,
            connection: Some(connection),
            intended_ns: request.arrival.at_ns,
            sent_ns: Some(request.sent_ns),
            done_ns: now,
            result: reply.result,
            timing: reply.timing,
        });
        true
    }

    /// The connection is gone: what was under way on it failed, the oldest for `reason`, those
    /// behind it because it closed.
    pub(crate) fn closed(&mut self, connection: usize, now: Nanos, reason: Failure) {
        self.connections[connection].usable = false;
        let lost = std::mem::take(&mut self.connections[connection].in_flight);
        self.in_flight -= lost.len();
        for (behind, request) in lost.into_iter().enumerate() {
            let failure = if behind == 0 { reason } else { Failure::Closed };
            self.fail(request.arrival, Some((connection, request.sent_ns)), now, failure);
        }
    }

    /// Gives up on requests that waited too long for a connection, and names a connection whose
    /// oldest request timed out, to be closed by the caller. Call until `None`.
    pub(crate) fn expired(&mut self, now: Nanos) -> Option<usize> {
        let timeout = self.limits.timeout_ns;
        while let Some(first) = self.waiting.front()
            && first.arrival.at_ns + timeout <= now
        {
            let arrival = first.arrival;
            self.waiting.pop_front();
            self.fail(arrival, None, now, Failure::Timeout);
        }
        let (_, connection) = self.oldest().filter(|(deadline, _)| *deadline <= now)?;
        Some(connection)
    }

    pub(crate) fn into_recorder(self) -> Recorder {
        self.recorder
    }

    fn take_due(&mut self, now: Nanos) -> Option<Arrival> {
        self.plan.as_mut()?.next_if(|arrival| arrival.at_ns <= now)
    }

    fn send(&mut self, arrival: Arrival, connection: usize, now: Nanos) -> Send {
        self.connections[connection].in_flight.push_back(InFlight { arrival, sent_ns: now });
        self.in_flight += 1;
        self.deadlines.push_back((
            arrival.index,
            arrival.at_ns + self.limits.timeout_ns,
            connection,
        ));
        self.list(connection);
        Send { connection, query: arrival.query }
    }

    fn hold_to_bound(&self, arrival: &Arrival, since: Nanos, now: Nanos) -> Result<(), Overrun> {
        let Some(bound_ns) = self.limits.most_late_ns else { return Ok(()) };
        let late_ns = now.saturating_sub(arrival.at_ns);
        if late_ns <= bound_ns || !self.recorder.measures(arrival.at_ns) {
            return Ok(());
        }
        let starved = since.saturating_sub(arrival.at_ns) <= bound_ns;
        if starved && !self.limits.starving_fails {
            return Ok(());
        }
        Err(Overrun { late_ns, bound_ns, starved })
    }

    fn fail(
        &mut self,
        arrival: Arrival,
        sent: Option<(usize, Nanos)>,
        now: Nanos,
        failure: Failure,
    ) {
        self.recorder.record(&Sample {
            index: arrival.index,
            query: arrival.query,
            connection: sent.map(|(connection, _)| connection),
            intended_ns: arrival.at_ns,
            sent_ns: sent.map(|(_, sent_ns)| sent_ns),
            done_ns: now,
            result: Err(failure),
            timing: Timing::default(),
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

    /// Enters the connection into the list it now belongs to, at most once in each.
    fn list(&mut self, at: usize) {
        let connection = &mut self.connections[at];
        if !connection.usable {
            return;
        }
        let under_way = connection.in_flight.len();
        if under_way == 0 && !connection.listed_idle {
            connection.listed_idle = true;
            self.idle.push_back(at);
        } else if (1..self.limits.pipeline).contains(&under_way) && !connection.listed_shared {
            connection.listed_shared = true;
            self.shared.push_back(at);
        }
    }

    /// A connection with room: an idle one if there is one, else the one that waited longest for a
    /// further request.
    fn pick(&mut self) -> Option<usize> {
        while let Some(at) = self.idle.pop_front() {
            let connection = &mut self.connections[at];
            connection.listed_idle = false;
            if connection.usable && connection.in_flight.is_empty() {
                return Some(at);
            }
        }
        while let Some(at) = self.shared.pop_front() {
            let connection = &mut self.connections[at];
            connection.listed_shared = false;
            if connection.usable && (1..self.limits.pipeline).contains(&connection.in_flight.len())
            {
                return Some(at);
            }
        }
        None
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Engine");
        shown.field("limits", &self.limits).field("in_flight", &self.in_flight);
        shown.finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
