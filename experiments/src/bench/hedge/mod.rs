//! `elfen lab bench hedge`: what each policy of `elfen-hedge` makes of the same pauses; or with
//! `--alone`, what the proxy itself takes.

mod jvm;
mod load;
mod simulated;

use std::io;
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use elfen_console::duration;
use elfen_console::failure::{Failure, Status};
use nix::sys::signal::Signal;

use self::load::{
    Asked, Done, Load, Ours, Plan, Proxy, ask_for, connect, due, load, policies, server,
};
use super::{
    BenchError, Column, Explain, Hear, Part, Report, Row, Scenario, Stats, Values, joined, label,
    metric, number, percent, play, row, runs,
};
use crate::live::install_signal_handlers;

const EXAMPLES: &str = "\
Examples:
  elfen lab bench hedge                          7 stops of 20 ms in 4 s
  elfen lab bench hedge --pauses 20 --runs 10    5 stops a second
  elfen lab bench hedge --work 15ms --rps 20 --pauses 0
                                              long requests: none sent twice
  sudo elfen lab bench hedge --jvm               servers in Java that collect
  elfen lab bench hedge --alone -d 2s            no stops: the proxy itself

With --jvm it takes javac and Lucene (Debian: default-jdk-headless, liblucene8-java).";

/// Measure what `elfen-hedge` makes of a server that stands still
///
/// Two servers of our own behind the proxy, of which the first is stopped now and then; each policy
/// by turns, under the same requests. Latencies are from when a request was to be sent, and every
/// answer is compared with its request. Next to them is the p99 that the simulator foresees for the
/// same requests and pauses. Each round has a turn without stops, which tells what each request
/// takes besides its work.
///
/// With --jvm nothing is foreseen, and the servers are those of `workloads/lucene`, each of which
/// collects its whole heap as often as the first would be stopped, and never both at once. After
/// these turns come others without collections. In them the first server is killed and started
/// again, and latencies are those of its first second.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Rounds, in which each policy has a turn
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = runs())]
    runs: usize,

    /// How long a turn is
    #[arg(short, long, value_name = "TIME", default_value = "4s", value_parser = duration::parse)]
    duration: Duration,

    /// Requests per second
    #[arg(long, value_name = "N", default_value_t = 300,
        value_parser = clap::value_parser!(u32).range(1..=20_000))]
    rps: u32,

    /// How much work a request is
    #[arg(long, value_name = "TIME", default_value = "500us", value_parser = duration::parse,
        conflicts_with = "jvm")]
    work: Duration,

    /// How often the first server is stopped in a turn
    #[arg(long, value_name = "N", default_value_t = 7)]
    pauses: u32,

    /// And for how long
    #[arg(long, value_name = "TIME", default_value = "20ms", value_parser = duration::parse,
        conflicts_with = "jvm")]
    pause: Duration,

    /// Two Lucene servers in Java, with their own pauses and a new start
    #[arg(long)]
    jvm: bool,

    /// No pauses: what the proxy adds to a request, and how many per second it serves
    #[arg(long, conflicts_with_all = ["jvm", "rps", "work", "pauses", "pause"])]
    alone: bool,
}

pub(crate) fn run(args: &Args, hear: Hear<'_>) -> Result<Report, BenchError> {
    if args.alone {
        let table = Ways { turn: args.duration }.table("ways", args.runs, hear)?;
        return Ok(Report { tables: vec![table], ..Report::default() });
    }
    let least = args.pause.saturating_mul(args.pauses.saturating_add(1));
    if !args.jvm && args.duration < least {
        let why = "the pauses take longer than --duration";
        let fix = "choose fewer or shorter ones";
        return Err(Failure::new(Status::Usage, "arguments", why, fix).into());
    }
    let plan = Plan {
        time: args.duration,
        rps: f64::from(args.rps),
        pauses: args.pauses,
        pause: args.pause,
        work_us: u32::try_from(args.work.as_micros()).unwrap_or(u32::MAX),
    };
    let done = vec![Done::default(); policies().len()];
    let mut fared = Policies { plan, done, undisturbed: None, servers: None, restarts: false };
    if !args.jvm {
        let table = fared.table("policies", args.runs, hear)?;
        return Ok(Report { tables: vec![table], ..Report::default() });
    }
    install_signal_handlers()?;
    fared.servers = Some(jvm::Servers::start(&plan)?);
    let mut all = play(&mut fared, args.runs, hear)?;
    fared.restarts = true;
    let restarted = play(&mut fared, args.runs, hear)?;
    all.iter_mut().zip(restarted).for_each(|(samples, more)| samples.0.extend(more.0));
    let table = fared.table_of("policies", &all);
    Ok(Report { tables: vec![table], ..Report::default() })
}

/// Each policy under the same requests and pauses.
struct Policies {
    plan: Plan,
    /// What each policy's proxy counted.
    done: Vec<Done>,
    /// The round and its requests without stops.
    undisturbed: Option<(usize, Vec<Asked>)>,
    /// In Java, if they are; and whether the first is started again.
    servers: Option<jvm::Servers>,
    restarts: bool,
}

const LATENCY: &[Part] = &[Part::Median, Part::P99, Part::P999, Part::Max];

impl Scenario for Policies {
    const COLUMNS: &'static [Column] = &[
        label("policy", "policy"),
        number("requests", "requests", "", 0),
        metric("latency_us", "p50", "ms", 2).scaled(1e-3).lower().show(LATENCY),
        number("duplicates_percent", "sent twice", "%", 2).lower(),
        number("won_by_backup", "won", "", 0),
        metric("simulated_us", "simulated: p99", "ms", 2).scaled(1e-3).show(&[Part::P99]),
        metric("restart_us", "restart: p99", "ms", 2).scaled(1e-3).lower().show(&[Part::P99]),
    ];

    fn cases(&self) -> Vec<Row> {
        let row = |(policy, done): (&&str, &Done)| {
            row![
                "policy" => policy,
                "requests" => done.requests,
                "duplicates" => done.duplicates,
                "duplicates_percent" => percent(done.duplicates, done.requests),
                "won_by_backup" => done.won_by_backup,
            ]
        };
        policies().iter().zip(&self.done).map(row).collect()
    }

    fn run(&mut self, case: usize, round: usize, values: &mut Values) -> Result<(), BenchError> {
        let (plan, policy, seed) = (self.plan, policies()[case], round as u64);
        let done = match &mut self.servers {
            Some(servers) if self.restarts => {
                values.extend("restart_us", servers.restarted(&plan, policy, seed)?);
                return Ok(());
            }
            Some(servers) => {
                let (asked, done) = servers.collecting(&plan, policy, seed)?;
                values.extend("latency_us", asked.iter().map(|asked| asked.took_us));
                done
            }
            None => {
                let turn = self.stopped(policy, round).explain("the servers", TRY_AGAIN)?;
                values.extend("latency_us", turn.asked.iter().map(|asked| asked.took_us));
                values.extend("simulated_us", turn.simulated_us);
                turn.done
            }
        };
        let sum = &mut self.done[case];
        sum.requests += done.requests;
        sum.duplicates += done.duplicates;
        sum.won_by_backup += done.won_by_backup;
        Ok(())
    }
}

const TRY_AGAIN: &str = "see `ulimit -n`, and try again";

/// One policy's, once.
struct Turn {
    asked: Vec<Asked>,
    simulated_us: Vec<f64>,
    done: Done,
}

impl Policies {
    /// Requests and pauses of a round are the same for all.
    fn stopped(&mut self, policy: &str, round: usize) -> io::Result<Turn> {
        let plan = self.plan;
        if self.undisturbed.as_ref().is_none_or(|(of, _)| *of != round) {
            let (asked, ..) = turn(&Plan { pauses: 0, ..plan }, "none", round)?;
            self.undisturbed = Some((round, asked));
        }
        let undisturbed = self.undisturbed.as_ref().map_or(&[][..], |(_, asked)| asked);
        let (asked, pauses, done) = turn(&plan, policy, round)?;
        let simulated_us = simulated::latencies_us(policy, undisturbed, plan.work_us, &pauses)?;
        Ok(Turn { asked, simulated_us, done })
    }
}

/// From when to when the first server was stopped, as requests count time.
type Pauses = Vec<(Duration, Duration)>;

fn turn(plan: &Plan, policy: &str, round: usize) -> io::Result<(Vec<Asked>, Pauses, Done)> {
    let (first, to) = server("first")?;
    let (_second, backup) = server("second")?;
    let proxy = Proxy::start(policy, &to, &backup)?;
    let due = due(plan, round as u64)?;
    let (asked, pauses) = thread::scope(|scope| {
        // It lives as long as requests come, and the thread ends before.
        let (first, began) = (&first, Instant::now());
        let pauses = scope.spawn(move || pause(plan, first, began));
        let ask = |stream: &mut TcpStream, number| ask_for(stream, number, plan.work_us);
        let asked = load(&Load { due: &due, at: &proxy.at, began }, &|| true, &ask);
        (asked, joined(pauses))
    });
    Ok((asked?, pauses?, proxy.end()?))
}

fn pause(plan: &Plan, server: &Ours, began: Instant) -> io::Result<Pauses> {
    let every = plan.time / (plan.pauses + 1);
    let mut all = Vec::new();
    for _ in 0..plan.pauses {
        thread::sleep(every.saturating_sub(plan.pause));
        server.signal(Signal::SIGSTOP)?;
        let from = began.elapsed();
        thread::sleep(plan.pause);
        server.signal(Signal::SIGCONT)?;
        all.push((from, began.elapsed()));
    }
    Ok(all)
}

/// The same requests straight to a server and through the proxy, where no server pauses.
struct Ways {
    turn: Duration,
}

/// Clients at once, for the most requests per second.
const MANY: usize = 32;

impl Scenario for Ways {
    const COLUMNS: &'static [Column] = &[
        label("way", "way"),
        metric("p50_us", "p50", "us", 0).lower().show(&[Part::Median]),
        metric("added_p50_us", "added", "us", 0).added_to("p50_us").lower(),
        metric("p99_us", "p99", "us", 0).lower().show(&[Part::Median]),
        metric("rps", "requests", "1/s", 0).higher().show(&[Part::Median]),
    ];

    fn cases(&self) -> Vec<Row> {
        ["direct", "proxied"].map(|way| row!["way" => way]).to_vec()
    }

    fn baseline(&self, case: usize) -> Option<usize> {
        (case == 1).then_some(0)
    }

    fn run(&mut self, case: usize, _: usize, values: &mut Values) -> Result<(), BenchError> {
        let took = || -> io::Result<(Vec<f64>, usize)> {
            let (_first, to) = server("first")?;
            let (_second, backup) = server("second")?;
            let proxy = Proxy::start("none", &to, &backup)?;
            let at = if case == 0 { &to } else { &proxy.at };
            let (one, many) = (busy(at, self.turn)?, by_many(at, self.turn)?);
            proxy.end()?;
            Ok((one, many))
        };
        let (took_us, answered) = took().explain("the servers", TRY_AGAIN)?;
        let idle = || BenchError::failed("no request was answered", TRY_AGAIN);
        let stats = Stats::of(took_us).ok_or_else(idle)?;
        values.add("p50_us", stats.median);
        values.add("p99_us", stats.p99);
        values.add("rps", duration::number(answered as u64) / self.turn.as_secs_f64());
        Ok(())
    }
}

fn by_many(at: &str, turn: Duration) -> io::Result<usize> {
    thread::scope(|scope| {
        let clients: Vec<_> = (0..MANY).map(|_| scope.spawn(|| busy(at, turn))).collect();
        clients.into_iter().map(|client| Ok(joined(client)?.len())).sum()
    })
}

/// One client that is never idle: how long each of its requests took.
fn busy(at: &str, turn: Duration) -> io::Result<Vec<f64>> {
    let mut stream = connect(at)?;
    let (began, mut took_us) = (Instant::now(), Vec::new());
    while began.elapsed() < turn {
        let asked = Instant::now();
        ask_for(&mut stream, took_us.len(), 0)?;
        took_us.push(asked.elapsed().as_secs_f64() * 1e6);
    }
    Ok(took_us)
}
