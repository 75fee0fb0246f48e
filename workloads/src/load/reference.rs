//! A service whose response times are known: what generators are measured against.
//!
//! It speaks the least HTTP there is, has one worker and one queue, and does no work: it computes
//! when each answer is due (arrival, queue and service time alone decide) and sends it then,
//! looking without sleeping. So its own cost does not add up in the queue, and what a generator
//! measures beyond the known time is the way there and back.

use crate::process::{bind, interrupted};
use crate::units::{Nanos, micros, nanos_from_f64, parse_nanos};
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};
use rand::{RngExt, SeedableRng};
use rand_distr::Exp1;
use rand_xoshiro::Xoshiro256PlusPlus;
use std::collections::{HashMap, VecDeque};
use std::io::{self, ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::{Duration, Instant};

/// How long requests take, written `exponential:1ms` or `fixed:200us`, and `,stall:1000:100ms` for
/// every thousandth to take 100 ms more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ServiceTimes {
    pub(crate) exponential: bool,
    pub(crate) mean_ns: Nanos,
    /// Every how many requests, and for how much longer.
    pub(crate) stall: Option<(u64, Nanos)>,
}

impl FromStr for ServiceTimes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let read = || {
            let (times, stall) = text
                .split_once(",stall:")
                .map_or((text, None), |(times, stall)| (times, Some(stall)));
            let (kind, mean) = times.split_once(':')?;
            let stall = match stall.map(|stall| stall.split_once(':')) {
                None => None,
                Some(stall) => {
                    let (every, extra) = stall?;
                    let every = every.parse().ok().filter(|every| *every > 0)?;
                    Some((every, parse_nanos(extra).ok()?))
                }
            };
            let exponential = kind == "exponential";
            let mean_ns = parse_nanos(mean).ok().filter(|_| exponential || kind == "fixed")?;
            Some(Self { exponential, mean_ns, stall })
        };
        read().ok_or_else(|| {
            format!(
                "`{text}` is no service time: write exponential:1ms, fixed:1ms or \
                 fixed:1ms,stall:1000:100ms"
            )
        })
    }
}

/// Exponential service times around a millisecond.
impl Default for ServiceTimes {
    fn default() -> Self {
        Self { exponential: true, mean_ns: 1_000_000, stall: None }
    }
}

impl ServiceTimes {
    /// The service times in the order of arrival: the same for the same seed.
    pub(crate) fn iter(self, seed: u64) -> impl Iterator<Item = Nanos> {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        // Arrivals of the same seed come from the beginning of its stream: service times drawn
        // there as well would be as long as the gaps before them.
        rng.long_jump();
        (1u64..).map(move |n| {
            let base = if self.exponential {
                let ns = self.mean_ns as f64 * rng.sample::<f64, _>(Exp1);
                nanos_from_f64(ns).expect("a mean of at most 11 days, times at most 40, fits")
            } else {
                self.mean_ns
            };
            base + self.stall.filter(|(every, _)| n % every == 0).map_or(0, |(_, extra)| extra)
        })
    }
}

const LISTENER: Token = Token(usize::MAX);
/// What a request may have in its head; more is no request of a generator.
const LONGEST_HEAD: usize = 64 * 1024;

struct Due {
    at_ns: Nanos,
    queue_ns: Nanos,
    service_ns: Nanos,
    to: usize,
}

struct Client {
    stream: TcpStream,
    /// How much of the empty line that ends a head has been seen, and how long the head is.
    matched: usize,
    head: usize,
}

/// The service, bound and ready to `serve`.
pub(crate) struct Reference {
    poll: Poll,
    listener: TcpListener,
    services: Box<dyn Iterator<Item = Nanos> + Send>,
    clients: HashMap<usize, Client>,
    next_client: usize,
    due: VecDeque<Due>,
    free_at: Nanos,
    origin: Instant,
}

impl Reference {
    pub(crate) fn bind(address: SocketAddr, times: ServiceTimes, seed: u64) -> io::Result<Self> {
        let poll = Poll::new()?;
        let mut listener = TcpListener::from_std(bind(address)?);
        poll.registry().register(&mut listener, LISTENER, Interest::READABLE)?;
        Ok(Self {
            poll,
            listener,
            services: Box::new(times.iter(seed)),
            clients: HashMap::new(),
            next_client: 0,
            due: VecDeque::new(),
            free_at: 0,
            origin: Instant::now(),
        })
    }

    pub(crate) fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until the process is asked to end.
    pub(crate) fn serve(mut self) -> io::Result<()> {
        let mut events = Events::with_capacity(1024);
        while !interrupted() {
            self.answer_due();
            // Without clients there is nothing to be precise about.
            let wait = Duration::from_millis(if self.clients.is_empty() { 20 } else { 0 });
            match self.poll.poll(&mut events, Some(wait)) {
                Err(error) if error.kind() != ErrorKind::Interrupted => return Err(error),
                _ => {}
            }
            for event in &events {
                match event.token() {
                    LISTENER => self.accept()?,
                    Token(at) => self.read(at),
                }
            }
        }
        Ok(())
    }

    fn now(&self) -> Nanos {
        Nanos::try_from(self.origin.elapsed().as_nanos()).unwrap_or(Nanos::MAX)
    }

    fn accept(&mut self) -> io::Result<()> {
        loop {
            let mut stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            };
            let at = self.next_client;
            self.next_client += 1;
            stream.set_nodelay(true)?;
            self.poll.registry().register(&mut stream, Token(at), Interest::READABLE)?;
            self.clients.insert(at, Client { stream, matched: 0, head: 0 });
        }
    }

    fn read(&mut self, at: usize) {
        let mut buffer = [0; 16 * 1024];
        loop {
            let Some(client) = self.clients.get_mut(&at) else { return };
            match client.stream.read(&mut buffer) {
                Ok(0) => break,
                Ok(got) => {
                    let requests = client.requests_ended(&buffer[..got]);
                    let now = self.now();
                    for _ in 0..requests {
                        self.enqueue(at, now);
                    }
                    if self.clients.get(&at).is_some_and(|client| client.head > LONGEST_HEAD) {
                        break;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        self.clients.remove(&at);
    }

    fn enqueue(&mut self, to: usize, now: Nanos) {
        let service_ns = self.services.next().expect("service times never end");
        let begin = self.free_at.max(now);
        self.free_at = begin + service_ns;
        self.due.push_back(Due { at_ns: self.free_at, queue_ns: begin - now, service_ns, to });
    }

    fn answer_due(&mut self) {
        while let Some(due) = self.due.front()
            && due.at_ns <= self.now()
        {
            let answer = format!(
                "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: keep-alive\r\n\
                 Server-Timing: queue;dur={:.6}, service;dur={:.6}\r\n\r\n",
                micros(due.queue_ns) / 1e3,
                micros(due.service_ns) / 1e3,
            );
            let to = due.to;
            self.due.pop_front();
            let Some(client) = self.clients.get_mut(&to) else { continue };
            // An answer is far smaller than a socket's buffer: a client that left no room for it
            // reads nothing.
            match client.stream.write(answer.as_bytes()) {
                Ok(taken) if taken == answer.len() => {}
                _ => drop(self.clients.remove(&to)),
            }
        }
    }
}

impl Client {
    /// How many heads end in these bytes. Requests have no body here.
    fn requests_ended(&mut self, bytes: &[u8]) -> usize {
        const END: &[u8] = b"\r\n\r\n";
        let mut ended = 0;
        for byte in bytes {
            self.head += 1;
            self.matched = match (END[self.matched] == *byte, *byte) {
                (true, _) => self.matched + 1,
                (false, b'\r') => 1,
                (false, _) => 0,
            };
            if self.matched == END.len() {
                (self.matched, self.head) = (0, 0);
                ended += 1;
            }
        }
        ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: service times are read as written. Method: each form, and wrong ones.
    #[test]
    fn service_times_are_read() {
        let times: ServiceTimes = "fixed:1ms,stall:3:100ms".parse().expect("well formed");
        let first: Vec<Nanos> = times.iter(1).take(4).collect();
        assert_eq!(first, [1_000_000, 1_000_000, 101_000_000, 1_000_000]);
        let random: ServiceTimes = "exponential:200us".parse().expect("well formed");
        let mean = random.iter(2).take(100_000).sum::<Nanos>() / 100_000;
        assert!((197_000..203_000).contains(&mean), "{mean} ns");
        assert!(random.iter(2).take(9).eq(random.iter(2).take(9)), "the same for the same seed");
        for text in
            ["", "1ms", "gamma:1ms", "fixed:1", "fixed:1ms,stall:0:1s", "fixed:1ms,stall:1s"]
        {
            assert!(text.parse::<ServiceTimes>().is_err(), "{text}");
        }
    }
}
