//! The coordinator: the one thread that owns the sockets. It receives, queues, and sends answers.
//!
//! Nothing a client does blocks it, and nothing a client sends grows without bound: connections,
//! heads, the queue and answers each have a limit, and a client that makes no progress is cut off.

use super::connection::{Connection, Phase};
use super::metrics::Metrics;
use super::queue::Queue;
use super::request::{self, Ask, Refusal, Request, Status};
use super::response::{self, Shape};
use super::worker::{Job, Outbox};
use crate::process::interrupt;
use elfen_rt::clock::monotonic_ns;
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};
use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

pub(super) const LISTENER: Token = Token(usize::MAX);
pub(super) const OUTBOX: Token = Token(usize::MAX - 1);
/// Clients are looked after this often.
const SWEEP_EVERY: Duration = Duration::from_millis(500);
/// A client that gets its last answer has this long to take notice.
const LINGER: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub(super) connections: usize,
    /// For a request to be whole, and for an answer to be taken.
    pub(super) patience: Duration,
    /// For a client that asks nothing.
    pub(super) idle: Duration,
    /// For all answers to be out, once the service is asked to end.
    pub(super) drain: Duration,
}

pub(super) struct Coordinator<'a> {
    pub(super) poll: Poll,
    pub(super) listener: TcpListener,
    pub(super) queue: &'a Queue<Job>,
    pub(super) outbox: &'a Outbox,
    pub(super) metrics: &'a Metrics,
    pub(super) bounds: Bounds,
    clients: HashMap<u64, Connection>,
    /// Names are never used twice: an answer to a client that is gone finds no connection.
    next_client: u64,
    next_request: u64,
    draining_until: Option<Instant>,
}

/// What became of a connection.
#[derive(PartialEq, Eq)]
enum Fate {
    Stays,
    Goes,
}

impl<'a> Coordinator<'a> {
    pub(super) fn new(
        poll: Poll,
        listener: TcpListener,
        queue: &'a Queue<Job>,
        outbox: &'a Outbox,
        metrics: &'a Metrics,
        bounds: Bounds,
    ) -> Self {
        Self {
            poll,
            listener,
            queue,
            outbox,
            metrics,
            bounds,
            clients: HashMap::new(),
            next_client: 0,
            next_request: 1,
            draining_until: None,
        }
    }

    /// Serves until the process is asked to end, then answers what was asked before. True if that
    /// was all answered in time.
    pub(super) fn run(mut self) -> io::Result<bool> {
        let mut events = Events::with_capacity(1024);
        let mut next_sweep = Instant::now() + SWEEP_EVERY;
        loop {
            let wait = next_sweep.saturating_duration_since(Instant::now());
            match self.poll.poll(&mut events, Some(wait)) {
                Err(error) if error.kind() != ErrorKind::Interrupted => return Err(error),
                _ => {}
            }
            for event in &events {
                match event.token() {
                    LISTENER => self.accept()?,
                    OUTBOX => self.send_answers(),
                    Token(client) => {
                        self.advance(client as u64, event.is_readable() || event.is_read_closed());
                    }
                }
            }
            let now = Instant::now();
            if now >= next_sweep {
                self.sweep(now);
                // Clients for whom this process had no descriptor are accepted once it has one.
                self.accept()?;
                next_sweep = now + SWEEP_EVERY;
            }
            if interrupt::asked() && self.draining_until.is_none() {
                self.begin_draining(now)?;
            }
            if let Some(until) = self.draining_until {
                let owed = self.clients.values().any(|client| client.phase != Phase::Lingering);
                if !owed || now >= until {
                    return Ok(!owed);
                }
            }
        }
    }

    fn accept(&mut self) -> io::Result<()> {
        while self.draining_until.is_none() {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                // The client is gone already, or this process has no descriptor left: it serves its
                // other clients on, and the next sweep tries again.
                Err(_) => return Ok(()),
            };
            self.metrics.accepted.fetch_add(1, Relaxed);
            self.welcome(stream)?;
        }
        Ok(())
    }

    fn welcome(&mut self, mut stream: TcpStream) -> io::Result<()> {
        let client = self.next_client;
        self.next_client += 1;
        let token = Token(usize::try_from(client).expect("a machine word of clients"));
        self.poll.registry().register(
            &mut stream,
            token,
            Interest::READABLE | Interest::WRITABLE,
        )?;
        // A client that is gone already shows when it is read.
        if stream.set_nodelay(true).is_err() {
            return Ok(());
        }
        let full = self.clients.len() >= self.bounds.connections;
        self.clients.insert(client, Connection::new(stream, Instant::now()));
        self.metrics.connections.store(self.clients.len() as u64, Relaxed);
        if full {
            self.refuse_client(client);
        } else {
            self.advance(client, true);
        }
        Ok(())
    }

    /// Beyond the bound, a client gets a short answer and no place to linger in.
    fn refuse_client(&mut self, client: u64) {
        self.refuse(client, Status::Unavailable, "too many connections");
        if let Some(connection) = self.clients.get_mut(&client) {
            // Best effort: it is told or cut off, and both are an end.
            drop(connection.write());
        }
        self.remove(client);
    }

    fn remove(&mut self, client: u64) {
        self.clients.remove(&client);
        self.metrics.connections.store(self.clients.len() as u64, Relaxed);
    }

    /// Does for a client whatever can be done without waiting.
    fn advance(&mut self, client: u64, readable: bool) {
        let Some(connection) = self.clients.get_mut(&client) else { return };
        if readable {
            connection.became_readable();
        }
        let fate = loop {
            match self.step(client) {
                Ok(Some(fate)) => break fate,
                Ok(None) => {}
                // Reset by the client, most often.
                Err(_) => break Fate::Goes,
            }
        };
        if fate == Fate::Goes {
            self.remove(client);
        }
    }

    /// One step; `None` if another may follow.
    fn step(&mut self, client: u64) -> io::Result<Option<Fate>> {
        let now = Instant::now();
        let Some(connection) = self.clients.get_mut(&client) else { return Ok(Some(Fate::Stays)) };
        match connection.phase {
            Phase::Working => Ok(Some(Fate::Stays)),
            Phase::Lingering => {
                Ok(Some(if connection.linger(now)? { Fate::Goes } else { Fate::Stays }))
            }
            Phase::Writing { then_close } => {
                if !connection.write()? {
                    return Ok(Some(Fate::Stays));
                }
                if then_close {
                    return Ok(Some(if connection.linger(now)? {
                        Fate::Goes
                    } else {
                        Fate::Stays
                    }));
                }
                connection.enter(Phase::Reading, now);
                Ok(None)
            }
            Phase::Reading => {
                let came = connection.read(now)?;
                match request::parse(&connection.input) {
                    Some((length, request)) => {
                        connection.consume(length);
                        self.take(client, request);
                        Ok(None)
                    }
                    None if connection.ended => Ok(Some(Fate::Goes)),
                    None if came => Ok(None),
                    None => Ok(Some(Fate::Stays)),
                }
            }
        }
    }

    fn take(&mut self, client: u64, request: Result<Request, Refusal>) {
        // Once the service ends, each connection ends with its answer.
        let keeps = |keep_alive| keep_alive && self.draining_until.is_none();
        match request {
            Err(Refusal::Close(status)) => self.refuse(client, status, ""),
            Err(Refusal::Keep { status, head_only, keep_alive }) => {
                let keep_alive = keeps(keep_alive);
                let body = response::error_body(status, "");
                self.answer(client, status, head_only, keep_alive, response::JSON, &body);
            }
            Ok(Request { ask, head_only, keep_alive }) => {
                let keep_alive = keeps(keep_alive);
                match ask {
                    Ask::Health => {
                        self.answer(
                            client,
                            Status::Ok,
                            head_only,
                            keep_alive,
                            response::JSON,
                            &self.metrics.health(),
                        );
                    }
                    Ask::Metrics => {
                        let text = self.metrics.text(self.queue.len());
                        let kind = response::METRICS;
                        self.answer(
                            client,
                            Status::Ok,
                            head_only,
                            keep_alive,
                            kind,
                            text.as_bytes(),
                        );
                    }
                    Ask::Search { query, limit } => {
                        self.enqueue(client, query, limit, head_only, keep_alive);
                    }
                }
            }
        }
    }

    fn enqueue(
        &mut self,
        from: u64,
        query: String,
        limit: usize,
        head_only: bool,
        keep_alive: bool,
    ) {
        let (id, arrived_ns) = (self.next_request, monotonic_ns());
        self.next_request += 1;
        let job = Job { from, id, arrived_ns, query, limit, head_only, keep_alive };
        match self.queue.push(job) {
            Ok(()) => {
                if let Some(connection) = self.clients.get_mut(&from) {
                    connection.enter(Phase::Working, Instant::now());
                }
            }
            Err(_) => {
                let status = Status::Unavailable;
                let body = response::error_body(status, "the queue is full");
                self.answer(from, status, head_only, keep_alive, response::JSON, &body);
            }
        }
    }

    /// Answers and closes: the rest of this connection can't be trusted.
    fn refuse(&mut self, client: u64, status: Status, message: &str) {
        let body = response::error_body(status, message);
        self.answer(client, status, false, false, response::JSON, &body);
    }

    fn answer(
        &mut self,
        client: u64,
        status: Status,
        head_only: bool,
        keep_alive: bool,
        kind: &str,
        body: &[u8],
    ) {
        self.metrics.answered(status);
        let mut bytes = Vec::new();
        let shape = Shape { status, head_only, keep_alive, timing: None };
        response::write(&mut bytes, shape, kind, body);
        if let Some(connection) = self.clients.get_mut(&client) {
            connection.answer(bytes, !keep_alive, Instant::now());
        }
    }

    fn send_answers(&mut self) {
        for answer in self.outbox.take() {
            // A client that left meanwhile has no use for it.
            if let Some(connection) = self.clients.get_mut(&answer.to) {
                let then_close = !answer.keep_alive || self.draining_until.is_some();
                connection.answer(answer.bytes, then_close, Instant::now());
                self.advance(answer.to, false);
            }
        }
    }

    /// Lets go of clients that make no progress.
    fn sweep(&mut self, now: Instant) {
        let overdue = |connection: &Connection| {
            let patience = match connection.phase {
                // A worker is at it; the client is not to blame.
                Phase::Working => return false,
                Phase::Lingering => LINGER,
                Phase::Reading if connection.is_idle() => self.bounds.idle,
                Phase::Reading | Phase::Writing { .. } => self.bounds.patience,
            };
            now.saturating_duration_since(connection.since) >= patience
        };
        let overdue: Vec<u64> =
            self.clients.iter().filter(|(_, c)| overdue(c)).map(|(client, _)| *client).collect();
        for client in overdue {
            let connection = self.clients.get_mut(&client);
            if connection.is_some_and(|c| c.phase == Phase::Reading && !c.is_idle()) {
                self.refuse(client, Status::RequestTimeout, "");
                self.advance(client, false);
                continue;
            }
            self.remove(client);
        }
    }

    /// Accepts no more clients, and closes the connections of those that are owed no answer,
    /// whatever they have sent of a request.
    fn begin_draining(&mut self, now: Instant) -> io::Result<()> {
        self.draining_until = Some(now + self.bounds.drain);
        self.poll.registry().deregister(&mut self.listener)?;
        self.clients.retain(|_, connection| connection.phase != Phase::Reading);
        self.metrics.connections.store(self.clients.len() as u64, Relaxed);
        Ok(())
    }
}
