//! Connects the engine to the system: sockets, epoll and the clock, on one thread.
//!
//! The thread sleeps until shortly before the next intended send. It uses a timerfd because epoll's
//! timeout counts in milliseconds. Then it polls without sleeping until the request is due. It
//! reads answers whenever it is awake, and stamps them after reading.

use super::engine::{Engine, Limits, Overrun};
use super::plan::{Arrival, Arrivals, End, Plan};
use super::protocol::{Fault, Malformed, Parser, Protocol};
use super::queries::QuerySet;
use super::record::{Distribution, Recorder};
use crate::process::{allow_connections, interrupted, pin};
use crate::units::{Nanos, nanos_from_f64, seconds};
use elfen_console::duration;
use elfen_console::failure::{Failure, Status};
use mio::event::Event;
use mio::net::TcpStream;
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::thread;
use std::time::{Duration, Instant};

const TIMER: Token = Token(usize::MAX);
/// How many connections are opened together. This is below the listen backlog of common servers.
const OPENING_AT_ONCE: usize = 100;
const RETRY_AFTER_NS: Nanos = 50_000_000;
const READ_BYTES: usize = 64 * 1024;

#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) address: SocketAddr,
    pub(crate) protocol: Protocol,
    pub(crate) queries: QuerySet,
    pub(crate) arrivals: Arrivals,
    pub(crate) rps: f64,
    pub(crate) end: End,
    pub(crate) warmup_ns: Nanos,
    pub(crate) limits: Limits,
    /// How long before a send the thread stops sleeping; `None` if it never sleeps.
    pub(crate) spin_ns: Option<Nanos>,
    /// The generator's CPU. If it is `None`, the kernel chooses.
    pub(crate) cpu: Option<usize>,
    pub(crate) every_request: bool,
}

#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) seed: u64,
    pub(crate) recorder: Recorder,
    /// How long after the timer's expiration the thread ran. An answer that arrives while the
    /// thread sleeps is stamped late by as much.
    pub(crate) overslept: Distribution,
    /// The number of connections that ended during the run.
    pub(crate) lost: u64,
    /// From the end of the warm-up to the last answer, or to the planned end. The planned end
    /// counts if it is later and the run was not interrupted.
    span_ns: Nanos,
}

impl Run {
    /// Successful answers per second.
    pub(crate) fn achieved_rps(&self) -> f64 {
        let count = self.recorder.latency.count();
        if self.span_ns == 0 { 0.0 } else { count as f64 / seconds(self.span_ns) }
    }
}

impl Settings {
    /// The measured part of the plan.
    fn plan(&self, seed: u64) -> Plan {
        Plan::new(self.arrivals, self.rps, self.end, self.queries.len(), seed)
    }

    pub(crate) fn expected_requests(&self) -> u64 {
        self.plan(0).expected_requests()
    }

    /// The warm-up and the measured part at the same rate. Indices count through both.
    fn whole_plan(&self, seed: u64) -> impl Iterator<Item = Arrival> + Send + use<> {
        let (end, warmup_ns, queries) =
            (End::At(self.warmup_ns), self.warmup_ns, self.queries.len());
        // The warm-up has a separate random stream, so that it does not change the measured
        // arrivals.
        let warmup = Plan::new(Arrivals::Exponential, self.rps, end, queries, !seed);
        let measured = self.plan(seed).map(move |mut arrival| {
            arrival.at_ns += warmup_ns;
            arrival
        });
        warmup.chain(measured).zip(0..).map(|(arrival, index)| Arrival { index, ..arrival })
    }

    fn planned_end_ns(&self) -> Nanos {
        let measured = match self.end {
            End::At(ns) => ns,
            End::Requests(_) => {
                let ns = self.expected_requests() as f64 / self.rps * 1e9;
                nanos_from_f64(ns).unwrap_or(Nanos::MAX / 2)
            }
        };
        self.warmup_ns + measured
    }

    /// Sends the plan of `seed` to the service, on a new thread.
    pub(crate) fn run(&self, seed: u64) -> Result<Run, Failure> {
        allow_connections(self.limits.connections)?;
        let planned_end_ns = self.planned_end_ns();
        let driving = || {
            self.cpu.map_or(Ok(()), pin)?;
            let plan = Box::new(self.whole_plan(seed));
            let recorder = Recorder::new(self.warmup_ns, self.every_request);
            let engine = Engine::new(plan, self.limits, recorder);
            let mut driver = Driver::new(self, engine).map_err(network)?;
            driver.connect()?;
            driver.run()
        };
        let mut run = thread::scope(|scope| {
            scope.spawn(driving).join().expect("the driver's thread panicked")
        })?;
        let recorder = &mut run.recorder;
        recorder.samples.sort_by_key(|sample| sample.index);
        let waited_for = matches!(self.end, End::At(_)) && !interrupted();
        let end_ns = recorder.last_done_ns.max(if waited_for { planned_end_ns } else { 0 });
        run.span_ns = end_ns.saturating_sub(self.warmup_ns);
        run.seed = seed;
        Ok(run)
    }
}

fn network(error: io::Error) -> Failure {
    Failure::new(Status::Failed, "waiting for the network", error, "see `ulimit -n`")
}

fn too_late(overrun: Overrun, lost: Option<io::Error>) -> Failure {
    let Overrun { late_ns, bound_ns, starved } = overrun;
    let [late, bound] = [late_ns, bound_ns].map(duration::show);
    let lost = lost.map(|error| format!(" (a connection was lost: {error})")).unwrap_or_default();
    let (why, fix) = if starved {
        ("all connections were occupied", "use more --connections, --pipeline, or --allow-late")
    } else {
        ("the generator fell behind", "give it a CPU of its own (--cpu), or --allow-late")
    };
    let what = format!("a request was sent {late} late (bound {bound})");
    Failure::new(Status::Failed, what, format!("{why}{lost}"), fix)
}

/// One connection: a nonblocking socket, unsent bytes, and the parser of answers.
#[derive(Debug)]
struct Link {
    stream: Option<TcpStream>,
    stands: bool,
    parser: Parser,
    /// Bytes that the kernel has not accepted yet.
    unsent: Vec<u8>,
}

impl Link {
    fn new(protocol: Protocol) -> Self {
        Self { stream: None, stands: false, parser: Parser::new(protocol), unsent: Vec::new() }
    }

    /// Completes the opening. Returns whether the connection is established.
    fn finish_opening(&mut self) -> io::Result<bool> {
        let Some(stream) = &self.stream else { return Ok(false) };
        if let Some(error) = stream.take_error()? {
            return Err(error);
        }
        match stream.peer_addr() {
            Ok(_) => {
                stream.set_nodelay(true)?;
                self.stands = true;
                Ok(true)
            }
            Err(error) if error.kind() == ErrorKind::NotConnected => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Passes a request to the kernel. Returns false if the kernel accepted only a part; then call
    /// `flush`.
    fn send(&mut self, request: &[u8]) -> io::Result<bool> {
        self.unsent.extend_from_slice(request);
        self.flush()
    }

    /// Sends the remaining bytes. Returns true when none remain.
    fn flush(&mut self) -> io::Result<bool> {
        let stream = self.stream.as_mut().ok_or(ErrorKind::NotConnected)?;
        while !self.unsent.is_empty() {
            match stream.write(&self.unsent) {
                Ok(taken) => drop(self.unsent.drain(..taken)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

struct Driver<'a> {
    settings: &'a Settings,
    engine: Engine,
    poll: Poll,
    events: Events,
    timer: TimerFd,
    timer_at: Option<Nanos>,
    links: Vec<Link>,
    /// Closed connections with the time of the next attempt, earliest first.
    retries: VecDeque<(Nanos, usize)>,
    buffer: Vec<u8>,
    origin: Instant,
    overslept: Distribution,
    lost: u64,
    last_error: Option<io::Error>,
}

impl<'a> Driver<'a> {
    fn new(settings: &'a Settings, engine: Engine) -> io::Result<Self> {
        let poll = Poll::new()?;
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_CLOEXEC)?;
        let source = timer.as_fd().as_raw_fd();
        poll.registry().register(&mut SourceFd(&source), TIMER, Interest::READABLE)?;
        let links = (0..settings.limits.connections).map(|_| Link::new(settings.protocol));
        Ok(Self {
            settings,
            engine,
            poll,
            events: Events::with_capacity(1024),
            timer,
            timer_at: None,
            links: links.collect(),
            retries: VecDeque::new(),
            buffer: vec![0; READ_BYTES],
            origin: Instant::now(),
            overslept: Distribution::default(),
            lost: 0,
            last_error: None,
        })
    }

    /// Opens all connections and waits until they are established.
    fn connect(&mut self) -> Result<(), Failure> {
        let connections = self.links.len();
        for first in (0..connections).step_by(OPENING_AT_ONCE) {
            self.open_all(first..connections.min(first + OPENING_AT_ONCE)).map_err(|error| {
                let what = format!("connecting to {}", self.settings.address);
                Failure::new(Status::Failed, what, error, "check that the service runs there")
            })?;
        }
        Ok(())
    }

    /// Opens some connections and waits until they are established.
    fn open_all(&mut self, links: std::ops::Range<usize>) -> io::Result<()> {
        let begun = Instant::now();
        links.clone().try_for_each(|at| self.open(at))?;
        while !self.links[links.clone()].iter().all(|link| link.stands) {
            let patience = Duration::from_nanos(self.settings.limits.timeout_ns);
            let left = patience.saturating_sub(begun.elapsed());
            if left.is_zero() || interrupted() {
                let standing = self.links.iter().filter(|link| link.stands).count();
                let problem =
                    format!("only {standing} of {} connections were established", self.links.len());
                return Err(io::Error::new(ErrorKind::TimedOut, problem));
            }
            self.poll(Some(left))?;
            for event in &self.events {
                if let Some(link) = self.links.get_mut(event.token().0)
                    && !link.stands
                {
                    link.finish_opening()?;
                }
            }
        }
        Ok(())
    }

    /// Runs the engine's plan to its end. The plan's time starts now.
    fn run(mut self) -> Result<Run, Failure> {
        self.origin = Instant::now();
        (0..self.links.len()).for_each(|at| self.engine.set_usable(at, true));
        loop {
            if interrupted() {
                self.engine.stop();
            }
            self.send_due()?;
            let now = self.now();
            while let Some(at) = self.engine.expired(now) {
                self.close(at, Fault::Timeout, None);
            }
            if self.engine.is_done() {
                return Ok(Run {
                    seed: 0,
                    recorder: self.engine.into_recorder(),
                    overslept: self.overslept,
                    lost: self.lost,
                    span_ns: 0,
                });
            }
            self.reopen(now);
            self.wait().map_err(network)?;
            let events = std::mem::replace(&mut self.events, Events::with_capacity(0));
            events.iter().for_each(|event| self.take_event(event));
            self.events = events;
        }
    }

    fn now(&self) -> Nanos {
        Nanos::try_from(self.origin.elapsed().as_nanos()).unwrap_or(Nanos::MAX)
    }

    fn send_due(&mut self) -> Result<(), Failure> {
        loop {
            match self.engine.next_send(self.now()) {
                Ok(Some(send)) => {
                    let at = send.connection;
                    match self.links[at].send(self.settings.queries.request(send.query)) {
                        Ok(true) => {}
                        Ok(false) => self.engine.set_usable(at, false),
                        Err(error) => self.close(at, Fault::Closed, Some(error)),
                    }
                }
                Ok(None) => return Ok(()),
                Err(overrun) => {
                    // A lost connection is the cause only if the request waited for a connection.
                    let last_error = self.last_error.take().filter(|_| overrun.starved);
                    return Err(too_late(overrun, last_error));
                }
            }
        }
    }

    /// Sleeps until an event occurs or until shortly before the next send is due. If the next send
    /// is near, polls without sleeping.
    fn wait(&mut self) -> io::Result<()> {
        let now = self.now();
        let spin_ns = self.settings.spin_ns.unwrap_or(Nanos::MAX);
        let before_due = self.engine.next_due().map(|due| due.saturating_sub(spin_ns));
        let retry = self.retries.front().map(|(at, _)| *at);
        let until = [before_due, self.engine.wake_at(), retry].into_iter().flatten().min();
        if self.settings.spin_ns.is_none() || until.is_some_and(|until| until <= now) {
            return self.poll(Some(Duration::ZERO));
        }
        if let Some(until) = until
            && self.timer_at != Some(until)
        {
            let expiration = Expiration::OneShot(TimeSpec::from(Duration::from_nanos(until - now)));
            self.timer.set(expiration, TimerSetTimeFlags::empty())?;
        }
        self.timer_at = until;
        self.poll(None)?;
        if let Some(at) = self.timer_at
            && let Some(overslept) = self.now().checked_sub(at)
        {
            self.overslept.record(overslept);
            self.timer_at = None;
        }
        Ok(())
    }

    fn poll(&mut self, within: Option<Duration>) -> io::Result<()> {
        match self.poll.poll(&mut self.events, within) {
            // A handler of SIGINT or SIGTERM has run. It has set a flag, which the caller reads.
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(()),
            other => other,
        }
    }

    fn take_event(&mut self, event: &Event) {
        let at = event.token().0;
        let Some(link) = self.links.get_mut(at).filter(|link| link.stream.is_some()) else {
            return;
        };
        let is_opening = !link.stands;
        let is_clogged = event.is_writable() && !link.unsent.is_empty();
        if is_opening || is_clogged {
            match if is_opening { link.finish_opening() } else { link.flush() } {
                Ok(true) => self.engine.set_usable(at, true),
                Ok(false) => {}
                Err(error) => return self.close(at, Fault::Closed, Some(error)),
            }
        }
        let ends = event.is_read_closed() || event.is_error();
        if !is_opening && (event.is_readable() || ends) {
            self.read(at, ends);
        }
    }

    /// Reads everything that has arrived, because epoll reports it only once. `ends` says that
    /// epoll also reported the end of the connection.
    fn read(&mut self, at: usize, ends: bool) {
        loop {
            let Some(stream) = self.links[at].stream.as_mut() else { return };
            match stream.read(&mut self.buffer) {
                Ok(0) => {
                    if let Some(reply) = self.links[at].parser.end_of_stream() {
                        self.engine.replied(at, self.now(), &reply);
                    }
                    let error = io::Error::new(ErrorKind::UnexpectedEof, "the service closed it");
                    return self.close(at, Fault::Closed, Some(error));
                }
                Ok(got) => match self.take_replies(at, got) {
                    Ok(true) => return self.close(at, Fault::Closed, None),
                    Ok(false) if got < self.buffer.len() && !ends => return,
                    Ok(false) => {}
                    Err(Malformed) => {
                        let error = io::Error::new(ErrorKind::InvalidData, "malformed answer");
                        return self.close(at, Fault::Malformed, Some(error));
                    }
                },
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return self.close(at, Fault::Closed, Some(error)),
            }
        }
    }

    /// Parses the answers in the first `got` bytes of the buffer. Returns true if the service
    /// announced that it closes the connection.
    fn take_replies(&mut self, at: usize, got: usize) -> Result<bool, Malformed> {
        let now = self.now();
        let mut rest = &self.buffer[..got];
        while !rest.is_empty() {
            let (taken, reply) = self.links[at].parser.feed(rest)?;
            rest = &rest[taken..];
            let Some(reply) = reply else { continue };
            if !self.engine.replied(at, now, &reply) {
                return Err(Malformed);
            }
            if reply.closes {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn close(&mut self, at: usize, reason: Fault, error: Option<io::Error>) {
        let now = self.now();
        self.engine.closed(at, now, reason);
        // Dropping the stream removes it from epoll.
        self.links[at] = Link::new(self.settings.protocol);
        self.lost += 1;
        // A connection whose end was announced is reopened at once. Other connections are reopened
        // after a delay.
        let retry_at = if error.is_some() { now + RETRY_AFTER_NS } else { now };
        self.last_error = error.or(self.last_error.take());
        self.retry(retry_at, at);
    }

    fn retry(&mut self, retry_at: Nanos, at: usize) {
        let place = self.retries.partition_point(|(other, _)| *other <= retry_at);
        self.retries.insert(place, (retry_at, at));
    }

    fn reopen(&mut self, now: Nanos) {
        while let Some((_, at)) = self.retries.pop_front_if(|(retry_at, _)| *retry_at <= now) {
            if let Err(error) = self.open(at) {
                self.last_error = Some(error);
                self.retry(now + RETRY_AFTER_NS, at);
            }
        }
    }

    fn open(&mut self, at: usize) -> io::Result<()> {
        let mut stream = TcpStream::connect(self.settings.address)?;
        let interest = Interest::READABLE | Interest::WRITABLE;
        self.poll.registry().register(&mut stream, Token(at), interest)?;
        self.links[at].stream = Some(stream);
        Ok(())
    }
}
