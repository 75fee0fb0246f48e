//! The proxy's loop: it waits for clients, servers, the time of the policy, or a signal to end.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use elfen_hedge_policy::{Hedge, Policy, Server};
use elfen_rt::clock::monotonic_ns;
use mio::net::TcpListener;
use mio::{Events, Interest, Poll, Token};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;
use serde::Serialize;

use super::exchange::{Counts, Exchanges, FIRST_TOKEN};
use super::hazard::{Hazards, Told};
use super::link::For;
use super::watch::{Looks, Watched};
use crate::signals::Ending;

const LISTENER: Token = Token(0);
const EVENTS: usize = 1024;
/// More wait in the kernel until others are gone.
const MOST_CLIENTS: usize = 4096;

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    pub listen: SocketAddr,
    /// The first, and its backup.
    pub servers: [SocketAddr; 2],
    pub policy: Policy,
    pub extra_per_million: u64,
    pub look_every: Duration,
    /// Methods of requests that may be sent twice.
    pub repeatable: Vec<String>,
    /// No client waits longer for an answer to begin.
    pub give_up: Duration,
}

/// What was done until the end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Done {
    #[serde(flatten)]
    pub decided: elfen_hedge_policy::Counts,
    #[serde(flatten)]
    pub met: Counts,
}

#[derive(Debug)]
pub struct Proxy {
    poll: Poll,
    listener: TcpListener,
    exchanges: Exchanges,
    /// Both servers, if their running decides.
    watched: Option<Looks>,
    /// What is told as it happens, if that decides.
    hazards: Option<Hazards>,
    look_every_ns: u64,
    next_look_ns: Option<u64>,
    /// Clients wait that were not accepted.
    is_full: bool,
}

fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Proxy {
    pub fn open(plan: Plan, watched: Option<Looks>, hazards: Option<Hazards>) -> io::Result<Self> {
        let poll = Poll::new()?;
        let mut listener = TcpListener::bind(plan.listen)?;
        poll.registry().register(&mut listener, LISTENER, Interest::READABLE)?;
        let hedge = Hedge::new(plan.policy, plan.extra_per_million);
        let registry = poll.registry().try_clone()?;
        let give_up_ns = ns(plan.give_up);
        let exchanges = Exchanges::new(hedge, registry, plan.servers, plan.repeatable, give_up_ns);
        let look_every_ns = ns(plan.look_every);
        let (next_look_ns, is_full) = (None, false);
        Ok(Self {
            poll,
            listener,
            exchanges,
            watched,
            hazards,
            look_every_ns,
            next_look_ns,
            is_full,
        })
    }

    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until a signal comes, whose number it gives.
    pub fn run(&mut self, ending: &Ending) -> io::Result<(i32, Done)> {
        let mut events = Events::with_capacity(EVENTS);
        let mut wake_ns = None;
        loop {
            let is_ending = self.wait(wake_ns, ending)?;
            self.poll.poll(&mut events, Some(Duration::ZERO))?;
            if let Some(signal) = is_ending.then(|| ending.came()).flatten() {
                let decided = self.exchanges.hedge.counts();
                return Ok((signal, Done { decided, met: self.exchanges.counts }));
            }
            for event in &events {
                self.happens(event);
            }
            let reads_on = self.exchanges.reads_on();
            self.exchanges.turn();
            if self.is_full && self.exchanges.clients.count() < MOST_CLIENTS {
                self.accept();
            }
            let next_ns = self.on_time();
            wake_ns = if reads_on { Some(0) } else { next_ns };
        }
    }

    /// Until something comes, or a time, which epoll would take in milliseconds; whether a signal
    /// came.
    fn wait(&self, until_ns: Option<u64>, ending: &Ending) -> io::Result<bool> {
        // SAFETY: `self.poll` owns the descriptor, and is borrowed as long as this function runs.
        let epoll = unsafe { BorrowedFd::borrow_raw(self.poll.as_raw_fd()) };
        let ours = [Some(epoll), Some(ending.as_fd()), self.hazards.as_ref().map(Hazards::as_fd)];
        let wanted = ours.into_iter().flatten().map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        let mut ready: Vec<PollFd<'_>> = wanted.collect();
        let left = until_ns.map(|until_ns| {
            TimeSpec::from(Duration::from_nanos(until_ns.saturating_sub(monotonic_ns())))
        });
        match ppoll(&mut ready, left, None) {
            Ok(_) => Ok(ready[1].any().unwrap_or(true)),
            Err(Errno::EINTR) => Ok(true),
            Err(error) => Err(error.into()),
        }
    }

    fn happens(&mut self, event: &mio::event::Event) {
        let Some(number) = event.token().0.checked_sub(FIRST_TOKEN) else {
            return self.accept();
        };
        let (at, is_link) = (number / 2, number % 2 == 1);
        if is_link {
            return self.exchanges.link_is_ready(at);
        }
        if event.is_error() || event.is_write_closed() {
            return self.exchanges.client_gone(at);
        }
        self.exchanges.client_writes(at);
        self.exchanges.client_reads(at);
    }

    fn accept(&mut self) {
        self.is_full = false;
        loop {
            if self.exchanges.clients.count() >= MOST_CLIENTS {
                self.is_full = true;
                return;
            }
            match self.listener.accept() {
                // One that can't be registered is closed: its client sees that.
                Ok((stream, _)) => drop(self.exchanges.accept(stream)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(_) => {
                    // No descriptors are left: once others are gone, there are.
                    self.is_full = true;
                    return;
                }
            }
        }
    }

    /// Does what it is time for; when it is time again.
    fn on_time(&mut self) -> Option<u64> {
        let now_ns = monotonic_ns();
        let hedge = &mut self.exchanges.hedge;
        let mut doubles = hedge.due(now_ns);
        if hedge.is_idle() {
            hedge.rests();
            self.next_look_ns = None;
        } else if let Some(watched) = &mut self.watched {
            let next_ns = self.next_look_ns.get_or_insert(now_ns);
            if *next_ns <= now_ns {
                *next_ns = now_ns.saturating_add(self.look_every_ns);
                for server in watched.anew() {
                    hedge.restarts(server);
                    self.exchanges.warming.begin(server);
                }
                let servers = &mut watched.servers;
                let ran = servers.each_mut().map(Watched::ran);
                let is_free = |server: Server| servers[server.index()].is_free();
                doubles.extend(hedge.look(now_ns, ran, is_free));
            }
        }
        let hazards_ns = self.hazards.as_mut().map(|hazards| {
            for (server, told) in hazards.take() {
                match told {
                    Told::Halts { why, is_so } => doubles.extend(hedge.halts(server, why, is_so)),
                    Told::Restarts => {
                        hedge.restarts(server);
                        self.exchanges.warming.begin(server);
                    }
                }
            }
            hazards.due_ns()
        });
        let due_ns = hedge.next_due_ns();
        self.exchanges.double(doubles);
        let warm_ns = self.warm(now_ns);
        let expires_ns = self.exchanges.expire(now_ns);
        [due_ns, self.next_look_ns, expires_ns, hazards_ns, warm_ns].into_iter().flatten().min()
    }

    /// Has servers that were started anew work for recorded requests; when it is time again.
    fn warm(&mut self, now_ns: u64) -> Option<u64> {
        let exchanges = &mut self.exchanges;
        for server in Server::BOTH {
            if exchanges.warming.is_done(server) {
                exchanges.hedge.is_warm(server);
                exchanges.down[server.index()] = false;
            }
            let Some(request) = exchanges.warming.next(server, now_ns) else { continue };
            let waiting = exchanges.waiting(server).map_or_else(|| exchanges.connect(server), Ok);
            let taken = waiting.ok().and_then(|at| exchanges.links.get(at));
            let Some(link) = taken else {
                exchanges.warming.failed(server, now_ns);
                continue;
            };
            link.begin(request, For::Warming);
            // If it can't be sent, reading says why.
            let _told = link.write();
        }
        exchanges.warming.due_ns(now_ns)
    }
}
