//! A service with known response times, to test load generators.
//!
//! It supports a minimal HTTP, and has one worker and one queue. It does no work. It computes when
//! each answer is due, from arrival, queue and service time, and sends the answer at that time,
//! polling without sleeping. So its own cost does not accumulate in the queue. Whatever a generator
//! measures beyond the known time is the round trip.

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

/// How long requests take, written as `exponential:1ms` or `fixed:200us`. The suffix
/// `,stall:1000:100ms` makes every thousandth request take 100 ms more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ServiceTimes {
    pub(crate) exponential: bool,
    pub(crate) mean_ns: Nanos,
    /// The interval of stalls in requests, and the additional time.
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
                "`{text}` is not a service time: write exponential:1ms, fixed:1ms or \
                 fixed:1ms,stall:1000:100ms"
            )
        })
    }
}

/// Exponential service times with a mean of 1 ms.
impl Default for ServiceTimes {
    fn default() -> Self {
        Self { exponential: true, mean_ns: 1_000_000, stall: None }
    }
}

impl ServiceTimes {
    /// The service times in the order of arrival. They are equal for equal seeds.
    pub(crate) fn iter(self, seed: u64) -> impl Iterator<Item = Nanos> {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        // Arrivals with the same seed use the beginning of the random stream. Service times from
        // there would equal the gaps before them.
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
/// The maximum length of a request's head. Generators send less.
const LONGEST_HEAD: usize = 64 * 1024;

struct Due {
    at_ns: Nanos,
    to: Token,
    answer: String,
}

/// Serves until the process receives SIGINT or SIGTERM. `ready` receives the address.
pub(crate) fn serve(
    address: SocketAddr,
    times: ServiceTimes,
    seed: u64,
    ready: impl FnOnce(SocketAddr) -> io::Result<()>,
) -> io::Result<()> {
    let mut poll = Poll::new()?;
    let mut listener = TcpListener::from_std(bind(address)?);
    poll.registry().register(&mut listener, LISTENER, Interest::READABLE)?;
    ready(listener.local_addr()?)?;
    let origin = Instant::now();
    let now = || Nanos::try_from(origin.elapsed().as_nanos()).unwrap_or(Nanos::MAX);
    let mut services = times.iter(seed);
    let (mut clients, mut accepted) = (HashMap::new(), 0);
    let (mut all_due, mut free_at) = (VecDeque::new(), 0);
    let mut events = Events::with_capacity(1024);
    while !interrupted() {
        while let Some(due) = all_due.pop_front_if(|due: &mut Due| due.at_ns <= now()) {
            let client = clients.get_mut(&due.to);
            let taken =
                client.map(|client: &mut Client| client.stream.write(due.answer.as_bytes()));
            // An answer is far smaller than a socket's buffer. If the buffer has no room for it,
            // the client is not reading, and is disconnected.
            if !matches!(taken, Some(Ok(taken)) if taken == due.answer.len()) {
                clients.remove(&due.to);
            }
        }
        // Without clients, timing need not be precise.
        let wait = Duration::from_millis(if clients.is_empty() { 20 } else { 0 });
        match poll.poll(&mut events, Some(wait)) {
            Err(error) if error.kind() != ErrorKind::Interrupted => return Err(error),
            _ => {}
        }
        for event in &events {
            let to = event.token();
            if to == LISTENER {
                while let Some(mut stream) = accept(&listener)? {
                    let token = Token(accepted);
                    accepted += 1;
                    poll.registry().register(&mut stream, token, Interest::READABLE)?;
                    clients.insert(token, Client { stream, input: Vec::new() });
                }
                continue;
            }
            let Some(client) = clients.get_mut(&to) else { continue };
            let Ok(requests) = client.read_requests() else {
                clients.remove(&to);
                continue;
            };
            let now = now();
            for service_ns in services.by_ref().take(requests) {
                let begin = free_at.max(now);
                free_at = begin + service_ns;
                let answer = format!(
                    "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: keep-alive\r\n\
                     Server-Timing: queue;dur={:.6}, service;dur={:.6}\r\n\r\n",
                    micros(begin - now) / 1e3,
                    micros(service_ns) / 1e3,
                );
                all_due.push_back(Due { at_ns: free_at, to, answer });
            }
        }
    }
    Ok(())
}

fn accept(listener: &TcpListener) -> io::Result<Option<TcpStream>> {
    match listener.accept() {
        Ok((stream, _)) => {
            stream.set_nodelay(true)?;
            Ok(Some(stream))
        }
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}

struct Client {
    stream: TcpStream,
    /// The incomplete head.
    input: Vec<u8>,
}

impl Client {
    /// Reads everything that has arrived, and returns the number of complete heads. Requests have
    /// no body.
    fn read_requests(&mut self) -> io::Result<usize> {
        const END: &[u8] = b"\r\n\r\n";
        let mut buffer = [0; 16 * 1024];
        let mut requests = 0;
        while self.input.len() <= LONGEST_HEAD {
            match self.stream.read(&mut buffer) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(got) => self.input.extend_from_slice(&buffer[..got]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(requests),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            while let Some(at) = self.input.windows(END.len()).position(|bytes| bytes == END) {
                self.input.drain(..at + END.len());
                requests += 1;
            }
        }
        Err(ErrorKind::InvalidData.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: service times are parsed as written. Method: each form, and invalid forms.
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
