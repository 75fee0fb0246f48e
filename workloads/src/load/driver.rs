//! The engine's hands: sockets, epoll and the clock, on one thread.
//!
//! The thread sleeps until shortly before the next intended send (a timerfd, because epoll's own
//! timeout counts in milliseconds), then polls without sleeping until the moment has come. What the
//! service sends is read whenever the thread is awake, and stamped after it was read.

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
/// Connections opened at once: below the listen backlog of common servers.
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
    /// Where the generator runs; without one the kernel chooses.
    pub(crate) cpu: Option<usize>,
    pub(crate) every_request: bool,
}

#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) seed: u64,
    pub(crate) recorder: Recorder,
    /// How long after the timer the thread ran: an answer that comes while it sleeps is seen as
    /// much too late.
    pub(crate) overslept: Distribution,
    /// Connections that ended during the run.
    pub(crate) lost: u64,
    /// From the end of the warm-up to the last answer, or to the planned end if that is later and
    /// was waited for.
    span_ns: Nanos,
}

impl Run {
    /// Requests answered well, per second.
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

    /// The measured part, after a warm-up at the same rate; indices count through both.
    fn whole_plan(&self, seed: u64) -> impl Iterator<Item = Arrival> + Send + use<> {
        let (end, warmup_ns, queries) =
            (End::At(self.warmup_ns), self.warmup_ns, self.queries.len());
        // Another stream than the measured one, so that the warm-up leaves the measurement as it
        // is.
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

    /// Runs the plan of `seed` against the service, on a thread of its own.
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
        ("no connection had room", "use more --connections, --pipeline, or --allow-late")
    } else {
        ("the generator fell behind", "give it a CPU of its own (--cpu), or --allow-late")
    };
    let what = format!("a request was sent {late} late (bound {bound})");
    Failure::new(Status::Failed, what, format!("{why}{lost}"), fix)
}

/// One connection: a socket that never blocks, what it still has to send, and where its answers
/// end.
#[derive(Debug)]
struct Link {
    stream: Option<TcpStream>,
    stands: bool,
    parser: Parser,
    /// What the kernel did not take yet.
    unsent: Vec<u8>,
}

impl Link {
    fn new(protocol: Protocol) -> Self {
        Self { stream: None, stands: false, parser: Parser::new(protocol), unsent: Vec::new() }
    }

    /// Whether the connection stands now.
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

    /// Hands a request to the kernel; false if it took only a part, and `flush` must follow.
    fn send(&mut self, request: &[u8]) -> io::Result<bool> {
        self.unsent.extend_from_slice(request);
        self.flush()
    }

    /// Writes what is left; true when nothing is left any more.
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
    /// Closed links and when to try them again, soonest first.
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

    /// Opens all connections and waits until they stand.
    fn connect(&mut self) -> Result<(), Failure> {
        let connections = self.links.len();
        for first in (0..connections).step_by(OPENING_AT_ONCE) {
            self.open_all(first..connections.min(first + OPENING_AT_ONCE)).map_err(|error| {
                let what = format!("connecting to {}", self.settings.address);
                Failure::new(Status::Failed, what, error, "is the service running there?")
            })?;
        }
        Ok(())
    }

    /// Opens some connections and waits until they stand.
    fn open_all(&mut self, links: std::ops::Range<usize>) -> io::Result<()> {
        let begun = Instant::now();
        links.clone().try_for_each(|at| self.open(at))?;
        while !self.links[links.clone()].iter().all(|link| link.stands) {
            let patience = Duration::from_nanos(self.settings.limits.timeout_ns);
            let left = patience.saturating_sub(begun.elapsed());
            if left.is_zero() || interrupted() {
                let standing = self.links.iter().filter(|link| link.stands).count();
                let problem = format!("{standing} of {} connections stand", self.links.len());
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

    /// Runs the engine's plan to its end; its time counts from now.
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
                    // A lost connection explains requests that waited for one, and nothing else.
                    let last_error = self.last_error.take().filter(|_| overrun.starved);
                    return Err(too_late(overrun, last_error));
                }
            }
        }
    }

    /// Sleeps until something happens, or shortly before the next send is due; close to it, only
    /// looks.
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
            // Ctrl-C or SIGTERM: its handler has set a flag, which the caller looks at.
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

    /// Reads all that is there, because epoll tells of it once; `ends` if it also told of the end.
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

    /// The answers in the first `got` bytes of the buffer. True: the service announced that it
    /// closes.
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
        // Dropping the stream takes it out of epoll.
        self.links[at] = Link::new(self.settings.protocol);
        self.lost += 1;
        // A service that announced the close is asked again at once, one that broke off a little
        // later.
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
