//! Requests of an unmodified service, from what went through its sockets.
//!
//! A request begins when bytes of a client become ready on a connection that owes no answer, and
//! ends when the last byte of the answer has left, before further bytes become ready. A client that
//! asks again before it has its answer (pipelining, HTTP/2) can't be told from one that sends a
//! long request in pieces: such requests are counted apart and not explained.

use std::collections::{BTreeMap, HashMap};

use elfen_rt::signal::event::Kind;

use crate::timeline::in_order;
use crate::trace::{Gap, Tale};

/// A client's address and port, as the kernel's events have them.
pub fn connection(address: std::net::SocketAddrV4) -> u64 {
    let host = u32::from_le_bytes(address.ip().octets());
    u64::from(host) << 32 | u64::from(address.port())
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Request {
    /// Of a service that says itself what it does: the request's number.
    pub connection: u64,
    /// Its first bytes were ready.
    pub arrived_ns: u64,
    pub read_ns: u64,
    pub reader: u32,
    /// The thread that wrote the answer, and when it had.
    pub sent_ns: u64,
    pub sender: u32,
    /// The answer's last bytes left.
    pub ended_ns: u64,
    /// What kind of request the service says it is; 0 if it does not say.
    pub class: u64,
    /// How long each stage took, by the service's numbers.
    pub stages: Vec<(u16, u64)>,
}

impl Request {
    pub fn latency_ns(&self) -> u64 {
        self.ended_ns.saturating_sub(self.arrived_ns)
    }
}

/// For which request a thread works from a time on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Owner {
    pub from_ns: u64,
    /// Arrival and connection of the request; `None` if it is not known.
    pub of: Option<(u64, u64)>,
    /// It has read the request already.
    pub read: bool,
}

#[derive(Debug, Default)]
pub struct Requests {
    /// By arrival.
    pub all: Vec<Request>,
    /// Further bytes came before their answer.
    pub unclear: u64,
    pub owners: HashMap<u32, Vec<Owner>>,
}

/// A request that is not finished.
#[derive(Clone, Copy, Debug)]
struct Open {
    arrived_ns: u64,
    read: Option<(u64, u32)>,
    sent: Option<(u64, u32)>,
    left_ns: Option<u64>,
    unclear: bool,
}

/// A thread read a request, or answered it.
#[derive(Clone, Copy, Debug)]
struct Touch {
    at_ns: u64,
    /// Arrival and connection.
    request: (u64, u64),
    reads: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Connection {
    /// Its answer has left; the call that wrote it may not have returned.
    before: Option<Open>,
    now: Option<Open>,
}

/// A client waits for no answer that begins so long after the one before: that is a new message,
/// pushed to it.
const PUSHED_NS: u64 = 1_000_000_000;

impl Requests {
    pub fn of(tale: &Tale) -> Self {
        match tale.head.port {
            0 => Self::of_marks(tale),
            _ => Self::of_sockets(tale),
        }
    }

    fn of_sockets(tale: &Tale) -> Self {
        let mut found = Self::default();
        let mut connections: BTreeMap<u64, Connection> = BTreeMap::new();
        let mut touched: HashMap<u32, Vec<Touch>> = HashMap::new();
        for (_, event) in in_order(tale) {
            let at_ns = event.at_ns;
            // Not all programs were attached yet.
            if at_ns < tale.head.began_ns {
                continue;
            }
            let mut touch = |open: &Open, connection: u64, reads: bool| {
                let request = (open.arrived_ns, connection);
                touched.entry(event.thread).or_default().push(Touch { at_ns, request, reads });
            };
            match event.kind {
                Kind::Ready { connection, bytes } if bytes > 0 => {
                    let at = connections.entry(connection).or_default();
                    found.ready(at, connection, at_ns, &tale.gaps);
                }
                Kind::Received { connection, bytes, peek: false } if bytes > 0 => {
                    let Some(at) = connections.get_mut(&connection) else { continue };
                    if let Some(before) = at.before.take() {
                        found.close(connection, before, &tale.gaps);
                    }
                    if let Some(open) = &mut at.now {
                        open.read.get_or_insert((at_ns, event.thread));
                        touch(open, connection, true);
                    }
                }
                Kind::Sent { connection, .. } => {
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
                Kind::Transmitted { connection, .. } => {
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
                found.close(connection, open, &tale.gaps);
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
            // More of what nobody has read yet.
            Some(_) => {}
        }
    }

    fn close(&mut self, connection: u64, open: Open, gaps: &[Gap]) {
        let Open { arrived_ns, read: Some((read_ns, reader)), sent, left_ns, unclear } = open
        else {
            return;
        };
        // Without a write of its own nothing is known of who answered.
        let Some((sent_ns, sender)) = sent else { return };
        let ended_ns = left_ns.unwrap_or(sent_ns);
        // Where events are missing an answer may be, so it is no sign of overlapping requests: such
        // a request is incomplete.
        let lost = |gap: &Gap| gap.from_ns <= ended_ns && arrived_ns <= gap.to_ns;
        if unclear && !gaps.iter().any(lost) || ended_ns < read_ns || read_ns < arrived_ns {
            self.unclear += 1;
            return;
        }
        let (class, stages) = (0, Vec::new());
        self.all.push(Request {
            connection,
            arrived_ns,
            read_ns,
            reader,
            sent_ns,
            sender,
            ended_ns,
            class,
            stages,
        });
    }

    /// What a thread worked for, before a time.
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

/// From a read on, a thread works for what it has read; before it writes, for what it writes.
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
