//! Two servers, `elfen-hedge` in front of them, and an open-loop load: requests are sent on time,
//! even if earlier ones are still unanswered.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use elfen_console::programs::find_program;
use elfen_hedge::policy::Policy;
use rand::SeedableRng;
use rand_distr::{Distribution as _, Exp};
use rand_xoshiro::Xoshiro256PlusPlus;
use serde::Deserialize;

use crate::bench::{Values, joined};
use crate::live::LiveError;
use crate::live::os::{ChildSetup, Rank};
use crate::live::process::{Process, START_TIMEOUT};
use crate::live::scratch::Scratch;

/// The p99.9 of these policies needs some thousand requests. The last policy attaches programs to
/// the kernel, which requires root.
const POLICIES: [(&str, Policy); 4] = [
    ("none", Policy::None),
    ("after=p95", Policy::AfterP95),
    ("look", Policy::Look),
    ("hazard", Policy::Hazard),
];
/// The number of recorded requests that a restarted server gets before it gets those of clients.
const REPLAYS: &str = "1000";
/// Enough for all requests in flight, even if a server stands still for half a second.
const CONNECTIONS: usize = 128;
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Plan {
    pub(super) time: Duration,
    pub(super) rps: f64,
    /// The number of pauses in a turn.
    pub(super) pauses: u32,
    pub(super) pause: Duration,
    /// The work of a request, in microseconds.
    pub(super) work_us: u32,
}

/// The fields of `elfen-hedge --json` that are needed here.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct Done {
    requests: u64,
    duplicates: u64,
    won_by_backup: u64,
    unanswered: u64,
}

impl Done {
    pub(super) fn count_in(self, values: &mut Values) {
        values.count("requests", self.requests);
        values.count("duplicates", self.duplicates);
        values.count("won_by_backup", self.won_by_backup);
    }
}

fn start(words: &[&str], scratch: &Scratch) -> Result<Process, LiveError> {
    let mut command = Command::new(find_program("elfen-hedge")?);
    command.args(words);
    let setup = ChildSetup { takes_input: true, ..ChildSetup::anywhere(Rank::Normal) };
    Process::start("elfen-hedge", command, &setup, scratch)
}

/// Starts a server (`elfen-hedge answer`). Returns its process and its address.
pub(super) fn server(name: &str, scratch: &Scratch) -> Result<(Process, String), LiveError> {
    let mut server = start(&["answer", name], scratch)?;
    let port = server.wait_for(START_TIMEOUT, |server| {
        server.stdout_text().strip_suffix('\n')?.parse::<u16>().ok()
    })?;
    Ok((server, format!("127.0.0.1:{port}")))
}

/// The policies that this user may run.
pub(super) fn policies() -> &'static [(&'static str, Policy)] {
    &POLICIES[..POLICIES.len() - usize::from(!nix::unistd::geteuid().is_root())]
}

/// A request: when it was due, and its measured times.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Asked {
    pub(super) due: Duration,
    /// How much later than `due` the client sent the request. The server does not know of this
    /// delay.
    pub(super) late_us: f64,
    pub(super) took_us: f64,
}

/// The proxy in front of two servers, and the address where it listens.
pub(super) struct Proxy {
    process: Process,
    pub(super) at: String,
}

impl Proxy {
    pub(super) fn start(
        policy: &str,
        [to, backup]: [&str; 2],
        scratch: &Scratch,
    ) -> Result<Self, LiveError> {
        let words = ["--listen", "127.0.0.1:0", "--to", to, "--backup", backup];
        let words = [&words[..], &["--policy", policy, "--replay", REPLAYS, "--json"]].concat();
        let mut process = start(&words, scratch)?;
        let at = process.wait_for(START_TIMEOUT, |proxy| {
            Some(proxy.stderr_text().split_once('\n')?.0.rsplit_once(' ')?.1.to_owned())
        })?;
        Ok(Self { process, at })
    }

    /// Ends the proxy, and returns its counts. Unanswered requests are a failure.
    pub(super) fn end(mut self) -> Result<Done, LiveError> {
        let done: Done = self.process.finish_json(Some(libc::SIGTERM), START_TIMEOUT)?;
        match done.unanswered {
            0 => Ok(done),
            some => Err(LiveError::Garbled {
                name: "elfen-hedge".to_owned(),
                why: format!("{some} requests got no answer"),
            }),
        }
    }
}

/// Draws the times at which requests are due.
pub(super) fn due(plan: &Plan, seed: u64) -> Result<Vec<Duration>, LiveError> {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    let gaps = Exp::new(plan.rps).map_err(io::Error::other);
    let gaps = gaps.map_err(LiveError::io("generating arrival times"))?;
    let (mut due, mut now) = (Vec::new(), 0.0);
    while now < plan.time.as_secs_f64() {
        due.push(Duration::from_secs_f64(now));
        now += gaps.sample(&mut random);
    }
    Ok(due)
}

/// Sends requests while `goes_on` returns true. The latency of a request counts from the time at
/// which it was due.
pub(super) fn load(
    due: &[Duration],
    at: &str,
    began: Instant,
    goes_on: &(impl Fn() -> bool + Sync),
    ask: &(impl Fn(&mut TcpStream, usize) -> io::Result<()> + Sync),
) -> Result<Vec<Asked>, LiveError> {
    let next = AtomicUsize::new(0);
    let asked = std::thread::scope(|scope| {
        let client = || -> io::Result<Vec<Asked>> {
            let mut stream = connect(at)?;
            let mut all = Vec::new();
            loop {
                let number = next.fetch_add(1, Relaxed);
                let Some(&due) = due.get(number) else { return Ok(all) };
                std::thread::sleep(due.saturating_sub(began.elapsed()));
                if !goes_on() {
                    return Ok(all);
                }
                let late_us = (began.elapsed() - due).as_secs_f64() * 1e6;
                ask(&mut stream, number)?;
                let took_us = (began.elapsed() - due).as_secs_f64() * 1e6;
                all.push(Asked { due, late_us, took_us });
            }
        };
        let clients: Vec<_> = (0..CONNECTIONS).map(|_| scope.spawn(client)).collect();
        let mut all = Vec::new();
        for client in clients {
            all.extend(joined(client)?);
        }
        Ok(all)
    });
    asked.map_err(LiveError::io(format!("sending requests to {at}")))
}

pub(super) fn connect(at: impl ToSocketAddrs) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(at)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// Requests `work_us` of work, and checks that the answer names the request.
pub(super) fn ask_for(stream: &mut TcpStream, number: usize, work_us: u32) -> io::Result<()> {
    let body = get(stream, &format!("/length/{work_us}/{number}"))?;
    match body.starts_with(&format!("{number} 0 by ")) {
        true => Ok(()),
        false => Err(io::Error::other(format!("request {number} got the wrong answer {body:?}"))),
    }
}

/// Requests a path, and reads the whole answer.
pub(super) fn get(stream: &mut TcpStream, path: &str) -> io::Result<String> {
    write!(stream, "GET {path} HTTP/1.1\r\nHost: bench\r\n\r\n")?;
    let (mut bytes, mut answer) = ([0; 4096], Vec::new());
    loop {
        match stream.read(&mut bytes)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => answer.extend_from_slice(&bytes[..count]),
        }
        if let Some(body) = body_of(&answer)? {
            return Ok(body);
        }
    }
}

/// Returns the body once the answer is complete. Any status but 200 is an error.
fn body_of(answer: &[u8]) -> io::Result<Option<String>> {
    let text = String::from_utf8_lossy(answer);
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return Ok(None) };
    let mut lines = head.lines();
    let status = lines.next().unwrap_or_default();
    let length = lines
        .filter_map(|line| line.split_once(": "))
        .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
        .and_then(|(_, length)| length.parse::<usize>().ok());
    match length {
        Some(length) if status.starts_with("HTTP/1.1 200 ") => {
            Ok((body.len() >= length).then(|| body.to_owned()))
        }
        _ if status.starts_with("HTTP/1.1 502 ") => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Err(io::Error::other(format!("the answer was {status:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_whole_or_wrong() {
        let head = "HTTP/1.1 200 OK\r\nContent-length: 3\r\n\r\n";
        let whole = format!("{head}123");
        for (answer, body) in [(&head[..30], None), (&whole[..whole.len() - 1], None)]
            .into_iter()
            .chain([(&*whole, Some("123"))])
        {
            assert_eq!(body_of(answer.as_bytes()).unwrap().as_deref(), body, "{answer}");
        }
        assert!(body_of(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n").is_err());
        assert!(body_of(b"HTTP/1.1 200 OK\r\n\r\n").is_err());
    }
}
