//! What each policy of `elfen hedge` makes of the same pauses: two servers, one of which is stopped
//! now and then, and requests that come whether the last ones were answered or not.
//!
//! Policies take turns, so that what the machine does meanwhile befalls all of them.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rand::SeedableRng;
use rand_distr::{Distribution as _, Exp};
use rand_xoshiro::Xoshiro256PlusPlus;
use serde::{Deserialize, Serialize};

/// The p99.9 of these needs some thousand requests.
const POLICIES: [&str; 4] = ["none", "after=p95", "look", "hazard"];
/// More are not in flight at once, even if a server stands still for half a second.
const CONNECTIONS: usize = 128;
const WORK_US: u32 = 500;
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Plan {
    pub(crate) rounds: usize,
    pub(crate) time: Duration,
    pub(crate) rps: f64,
    /// In a round, of so long.
    pub(crate) pauses: u32,
    pub(crate) pause: Duration,
}

/// What `elfen hedge --json` says, as far as it is needed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
struct Done {
    requests: u64,
    duplicates: u64,
    won_by_backup: u64,
    unanswered: u64,
}

/// One policy's, over all rounds.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct Fared {
    pub(crate) policy: &'static str,
    pub(crate) requests: u64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) p999_us: f64,
    pub(crate) max_us: f64,
    pub(crate) duplicates: u64,
    pub(crate) won_by_backup: u64,
}

/// A program of ours that ends with this.
struct Ours(Child);

impl Ours {
    fn start(words: &[&str], stdin: Stdio) -> io::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(words).stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(Self(command.spawn()?))
    }

    fn signal(&self, signal: Signal) -> io::Result<()> {
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

fn server(name: &str) -> io::Result<(Ours, String)> {
    let mut ours = Ours::start(&["tailor", "answer", name], Stdio::piped())?;
    let port = first_line(ours.0.stdout.take())?;
    Ok((ours, format!("127.0.0.1:{port}")))
}

/// All that may be had here: the last one attaches programs to the kernel, which takes root.
pub(crate) fn policies() -> &'static [&'static str] {
    &POLICIES[..POLICIES.len() - usize::from(!nix::unistd::geteuid().is_root())]
}

/// All policies, by turns.
pub(crate) fn measure(plan: &Plan) -> io::Result<Vec<Fared>> {
    let mut all = vec![(Vec::new(), Done::default()); policies().len()];
    for round in 0..plan.rounds {
        for (at, (latencies, sum)) in all.iter_mut().enumerate() {
            // Requests and pauses of a round are the same for all.
            let (took, done) = one(plan, POLICIES[at], round as u64)?;
            latencies.extend(took);
            sum.requests += done.requests;
            sum.duplicates += done.duplicates;
            sum.won_by_backup += done.won_by_backup;
            if done.unanswered > 0 {
                return Err(io::Error::other(format!("{} had no answer", done.unanswered)));
            }
        }
    }
    let fared = |(policy, (mut latencies, done)): (&'static str, (Vec<f64>, Done))| {
        latencies.sort_unstable_by(f64::total_cmp);
        let at = |thousandth: usize| {
            let rank = (latencies.len() * thousandth).div_ceil(1000).max(1);
            latencies.get(rank - 1).copied().unwrap_or(0.0).round()
        };
        Fared {
            policy,
            requests: done.requests,
            p50_us: at(500),
            p99_us: at(990),
            p999_us: at(999),
            max_us: at(1000),
            duplicates: done.duplicates,
            won_by_backup: done.won_by_backup,
        }
    };
    Ok(policies().iter().copied().zip(all).map(fared).collect())
}

fn one(plan: &Plan, policy: &str, seed: u64) -> io::Result<(Vec<f64>, Done)> {
    let (first, to) = server("first")?;
    let (_second, backup) = server("second")?;
    let words = ["hedge", "--listen", "127.0.0.1:0", "--to", &to, "--backup", &backup];
    let words = [&words[..], &["--policy", policy, "--json"]].concat();
    let mut proxy = Ours::start(&words, Stdio::null())?;
    let said = first_line(proxy.0.stderr.take())?;
    let (_, at) = said.rsplit_once(' ').ok_or_else(|| io::Error::other(said.clone()))?;
    let latencies = std::thread::scope(|scope| {
        let pauses = scope.spawn(|| pause(plan, &first));
        let latencies = load(plan, at, seed);
        pauses.join().map_err(|_| io::Error::other("the pauses failed"))??;
        latencies
    })?;
    proxy.signal(Signal::SIGTERM)?;
    let mut text = String::new();
    proxy.0.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?.read_to_string(&mut text)?;
    Ok((latencies, serde_json::from_str(&text)?))
}

fn pause(plan: &Plan, server: &Ours) -> io::Result<()> {
    let every = plan.time / (plan.pauses + 1);
    for _ in 0..plan.pauses {
        std::thread::sleep(every.saturating_sub(plan.pause));
        server.signal(Signal::SIGSTOP)?;
        std::thread::sleep(plan.pause);
        server.signal(Signal::SIGCONT)?;
    }
    Ok(())
}

/// Latencies in microseconds, each from when its request was to be sent.
fn load(plan: &Plan, at: &str, seed: u64) -> io::Result<Vec<f64>> {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    let gaps = Exp::new(plan.rps).map_err(io::Error::other)?;
    let (mut due, mut now) = (Vec::new(), 0.0);
    while now < plan.time.as_secs_f64() {
        due.push(Duration::from_secs_f64(now));
        now += gaps.sample(&mut random);
    }
    let (next, began) = (AtomicUsize::new(0), Instant::now());
    std::thread::scope(|scope| {
        let client = || -> io::Result<Vec<f64>> {
            let mut stream = TcpStream::connect(at)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            let mut took = Vec::new();
            loop {
                let number = next.fetch_add(1, Relaxed);
                let Some(&due) = due.get(number) else { return Ok(took) };
                std::thread::sleep(due.saturating_sub(began.elapsed()));
                ask(&mut stream, number)?;
                took.push((began.elapsed() - due).as_secs_f64() * 1e6);
            }
        };
        let clients: Vec<_> = (0..CONNECTIONS).map(|_| scope.spawn(client)).collect();
        let mut all = Vec::new();
        for client in clients {
            all.extend(client.join().map_err(|_| io::Error::other("a client failed"))??);
        }
        Ok(all)
    })
}

/// Asks, and takes the answer, which names the request.
fn ask(stream: &mut TcpStream, number: usize) -> io::Result<()> {
    let request = format!("GET /length/{WORK_US}/{number} HTTP/1.1\r\nHost: bench\r\n\r\n");
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
