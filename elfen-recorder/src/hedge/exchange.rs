//! Requests on their way to servers, answers on their way to clients, and what becomes of those
//! that fail.

mod failing;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;

use elfen_hedge_policy::{Double, Hedge, Server};
use elfen_rt::clock::monotonic_ns;
use mio::{Interest, Registry, Token};
use serde::Serialize;

use super::body::Body;
use super::client::{Client, Exchange, Inbox, Outbox, Request};
use super::head::{Refusal, refused};
use super::link::{Failure, For, Link, Next, Piece};
use super::places::Places;
use super::warm::Warming;

/// An answer that a client does not take waits in the server from here on.
const MOST_WAITING: usize = 256 << 10;
/// Then it is the turn of others: an answer may have no end.
const MOST_READS: usize = 16;
/// A late answer that is longer is not waited for: its connection is closed.
const MOST_DRAINED: usize = 1 << 20;
/// Connections to a server that wait for a request.
const MOST_IDLE: usize = 256;
/// Connections with late answers: those to a server that stands still for good.
const MOST_LATE: usize = 1024;

/// What the policy does not know of.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Counts {
    /// Sent to the other server because the first was dead.
    pub moved: u64,
    /// The client got an error of ours: no server, or none in time.
    pub unanswered: u64,
    /// Answers that came second, and went nowhere.
    pub late: u64,
}

/// What happens between clients and servers.
#[derive(Debug)]
pub(super) struct Exchanges {
    pub(super) hedge: Hedge,
    pub(super) counts: Counts,
    pub(super) clients: Places<Client>,
    pub(super) links: Places<Link>,
    pub(super) warming: Warming,
    registry: Registry,
    servers: [SocketAddr; 2],
    repeatable: Vec<String>,
    give_up_ns: u64,
    idle: [Vec<usize>; 2],
    /// A server took no connection when it was tried last.
    pub(super) down: [bool; 2],
    by_id: HashMap<u64, usize>,
    deadlines: VecDeque<(u64, u64)>,
    late: usize,
    /// Connections to servers on which more may have come than was read.
    unread: Vec<usize>,
    last_id: u64,
}

/// Tokens: clients are even, links odd, from here on.
pub(super) const FIRST_TOKEN: usize = 2;

pub(super) fn client_token(at: usize) -> Token {
    Token(FIRST_TOKEN + 2 * at)
}

pub(super) fn link_token(at: usize) -> Token {
    Token(FIRST_TOKEN + 2 * at + 1)
}

impl Exchanges {
    pub(super) fn new(
        hedge: Hedge,
        registry: Registry,
        servers: [SocketAddr; 2],
        repeatable: Vec<String>,
        give_up_ns: u64,
    ) -> Self {
        Self {
            hedge,
            counts: Counts::default(),
            clients: Places::new(),
            links: Places::new(),
            warming: Warming::default(),
            registry,
            servers,
            repeatable,
            give_up_ns,
            idle: [Vec::new(), Vec::new()],
            down: [false; 2],
            by_id: HashMap::new(),
            deadlines: VecDeque::new(),
            late: 0,
            unread: Vec::new(),
            last_id: 0,
        }
    }

    pub(super) fn accept(&mut self, mut stream: mio::net::TcpStream) -> io::Result<()> {
        // A kernel that can't send at once sends later.
        let _slower = stream.set_nodelay(true);
        let interests = Interest::READABLE | Interest::WRITABLE;
        self.registry.register(&mut stream, client_token(self.clients.next()), interests)?;
        let (inbox, outbox) = (Inbox::default(), Outbox::default());
        let (exchange, is_last, closes) = (None, false, false);
        let at = self.clients.add(Client { stream, inbox, outbox, exchange, is_last, closes });
        self.client_reads(at);
        Ok(())
    }

    /// Takes the next request of a client that has none under way.
    pub(super) fn client_reads(&mut self, at: usize) {
        let Some(client) = self.clients.get(at) else { return };
        if client.exchange.is_some() || client.closes {
            return;
        }
        // What is here already first: its sender may have ended its side behind it.
        let mut next = client.inbox.next(&mut client.outbox);
        let mut ended = false;
        if next == Ok(None) {
            match client.inbox.read(&mut client.stream) {
                Ok(end) => ended = end,
                Err(_) => return self.client_gone(at),
            }
            next = client.inbox.next(&mut client.outbox);
        }
        match next {
            Ok(Some(request)) => self.begin(at, request),
            Ok(None) if ended && client.outbox.is_empty() => self.client_gone(at),
            Ok(None) => {
                client.closes = ended;
                self.client_writes(at);
            }
            Err(refusal) => self.refuse(at, refusal),
        }
    }

    pub(super) fn client_writes(&mut self, at: usize) {
        let Some(client) = self.clients.get(at) else { return };
        let sent = client.outbox.send(&mut client.stream);
        if sent.is_err() || client.closes && client.outbox.is_empty() {
            return self.client_gone(at);
        }
        let has_room = client.outbox.len() < MOST_WAITING / 2;
        let winner = client.exchange.as_ref().and_then(|exchange| exchange.winner);
        let Some(winner) = winner.filter(|_| has_room) else { return };
        let stalled = self.links.get(winner).is_some_and(|link| std::mem::take(&mut link.stalled));
        if stalled {
            self.link_reads(winner);
        }
    }

    /// An error of ours, and the end of the connection.
    fn refuse(&mut self, at: usize, refusal: Refusal) {
        let Some(client) = self.clients.get(at) else { return };
        client.outbox.add(&refused(refusal));
        client.closes = true;
        self.client_writes(at);
    }

    pub(super) fn client_gone(&mut self, at: usize) {
        let Some(mut client) = self.clients.remove(at) else { return };
        // It is closed right behind this.
        let _closed = self.registry.deregister(&mut client.stream);
        let Some(exchange) = client.exchange else { return };
        self.hedge.gone(exchange.id);
        self.by_id.remove(&exchange.id);
        for link in exchange.links.into_iter().flatten() {
            self.close(link);
        }
    }

    fn begin(&mut self, at: usize, request: Request) {
        self.last_id += 1;
        let (id, now_ns) = (self.last_id, monotonic_ns());
        let repeats = self.repeatable.contains(&request.method);
        let server = self.hedge.comes(id, now_ns, repeats);
        let Some(client) = self.clients.get(at) else { return };
        let request = Rc::new(request);
        if repeats {
            self.warming.record(&request);
        }
        client.exchange = Some(Exchange {
            id,
            request,
            repeats,
            links: [None; 2],
            failed: [false; 2],
            winner: None,
        });
        self.by_id.insert(id, at);
        self.deadlines.push_back((now_ns.saturating_add(self.give_up_ns), id));
        self.send(at, server, false);
    }

    /// Sends a client's request to a server, by a connection that waits for one or by a new one.
    fn send(&mut self, at: usize, server: Server, anew: bool) {
        let waiting = if anew { None } else { self.waiting(server) };
        let link = waiting.map_or_else(|| self.connect(server), Ok);
        let Some(exchange) = self.clients.get(at).and_then(|client| client.exchange.as_mut())
        else {
            return;
        };
        match link {
            Ok(link) => {
                exchange.links[server.index()] = Some(link);
                let request = Rc::clone(&exchange.request);
                let Some(taken) = self.links.get(link) else { return };
                taken.begin(request, For::Client(at));
                // If it can't be sent, reading says why.
                let _told = taken.write();
            }
            Err(_) => {
                let failure = Failure { server, fresh: true, unsent: true, heard: false };
                self.failed(at, failure);
            }
        }
    }

    /// A connection that waits for a request. One on which something came meanwhile, or whose end,
    /// is not used: what came would be taken for the next answer.
    pub(super) fn waiting(&mut self, server: Server) -> Option<usize> {
        while let Some(at) = self.idle[server.index()].pop() {
            let Some(link) = self.links.get(at) else { continue };
            match link.read(&mut [0]) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Some(at),
                _ => self.close(at),
            }
        }
        None
    }

    pub(super) fn connect(&mut self, server: Server) -> io::Result<usize> {
        let mut link = Link::connect(server, self.servers[server.index()])?;
        let interests = Interest::READABLE | Interest::WRITABLE;
        self.registry.register(&mut link.stream, link_token(self.links.next()), interests)?;
        Ok(self.links.add(link))
    }

    /// The policy has a request sent to the other server too.
    pub(super) fn double(&mut self, doubles: Vec<Double>) {
        for Double { id, to } in doubles {
            let at = self.by_id.get(&id).copied();
            let exchange = at.and_then(|at| self.clients.get(at)?.exchange.as_ref());
            let is_free = exchange.is_some_and(|exchange| {
                exchange.winner.is_none()
                    && exchange.links[to.index()].is_none()
                    && !exchange.failed[to.index()]
            });
            match at.filter(|_| is_free) {
                Some(at) => self.send(at, to, false),
                None => self.hedge.not_doubled(id),
            }
        }
    }

    /// A connection to a server can send, or has something to read.
    pub(super) fn link_is_ready(&mut self, at: usize) {
        let Some(link) = self.links.get(at) else { return };
        // If it can't be sent, reading says why.
        let _told = link.write();
        if !link.stalled {
            self.link_reads(at);
        }
    }

    fn link_reads(&mut self, at: usize) {
        let mut bytes = [0; 16 << 10];
        for _ in 0..MOST_READS {
            let Some(link) = self.links.get(at) else { return };
            let next = match link.read(&mut bytes) {
                Ok(0) => link.ended(),
                Ok(count) => self.link_takes(at, &bytes[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => Next::Broken,
            };
            match next {
                Next::Reads if self.stalls(at) => return,
                Next::Reads => {}
                Next::Rests | Next::Ends => return self.whole(at, next),
                Next::Broken => return self.broken(at),
            }
        }
        self.unread.push(at);
    }

    /// Goes on with answers that have more to read; whether there are such.
    pub(super) fn reads_on(&mut self) -> bool {
        for at in std::mem::take(&mut self.unread) {
            self.link_is_ready(at);
        }
        !self.unread.is_empty()
    }

    /// Hands what a server has said to the client that waits for it, if one does.
    fn link_takes(&mut self, at: usize, bytes: &[u8]) -> Next {
        let Self { links, clients, hedge, down, .. } = self;
        let Some(link) = links.get(at) else { return Next::Reads };
        let (mut late, mut lost) = (None, None);
        let next = link.take(bytes, |link, piece| {
            let Some(For::Client(client_at)) = link.works_for else {
                if let Piece::Body(bytes) = piece {
                    link.drained += bytes.len();
                }
                return;
            };
            let Some(client) = clients.get(client_at) else { return };
            match piece {
                Piece::Body(bytes) => client.outbox.add(bytes),
                Piece::Head(head) => {
                    let Some(exchange) = &mut client.exchange else { return };
                    exchange.winner = Some(at);
                    hedge.answered(exchange.id, monotonic_ns(), link.server);
                    down[link.server.index()] = false;
                    late = exchange.links[link.server.other().index()].take();
                    client.is_last = exchange.request.closes || head.body == Body::UntilClose;
                    client.outbox.add(&head.bytes);
                    if client.is_last {
                        client.outbox.add(b"Connection: close\r\n");
                    }
                    client.outbox.add(b"\r\n");
                }
            }
            lost = client.outbox.send(&mut client.stream).is_err().then_some(client_at);
        });
        let is_endless = link.drained > MOST_DRAINED;
        if let Some(late) = late {
            self.is_late(late);
        }
        if let Some(lost) = lost {
            self.client_gone(lost);
            return Next::Reads;
        }
        if is_endless { Next::Broken } else { next }
    }

    /// Whether a client is behind with taking its answer, so that no more is read of it.
    fn stalls(&mut self, at: usize) -> bool {
        let Some(link) = self.links.get(at) else { return false };
        let Some(For::Client(client)) = link.works_for else { return false };
        let waiting = self.clients.get(client).map_or(0, |client| client.outbox.len());
        link.stalled = waiting > MOST_WAITING;
        link.stalled
    }

    /// An answer is whole.
    fn whole(&mut self, at: usize, next: Next) {
        let Some(link) = self.links.get(at) else { return };
        let (server, works_for) = (link.server, link.works_for);
        let idle = &mut self.idle[server.index()];
        if next == Next::Rests && idle.len() < MOST_IDLE {
            link.rest();
            idle.push(at);
        } else {
            self.close(at);
        }
        match works_for {
            Some(For::Client(client)) => self.answered(client),
            Some(For::Nobody) => {
                self.late -= 1;
                self.counts.late += 1;
            }
            Some(For::Warming) => self.warming.answered(server, monotonic_ns()),
            None => {}
        }
    }

    /// A client has its answer, as far as it has taken it.
    fn answered(&mut self, at: usize) {
        let Some(client) = self.clients.get(at) else { return };
        let Some(exchange) = client.exchange.take() else { return };
        client.closes = client.is_last;
        self.by_id.remove(&exchange.id);
        self.client_writes(at);
        self.client_reads(at);
    }

    /// A connection to a server has ended, and the answer is not whole.
    fn broken(&mut self, at: usize) {
        let Some(link) = self.links.get(at) else { return };
        let Link { server, fresh, works_for, .. } = *link;
        let (unsent, heard) = (link.is_unsent(), link.is_heard());
        self.idle[server.index()].retain(|idle| *idle != at);
        self.close(at);
        match works_for {
            None => {}
            Some(For::Warming) => self.warming.failed(server, monotonic_ns()),
            Some(For::Nobody) => self.late -= 1,
            Some(For::Client(client)) => {
                let of = self.clients.get(client).and_then(|client| client.exchange.as_ref());
                if of.is_some_and(|exchange| exchange.winner == Some(at)) {
                    // It has a part of an answer, and sees that it is not whole.
                    return self.client_gone(client);
                }
                self.failed(client, Failure { server, fresh, unsent, heard });
            }
        }
    }

    /// Nobody waits any more for what this connection brings.
    fn is_late(&mut self, at: usize) {
        if self.late >= MOST_LATE {
            return self.close(at);
        }
        let Some(link) = self.links.get(at) else { return };
        link.works_for = Some(For::Nobody);
        self.late += 1;
    }

    fn close(&mut self, at: usize) {
        let Some(mut link) = self.links.remove(at) else { return };
        // It is closed right behind this.
        let _closed = self.registry.deregister(&mut link.stream);
    }

    /// A turn of the loop is over.
    pub(super) fn turn(&mut self) {
        self.clients.turn();
        self.links.turn();
    }
}
