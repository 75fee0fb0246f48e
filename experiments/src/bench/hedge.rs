//! What each policy of `elfen-hedge` makes of the same pauses: two servers, one of which is stopped
//! now and then, and requests that come whether the last ones were answered or not.
//!
//! Policies take turns, so that what the machine does meanwhile befalls all of them. Two servers in
//! Java are [`jvm`]'s business; what the proxy itself takes is [`alone`]'s.

pub(crate) mod alone;
mod asked;
pub(crate) mod jvm;
mod simulated;

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use elfen_console::programs::find_program;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rand::SeedableRng;
use rand_distr::{Distribution as _, Exp};
use rand_xoshiro::Xoshiro256PlusPlus;
use serde::{Deserialize, Serialize};

use self::asked::Asked;

/// The p99.9 of these needs some thousand requests.
const POLICIES: [&str; 4] = ["none", "after=p95", "look", "hazard"];
/// Recorded requests that a restarted server gets before those of clients.
const REPLAYS: &str = "1000";
/// More are not in flight at once, even if a server stands still for half a second.
const CONNECTIONS: usize = 128;
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Plan {
    pub(crate) rounds: usize,
    pub(crate) time: Duration,
    pub(crate) rps: f64,
    /// In a round, of so long.
    pub(crate) pauses: u32,
    pub(crate) pause: Duration,
    /// Of a request, in microseconds.
    pub(crate) work_us: u32,
}

/// What `elfen-hedge --json` prints, as far as it is needed.
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
    /// What the simulator foresees for the same requests and pauses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) simulated_p99_us: Option<f64>,
    /// Of the first second in which a server serves that was started anew, if one was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) restart_p99_us: Option<f64>,
}

/// A policy's turns, one after the other.
#[derive(Clone, Debug, Default)]
struct Turns {
    latencies_us: Vec<f64>,
    simulated_us: Vec<f64>,
    done: Done,
}

impl Turns {
    fn add(&mut self, asked: &[Asked], done: Done) -> io::Result<()> {
        self.latencies_us.extend(asked.iter().map(|asked| asked.took_us));
        self.done.requests += done.requests;
        self.done.duplicates += done.duplicates;
        self.done.won_by_backup += done.won_by_backup;
        match done.unanswered {
            0 => Ok(()),
            some => Err(io::Error::other(format!("{some} had no answer"))),
        }
    }

    fn fared(mut self, policy: &'static str, mut restarts_us: Vec<f64>) -> Fared {
        let [p50_us, p99_us, p999_us, max_us] =
            [500, 990, 999, 1000].map(|at| quantile(&mut self.latencies_us, at).unwrap_or(0.0));
        let Done { requests, duplicates, won_by_backup, .. } = self.done;
        let simulated_p99_us = quantile(&mut self.simulated_us, 990);
        let restart_p99_us = quantile(&mut restarts_us, 990);
        Fared {
            policy,
            requests,
            p50_us,
            p99_us,
            p999_us,
            max_us,
            duplicates,
            won_by_backup,
            simulated_p99_us,
            restart_p99_us,
        }
    }
}

/// The lowest that so many of a thousand do not exceed, in whole units.
fn quantile(values: &mut [f64], thousandth: usize) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    let rank = (values.len() * thousandth).div_ceil(1000);
    values.get(rank.checked_sub(1)?).map(|value| value.round())
}

/// `elfen-hedge`, as a proxy or as a server, which ends with this.
struct Ours(Child);

impl Ours {
    fn start(words: &[&str], stdin: Stdio) -> io::Result<Self> {
        let program = find_program("elfen-hedge").map_err(io::Error::other)?;
        let mut command = Command::new(program);
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
    let mut ours = Ours::start(&["answer", name], Stdio::piped())?;
    let port = first_line(ours.0.stdout.take())?;
    Ok((ours, format!("127.0.0.1:{port}")))
}

/// All that may be had here: the last one attaches programs to the kernel, which takes root.
pub(crate) fn policies() -> &'static [&'static str] {
    &POLICIES[..POLICIES.len() - usize::from(!nix::unistd::geteuid().is_root())]
}

/// All policies, by turns.
pub(crate) fn measure(plan: &Plan) -> io::Result<Vec<Fared>> {
    let mut all = vec![Turns::default(); policies().len()];
    for round in 0..plan.rounds as u64 {
        let undisturbed = one(&Plan { pauses: 0, ..*plan }, "none", round)?;
        for (turns, policy) in all.iter_mut().zip(policies()) {
            // Requests and pauses of a round are the same for all.
            let Turn { asked, pauses, done } = one(plan, policy, round)?;
            turns.add(&asked, done)?;
            let of = &undisturbed.asked;
            let simulated = simulated::latencies_us(policy, of, plan.work_us, &pauses)?;
            turns.simulated_us.extend(simulated);
        }
    }
    let fared = |(turns, policy): (Turns, &&'static str)| turns.fared(policy, Vec::new());
    Ok(all.into_iter().zip(policies()).map(fared).collect())
}

/// The proxy in front of two servers, and where it listens.
struct Proxy {
    process: Ours,
    at: String,
}

impl Proxy {
    fn start(policy: &str, to: &str, backup: &str) -> io::Result<Self> {
        let words = ["--listen", "127.0.0.1:0", "--to", to, "--backup", backup];
        let words = [&words[..], &["--policy", policy, "--replay", REPLAYS, "--json"]].concat();
        let mut process = Ours::start(&words, Stdio::null())?;
        let said = first_line(process.0.stderr.take())?;
        let (_, at) = said.rsplit_once(' ').ok_or_else(|| io::Error::other(said.clone()))?;
        Ok(Self { process, at: at.to_owned() })
    }

    fn end(mut self) -> io::Result<Done> {
        self.process.signal(Signal::SIGTERM)?;
        let mut text = String::new();
        let said = self.process.0.stdout.take();
        said.ok_or(io::ErrorKind::BrokenPipe)?.read_to_string(&mut text)?;
        Ok(serde_json::from_str(&text)?)
    }
}

/// One policy's, once.
struct Turn {
    asked: Vec<Asked>,
    /// From when to when the first server was stopped, as requests count time.
    pauses: Vec<(Duration, Duration)>,
    done: Done,
}

fn one(plan: &Plan, policy: &str, seed: u64) -> io::Result<Turn> {
    let (first, to) = server("first")?;
    let (_second, backup) = server("second")?;
    let proxy = Proxy::start(policy, &to, &backup)?;
    let due = due(plan, seed)?;
    let (asked, pauses) = std::thread::scope(|scope| -> io::Result<_> {
        // It lives as long as requests come, and the thread ends before.
        let (first, began) = (&first, Instant::now());
        let pauses = scope.spawn(move || pause(plan, first, began));
        let ask = |stream: &mut TcpStream, number| ask_for(stream, number, plan.work_us);
        let asked = load(&Load { due: &due, at: &proxy.at, began }, &|| true, &ask);
        let pauses = pauses.join().map_err(|_| io::Error::other("the pauses failed"))??;
        Ok((asked?, pauses))
    })?;
    Ok(Turn { asked, pauses, done: proxy.end()? })
}

fn pause(plan: &Plan, server: &Ours, began: Instant) -> io::Result<Vec<(Duration, Duration)>> {
    let every = plan.time / (plan.pauses + 1);
    let mut all = Vec::new();
    for _ in 0..plan.pauses {
        std::thread::sleep(every.saturating_sub(plan.pause));
        server.signal(Signal::SIGSTOP)?;
        let from = began.elapsed();
        std::thread::sleep(plan.pause);
        server.signal(Signal::SIGCONT)?;
        all.push((from, began.elapsed()));
    }
    Ok(all)
}

/// When requests are to be sent.
fn due(plan: &Plan, seed: u64) -> io::Result<Vec<Duration>> {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    let gaps = Exp::new(plan.rps).map_err(io::Error::other)?;
    let (mut due, mut now) = (Vec::new(), 0.0);
    while now < plan.time.as_secs_f64() {
        due.push(Duration::from_secs_f64(now));
        now += gaps.sample(&mut random);
    }
    Ok(due)
}

/// What is asked of whom.
#[derive(Clone, Copy, Debug)]
struct Load<'a> {
    due: &'a [Duration],
    at: &'a str,
    began: Instant,
}

/// Asks as long as it `goes_on`; how long each request took, from when it was to be sent.
fn load(
    Load { due, at, began }: &Load<'_>,
    goes_on: &(impl Fn() -> bool + Sync),
    ask: &(impl Fn(&mut TcpStream, usize) -> io::Result<()> + Sync),
) -> io::Result<Vec<Asked>> {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let client = || -> io::Result<Vec<Asked>> {
            let mut stream = TcpStream::connect(at)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(PATIENCE))?;
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
            all.extend(client.join().map_err(|_| io::Error::other("a client failed"))??);
        }
        Ok(all)
    })
}

/// Asks for so much work, and takes the answer, which names the request.
fn ask_for(stream: &mut TcpStream, number: usize, work_us: u32) -> io::Result<()> {
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
