//! The engine's hands: sockets, epoll and the clock, on one thread.
//!
//! The thread sleeps until shortly before the next intended send (a timerfd, because epoll's own
//! timeout counts in milliseconds), then polls without sleeping until the moment has come. What the
//! service sends is read whenever the thread is awake, and stamped after it was read.

use super::engine::{Engine, Overrun};
use super::link::Link;
use super::outcome::{Failure, Malformed};
use super::protocol::Protocol;
use super::queries::QuerySet;
use super::record::{Distribution, Recorder};
use crate::process::interrupt;
use crate::units::Nanos;
use mio::event::Event;
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use thiserror::Error;

const TIMER: Token = Token(usize::MAX);
/// Connections opened at once: below the listen backlog of common servers.
const OPENING_AT_ONCE: usize = 100;
const RETRY_AFTER_NS: Nanos = 50_000_000;
const READ_BYTES: usize = 64 * 1024;

#[derive(Debug, Error)]
pub(crate) enum DriveError {
    #[error("connecting to {address}: {error}; is the service running there?")]
    Connect { address: SocketAddr, error: io::Error },
    #[error("{overrun}{}", after_lost_connection(.last_error))]
    Late { overrun: Overrun, last_error: Option<io::Error> },
    #[error("waiting for the network: {0}")]
    Poll(#[from] io::Error),
}

fn after_lost_connection(error: &Option<io::Error>) -> String {
    error.as_ref().map(|error| format!(" (a connection was lost: {error})")).unwrap_or_default()
}

/// The service's address, and how this thread talks to it.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    pub(crate) address: SocketAddr,
    pub(crate) protocol: Protocol,
    pub(crate) connections: usize,
    /// For another of the connections to stand.
    pub(crate) patience: Duration,
    /// How long before a send the thread stops sleeping; `None` if it never sleeps.
    pub(crate) spin_ns: Option<Nanos>,
}

/// What other threads may see while an invocation runs.
#[derive(Debug, Default)]
pub(crate) struct Pulse {
    answered: AtomicU64,
}

// Relaxed throughout: a number on a progress bar.
impl Pulse {
    pub(crate) fn answered(&self) -> u64 {
        self.answered.load(Relaxed)
    }

    fn count(&self) {
        self.answered.fetch_add(1, Relaxed);
    }
}

#[derive(Debug)]
pub(crate) struct Driver {
    engine: Engine,
    queries: Arc<QuerySet>,
    pulse: Arc<Pulse>,
    line: Line,
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

#[derive(Debug)]
pub(crate) struct Driven {
    pub(crate) recorder: Recorder,
    /// How long after the timer the thread ran: an answer that comes while it sleeps is seen as
    /// much too late.
    pub(crate) overslept: Distribution,
    /// Connections that ended during the run.
    pub(crate) lost: u64,
}

impl Driver {
    /// Opens all connections and waits until they stand.
    pub(crate) fn connect(
        line: Line,
        engine: Engine,
        queries: Arc<QuerySet>,
        pulse: Arc<Pulse>,
    ) -> Result<Self, DriveError> {
        let poll = Poll::new()?;
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_CLOEXEC)
            .map_err(io::Error::from)?;
        let source = timer.as_fd().as_raw_fd();
        poll.registry().register(&mut SourceFd(&source), TIMER, Interest::READABLE)?;
        let mut driver = Self {
            engine,
            queries,
            pulse,
            poll,
            events: Events::with_capacity(1024),
            timer,
            timer_at: None,
            links: (0..line.connections).map(|_| Link::new(line.protocol)).collect(),
            line,
            retries: VecDeque::new(),
            buffer: vec![0; READ_BYTES],
            origin: Instant::now(),
            overslept: Distribution::default(),
            lost: 0,
            last_error: None,
        };
        let address = driver.line.address;
        driver.connect_all().map_err(|error| DriveError::Connect { address, error })?;
        Ok(driver)
    }

    fn connect_all(&mut self) -> io::Result<()> {
        let mut progress_at = Instant::now();
        let (mut begun, mut standing) = (0, 0);
        while standing < self.links.len() {
            while begun < self.links.len() && begun - standing < OPENING_AT_ONCE {
                self.open(begun)?;
                begun += 1;
            }
            let left = self.line.patience.saturating_sub(progress_at.elapsed());
            if left.is_zero() || interrupt::asked() {
                let problem = format!("{standing} of {} connections stand", self.links.len());
                return Err(io::Error::new(ErrorKind::TimedOut, problem));
            }
            ignore_interrupt(self.poll.poll(&mut self.events, Some(left)))?;
            for event in &self.events {
                let Some(link) = self.links.get_mut(event.token().0) else { continue };
                if !link.stands && link.finish_opening()? {
                    standing += 1;
                    progress_at = Instant::now();
                }
            }
        }
        Ok(())
    }

    /// Runs the engine's plan to its end; its time counts from now.
    pub(crate) fn run(mut self) -> Result<Driven, DriveError> {
        self.origin = Instant::now();
        (0..self.links.len()).for_each(|at| self.engine.opened(at));
        loop {
            if interrupt::asked() {
                self.engine.stop();
            }
            self.send_due()?;
            let now = self.now();
            while let Some(at) = self.engine.expired(now) {
                self.close(at, Failure::Timeout, None);
            }
            if self.engine.is_done() {
                return Ok(Driven {
                    recorder: self.engine.into_recorder(),
                    overslept: self.overslept,
                    lost: self.lost,
                });
            }
            self.reopen(now);
            self.wait()?;
            self.take_events();
        }
    }

    fn now(&self) -> Nanos {
        Nanos::try_from(self.origin.elapsed().as_nanos()).unwrap_or(Nanos::MAX)
    }

    fn send_due(&mut self) -> Result<(), DriveError> {
        loop {
            match self.engine.next_send(self.now()) {
                Ok(Some(send)) => {
                    let at = send.connection;
                    match self.links[at].send(self.queries.request(send.query)) {
                        Ok(true) => {}
                        Ok(false) => self.engine.clogged(at, true),
                        Err(error) => self.close(at, Failure::Closed, Some(error)),
                    }
                }
                Ok(None) => return Ok(()),
                Err(overrun) => {
                    // A lost connection explains requests that waited for one, and nothing else.
                    let last_error = self.last_error.take().filter(|_| overrun.starved);
                    return Err(DriveError::Late { overrun, last_error });
                }
            }
        }
    }

    /// Sleeps until something happens, or shortly before the next send is due; close to it, only
    /// looks.
    fn wait(&mut self) -> Result<(), DriveError> {
        let now = self.now();
        let spin_ns = self.line.spin_ns.unwrap_or(Nanos::MAX);
        let before_due = self.engine.next_due().map(|due| due.saturating_sub(spin_ns));
        let retry = self.retries.front().map(|(at, _)| *at);
        let until = [before_due, self.engine.wake_at(), retry].into_iter().flatten().min();
        if self.line.spin_ns.is_none() || until.is_some_and(|until| until <= now) {
            return Ok(ignore_interrupt(self.poll.poll(&mut self.events, Some(Duration::ZERO)))?);
        }
        if let Some(until) = until
            && self.timer_at != Some(until)
        {
            let expiration = Expiration::OneShot(TimeSpec::from(Duration::from_nanos(until - now)));
            self.timer.set(expiration, TimerSetTimeFlags::empty()).map_err(io::Error::from)?;
        }
        self.timer_at = until;
        ignore_interrupt(self.poll.poll(&mut self.events, None))?;
        if let Some(at) = self.timer_at
            && let Some(overslept) = self.now().checked_sub(at)
        {
            self.overslept.record(overslept);
            self.timer_at = None;
        }
        Ok(())
    }

    fn take_events(&mut self) {
        let events = std::mem::replace(&mut self.events, Events::with_capacity(0));
        for event in &events {
            self.take_event(event);
        }
        self.events = events;
    }

    fn take_event(&mut self, event: &Event) {
        let at = event.token().0;
        let Some(link) = self.links.get_mut(at).filter(|link| link.stream.is_some()) else {
            return;
        };
        if !link.stands {
            match link.finish_opening() {
                Ok(true) => self.engine.opened(at),
                Ok(false) => {}
                Err(error) => self.close(at, Failure::Closed, Some(error)),
            }
            return;
        }
        if event.is_writable() && link.is_clogged() {
            match link.flush() {
                Ok(true) => self.engine.clogged(at, false),
                Ok(false) => {}
                Err(error) => return self.close(at, Failure::Closed, Some(error)),
            }
        }
        let ends = event.is_read_closed() || event.is_error();
        if event.is_readable() || ends {
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
                        self.pulse.count();
                    }
                    let error = io::Error::new(ErrorKind::UnexpectedEof, "the service closed it");
                    return self.close(at, Failure::Closed, Some(error));
                }
                Ok(got) => match self.take_replies(at, got) {
                    Ok(true) => return self.close(at, Failure::Closed, None),
                    Ok(false) if got < self.buffer.len() && !ends => return,
                    Ok(false) => {}
                    Err(Malformed) => {
                        let error = io::Error::new(ErrorKind::InvalidData, "malformed answer");
                        return self.close(at, Failure::Malformed, Some(error));
                    }
                },
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return self.close(at, Failure::Closed, Some(error)),
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
            self.pulse.count();
            if reply.closes {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn close(&mut self, at: usize, reason: Failure, error: Option<io::Error>) {
        let now = self.now();
        self.engine.closed(at, now, reason);
        self.links[at].close(self.line.protocol);
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
        while let Some((retry_at, at)) = self.retries.front().copied()
            && retry_at <= now
        {
            self.retries.pop_front();
            if let Err(error) = self.open(at) {
                self.last_error = Some(error);
                self.retry(now + RETRY_AFTER_NS, at);
            }
        }
    }

    fn open(&mut self, at: usize) -> io::Result<()> {
        self.links[at].open(self.line.address, self.poll.registry(), Token(at))
    }
}

fn ignore_interrupt(polled: io::Result<()>) -> io::Result<()> {
    match polled {
        // Ctrl-C or SIGTERM: its handler has set a flag, which the caller looks at.
        Err(error) if error.kind() == ErrorKind::Interrupted => Ok(()),
        other => other,
    }
}
