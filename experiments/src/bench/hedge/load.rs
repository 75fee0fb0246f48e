//! Two servers, `elfen-hedge` in front of them, and requests that come whether the last ones were
//! answered or not.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use elfen_console::programs::find_program;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rand::SeedableRng;
use rand_distr::{Distribution as _, Exp};
use rand_xoshiro::Xoshiro256PlusPlus;
use serde::Deserialize;

use crate::bench::joined;

/// The p99.9 of these needs some thousand requests. The last one attaches programs to the kernel,
/// which takes root.
const POLICIES: [&str; 4] = ["none", "after=p95", "look", "hazard"];
/// Recorded requests that a restarted server gets before those of clients.
const REPLAYS: &str = "1000";
/// More are not in flight at once, even if a server stands still for half a second.
const CONNECTIONS: usize = 128;
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Plan {
    pub(super) time: Duration,
    pub(super) rps: f64,
    /// In a round, of so long.
    pub(super) pauses: u32,
    pub(super) pause: Duration,
    /// Of a request, in microseconds.
    pub(super) work_us: u32,
}

/// What `elfen-hedge --json` prints, as far as it is needed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
pub(super) struct Done {
    pub(super) requests: u64,
    pub(super) duplicates: u64,
    pub(super) won_by_backup: u64,
    unanswered: u64,
}

/// `elfen-hedge`, as a proxy or as a server, which ends with this.
pub(super) struct Ours(Child);

impl Ours {
    fn start(words: &[&str], stdin: Stdio) -> io::Result<Self> {
        let program = find_program("elfen-hedge").map_err(io::Error::other)?;
        let mut command = Command::new(program);
        command.args(words).stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(Self(command.spawn()?))
    }

    pub(super) fn signal(&self, signal: Signal) -> io::Result<()> {
        let id = i32::try_from(self.0.id()).map_err(|_| io::ErrorKind::InvalidData)?;
        Ok(kill(Pid::from_raw(id), signal)?)
    }
}

impl Drop for Ours {
    fn drop(&mut self) {
        // It may have ended already: then there is nothing to kill, and waiting takes it away.
        let _gone = self.0.kill();
        let _ended = self.0.wait();
    }
}

fn first_line(from: Option<impl Read>) -> io::Result<String> {
    let mut line = String::new();
    BufReader::new(from.ok_or(io::ErrorKind::BrokenPipe)?).read_line(&mut line)?;
    Ok(line.trim().to_owned())
}

pub(super) fn server(name: &str) -> io::Result<(Ours, String)> {
    let mut ours = Ours::start(&["answer", name], Stdio::piped())?;
    let port = first_line(ours.0.stdout.take())?;
    Ok((ours, format!("127.0.0.1:{port}")))
}

/// All that may be had here.
pub(super) fn policies() -> &'static [&'static str] {
    &POLICIES[..POLICIES.len() - usize::from(!nix::unistd::geteuid().is_root())]
}

/// A request, by when it was to be sent.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Asked {
    pub(super) due: Duration,
    /// By so much its client was late: the server does not know of that.
    pub(super) late_us: f64,
    pub(super) took_us: f64,
}

/// The proxy in front of two servers, and where it listens.
pub(super) struct Proxy {
    process: Ours,
    pub(super) at: String,
}

impl Proxy {
    pub(super) fn start(policy: &str, to: &str, backup: &str) -> io::Result<Self> {
        let words = ["--listen", "127.0.0.1:0", "--to", to, "--backup", backup];
        let words = [&words[..], &["--policy", policy, "--replay", REPLAYS, "--json"]].concat();
        let mut process = Ours::start(&words, Stdio::null())?;
        let said = first_line(process.0.stderr.take())?;
        let (_, at) = said.rsplit_once(' ').ok_or_else(|| io::Error::other(said.clone()))?;
        Ok(Self { process, at: at.to_owned() })
    }

    /// What it counted. A request without an answer is a failure.
    pub(super) fn end(mut self) -> io::Result<Done> {
        self.process.signal(Signal::SIGTERM)?;
        let mut text = String::new();
        let said = self.process.0.stdout.take();
        said.ok_or(io::ErrorKind::BrokenPipe)?.read_to_string(&mut text)?;
        let done: Done = serde_json::from_str(&text)?;
        match done.unanswered {
            0 => Ok(done),
            some => Err(io::Error::other(format!("{some} had no answer"))),
        }
    }
}

/// When requests are to be sent.
pub(super) fn due(plan: &Plan, seed: u64) -> io::Result<Vec<Duration>> {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    let gaps = Exp::new(plan.rps).map_err(io::Error::other)?;
    let (mut due, mut now) = (Vec::new(), 0.0);
    while now < plan.time.as_secs_f64() {
        due.push(Duration::from_secs_f64(now));
        now += gaps.sample(&mut random);
    }
    Ok(due)
}

/// Requests and the server that they go to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load<'a> {
    pub(super) due: &'a [Duration],
    pub(super) at: &'a str,
    pub(super) began: Instant,
}

/// Asks as long as it `goes_on`; how long each request took, from when it was to be sent.
pub(super) fn load(
    Load { due, at, began }: &Load<'_>,
    goes_on: &(impl Fn() -> bool + Sync),
    ask: &(impl Fn(&mut TcpStream, usize) -> io::Result<()> + Sync),
) -> io::Result<Vec<Asked>> {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
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
    })
}

pub(super) fn connect(at: impl ToSocketAddrs) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(at)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// Asks for so much work, and takes the answer, which names the request.
pub(super) fn ask_for(stream: &mut TcpStream, number: usize, work_us: u32) -> io::Result<()> {
    let request = format!("GET /length/{work_us}/{number} HTTP/1.1\r\nHost: bench\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    let (mut bytes, mut count) = ([0; 1024], 0);
    let own = format!("\r\n\r\n{number} 0 by ");
    loop {
        match stream.read(&mut bytes[count..])? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => count += read,
        }
        let text = String::from_utf8_lossy(&bytes[..count]);
        if text.contains("\r\n\r\n") && text.ends_with('\n') && !text.ends_with("\r\n") {
            return if text.contains(&own) {
                Ok(())
            } else {
                Err(io::Error::other(format!("request {number} had the answer {text:?}")))
            };
        }
    }
}
