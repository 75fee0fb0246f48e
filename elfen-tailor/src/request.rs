//! Reconstructs the requests of an unmodified service from the events of its sockets.
//!
//! A request begins when bytes of a client become ready on a connection without an unanswered
//! request. It ends when the last byte of the answer has left, before further bytes become ready. A
//! client may send its next request before the answer (pipelining, HTTP/2). That looks like a long
//! request in several pieces. Such requests are counted separately and not explained.

use std::collections::{BTreeMap, HashMap};

use elfen_rt::signal::event::{Event, EventKind};

use crate::trace::{Gap, Trace};

/// A client's address and port, encoded as in the events of the kernel.
pub fn connection(address: std::net::SocketAddrV4) -> u64 {
    let host = u32::from_le_bytes(address.ip().octets());
    u64::from(host) << 32 | u64::from(address.port())
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Request {
    /// The connection, or the number of the request for a service with marks.
    pub connection: u64,
    /// When the first bytes of the request were ready.
    pub arrived_ns: u64,
    pub read_ns: u64,
    pub reader: u32,
    /// When the last write of the answer returned; `sender` is the thread that wrote it.
    pub sent_ns: u64,
    pub sender: u32,
    /// When the last bytes of the answer left.
    pub ended_ns: u64,
    /// The class of the request, as the service reports it; 0 if the service reports none.
    pub class: u64,
    /// How long each stage took, by the service's stage numbers.
    pub stages: Vec<(u16, u64)>,
}

impl Request {
    pub fn latency_ns(&self) -> u64 {
        self.ended_ns.saturating_sub(self.arrived_ns)
    }
}

/// The request that a thread works for from `from_ns` on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Owner {
    pub from_ns: u64,
    /// Arrival and connection of the request; `None` if the request is unknown.
    pub of: Option<(u64, u64)>,
    /// Whether the thread has already read the request.
    pub read: bool,
}

#[derive(Debug, Default)]
pub struct Requests {
    /// In the order of arrival.
    pub all: Vec<Request>,
    /// How many requests had further bytes before their answer.
    pub unclear: u64,
    pub owners: HashMap<u32, Vec<Owner>>,
}

/// A request that has not ended yet.
#[derive(Clone, Copy, Debug)]
struct Open {
    arrived_ns: u64,
    read: Option<(u64, u32)>,
    sent: Option<(u64, u32)>,
    left_ns: Option<u64>,
    unclear: bool,
}

/// An event in which a thread read a request, or wrote a part of its answer.
#[derive(Clone, Copy, Debug)]
struct Touch {
    at_ns: u64,
    /// Arrival and connection of the request.
    request: (u64, u64),
    reads: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Connection {
    /// The previous request. Its answer has left, but the call that wrote the answer may not have
    /// returned.
    before: Option<Open>,
    now: Option<Open>,
}

/// If data follows the previous answer after more than this time, the data is a message that the
/// server pushes. No client waits for it.
const PUSHED_NS: u64 = 1_000_000_000;

impl Requests {
    /// Finds the requests of a trace; `events` are its [`Trace::events_in_order`].
    pub fn new(trace: &Trace, events: &[(u32, Event)]) -> Self {
        match trace.head.port {
            0 => Self::of_marks(trace),
            _ => Self::of_sockets(trace, events),
        }
    }

    fn of_sockets(trace: &Trace, events: &[(u32, Event)]) -> Self {
        let mut found = Self::default();
        let mut connections: BTreeMap<u64, Connection> = BTreeMap::new();
        let mut touched: HashMap<u32, Vec<Touch>> = HashMap::new();
        for (_, event) in events {
            let at_ns = event.at_ns;
            // At this time, not all eBPF programs were attached yet.
            if at_ns < trace.head.began_ns {
                continue;
            }
            let mut touch = |open: &Open, connection: u64, reads: bool| {
                let request = (open.arrived_ns, connection);
                touched.entry(event.thread).or_default().push(Touch { at_ns, request, reads });
            };
            match event.kind {
                EventKind::Ready { connection, bytes } if bytes > 0 => {
                    let at = connections.entry(connection).or_default();
                    found.ready(at, connection, at_ns, &trace.gaps);
                }
                EventKind::Received { connection, bytes, peek: false } if bytes > 0 => {
                    let Some(at) = connections.get_mut(&connection) else { continue };
                    if let Some(before) = at.before.take() {
                        found.close(connection, before, &trace.gaps);
                    }
                    if let Some(open) = &mut at.now {
                        open.read.get_or_insert((at_ns, event.thread));
                        touch(open, connection, true);
                    }
                }
                EventKind::Sent { connection, .. } => {
                    let Some(at) = connections.get_mut(&connection) else { continue };
                    let unread = at.now.is_none_or(|now| now.read.is_none());
                    let open = if unread { &mut at.before } else { &mut at.now };
                    let Some(open) = open else { continue };
                    let pushed = open.sent.is_some_and(|(last_ns, _)| at_ns - last_ns > PUSHED_NS);
                    if !pushed {
                        open.sent = Some((at_ns, event.thread));
                        touch(open, connection, false);
                    }
                }
                EventKind::Transmitted { connection, .. } => {
                    let Some(at) = connections.get_mut(&connection) else { continue };
                    let open = at.now.as_mut().filter(|open| open.read.is_some());
                    let Some(open) = open else { continue };
                    let last_ns = open.left_ns.unwrap_or(at_ns);
                    if at_ns - last_ns <= PUSHED_NS {
                        open.left_ns = Some(at_ns);
                    }
                }
                _ => {}
            }
        }
        for (connection, at) in connections {
            for open in [at.before, at.now].into_iter().flatten() {
                found.close(connection, open, &trace.gaps);
            }
        }
        found.all.sort_by_key(|request| (request.arrived_ns, request.connection));
        found.owners = touched.into_iter().map(|(thread, all)| (thread, owners(&all))).collect();
        found
    }

    fn ready(&mut self, at: &mut Connection, connection: u64, at_ns: u64, gaps: &[Gap]) {
        let new = Open { arrived_ns: at_ns, read: None, sent: None, left_ns: None, unclear: false };
        match &mut at.now {
            None => at.now = Some(new),
            Some(open) if open.sent.is_some() || open.left_ns.is_some() => {
                if let Some(before) = at.before.replace(*open) {
                    self.close(connection, before, gaps);
                }
                at.now = Some(new);
            }
            Some(open) if open.read.is_some() => open.unclear = true,
            // More bytes of a request that no thread has read yet.
            Some(_) => {}
        }
    }

    fn close(&mut self, connection: u64, open: Open, gaps: &[Gap]) {
        let Open { arrived_ns, read: Some((read_ns, reader)), sent, left_ns, unclear } = open
        else {
            return;
        };
        // Without a write, the thread that answered is unknown.
        let Some((sent_ns, sender)) = sent else { return };
        let ended_ns = left_ns.unwrap_or(sent_ns);
        // The answer may be among the lost events. So the request counts as incomplete, not as
        // overlapping.
        let lost = |gap: &Gap| gap.from_ns <= ended_ns && arrived_ns <= gap.to_ns;
        if unclear && !gaps.iter().any(lost) || ended_ns < read_ns || read_ns < arrived_ns {
            self.unclear += 1;
            return;
        }
        self.all.push(Request {
            connection,
            arrived_ns,
            read_ns,
            reader,
            sent_ns,
            sender,
            ended_ns,
            class: 0,
            stages: Vec::new(),
        });
    }

    /// The request for which a thread worked just before `at_ns`.
    pub fn owner_at(&self, thread: u32, at_ns: u64) -> Option<Owner> {
        let owners = self.owners.get(&thread)?;
        let after = owners.partition_point(|owner| owner.from_ns < at_ns);
        owners.get(after.checked_sub(1)?).copied()
    }

    /// Whether a thread reads or answers requests itself.
    pub fn has_owners(&self, thread: u32) -> bool {
        self.owners.contains_key(&thread)
    }
}

/// For which request a thread works over time. After a read, it is the request that the thread has
/// read. Before a write, it is the request that the thread answers.
fn owners(touched: &[Touch]) -> Vec<Owner> {
    let owner = |(at, touch): (usize, &Touch)| {
        let next = touched.get(at + 1);
        let (of, read) = match (touch.reads, next) {
            (true, _) => (Some(touch.request), true),
            (false, Some(next)) => (Some(next.request), !next.reads),
            (false, None) => (None, false),
        };
        Owner { from_ns: touch.at_ns, of, read }
    };
    touched.iter().enumerate().map(owner).collect()
}
