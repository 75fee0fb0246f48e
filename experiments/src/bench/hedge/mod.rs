//! `elfen lab bench hedge`: the latency under each policy of `elfen-hedge` with the same pauses.
//! With `--alone`: the cost of the proxy itself.

mod jvm;
mod load;
mod simulated;

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use elfen_console::duration;
use elfen_console::failure::{Failure, Status};

use self::load::{Asked, Done, Plan, Proxy, ask_for, connect, due, load, policies, server};
use super::{
    BenchError, BenchReport, Case, Column, Explain, Part, Progress, Stats, Table, Values, case,
    cases, joined, label, measure, metric, number, play, row, runs, share, with_baseline,
};
use crate::live::os::send;
use crate::live::process::Process;
use crate::live::scratch::Scratch;
use crate::live::{LiveError, install_signal_handlers};

const EXAMPLES: &str = "\
Examples:
  elfen lab bench hedge                          7 stops of 20 ms in 4 s
  elfen lab bench hedge --pauses 20 --runs 10    5 stops a second
  elfen lab bench hedge --work 15ms --rps 20 --pauses 0
                                              long requests: no duplicates
  sudo elfen lab bench hedge --jvm               servers in Java with GC pauses
  elfen lab bench hedge --alone -d 2s            no stops: cost of the proxy

--jvm requires javac and Lucene (Debian: default-jdk-headless, liblucene8-java).";

/// Measure latencies through `elfen-hedge` while a server is stopped
///
/// The benchmark starts two servers behind the proxy and repeatedly stops the first one. All
/// policies are measured in turn with the same requests. Latency counts from the time at which a
/// request was due. Every answer is compared with its request. The table also has the p99 that the
/// simulator predicts for the same requests and pauses. Each round has a turn without stops, which
/// measures the overhead of each request.
///
/// With --jvm the simulator is not used. The servers are those of `workloads/lucene`. Instead of
/// being stopped, each server collects its whole heap; the two never collect at the same time. In
/// further turns without collections, the first server is killed and restarted, and the latencies
/// of its first second are measured.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct BenchHedgeArgs {
    /// Number of rounds; each round has a turn of every policy
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = runs())]
    runs: usize,

    /// How long a turn lasts
    #[arg(short, long, value_name = "TIME", default_value = "4s", value_parser = duration::parse)]
    duration: Duration,

    /// Requests per second
    #[arg(long, value_name = "N", default_value_t = 300,
        value_parser = clap::value_parser!(u32).range(1..=20_000))]
    rps: u32,

    /// CPU time of a request
    #[arg(long, value_name = "TIME", default_value = "500us", value_parser = duration::parse,
        conflicts_with = "jvm")]
    work: Duration,

    /// How often the first server is stopped in each turn
    #[arg(long, value_name = "N", default_value_t = 7)]
    pauses: u32,

    /// How long each stop lasts
    #[arg(long, value_name = "TIME", default_value = "20ms", value_parser = duration::parse,
        conflicts_with = "jvm")]
    pause: Duration,

    /// Measure two Lucene servers in Java, with garbage collections and a restart
    #[arg(long)]
    jvm: bool,

    /// Measure without pauses: the latency that the proxy adds, and its requests per second
    #[arg(long, conflicts_with_all = ["jvm", "rps", "work", "pauses", "pause"])]
    alone: bool,
}

pub(crate) fn run(
    args: &BenchHedgeArgs,
    progress: Progress<'_>,
) -> Result<BenchReport, BenchError> {
    install_signal_handlers()?;
    if args.alone {
        return Ok(alone(args.duration, args.runs, progress)?.into());
    }
    let least = args.pause.saturating_mul(args.pauses.saturating_add(1));
    if !args.jvm && args.duration < least {
        let why = "the sum of all pauses is longer than --duration";
        let fix = "use fewer or shorter pauses";
        return Err(Failure::new(Status::Usage, "arguments", why, fix).into());
    }
    let plan = Plan {
        time: args.duration,
        rps: f64::from(args.rps),
        pauses: args.pauses,
        pause: args.pause,
        work_us: u32::try_from(args.work.as_micros()).unwrap_or(u32::MAX),
    };
    let cases: Vec<Case> =
        policies().iter().map(|(policy, _)| case(row!["policy" => policy])).collect();
    if !args.jvm {
        return Ok(stopped(&plan, &cases, args.runs, progress)?.into());
    }
    let mut servers = jvm::Servers::start(&plan)?;
    let mut all = play(&cases, args.runs, progress, |case, round, values| {
        let (asked, done) = servers.collecting(&plan, policies()[case].0, round as u64)?;
        values.extend("latency_us", asked.iter().map(|asked| asked.took_us));
        done.count_in(values);
        Ok(())
    })?;
    let restarted = play(&cases, args.runs, progress, |case, round, values| {
        let took_us = servers.restarted(&plan, policies()[case].0, round as u64)?;
        values.extend("restart_us", took_us);
        Ok(())
    })?;
    all.iter_mut().zip(restarted).for_each(|(samples, more)| samples.0.extend(more.0));
    Ok(Table::of(("policies", POLICIES), &cases, &all).into())
}

const LATENCY: &[Part] = &[Part::Median, Part::P99, Part::P999, Part::Max];
const POLICIES: &[Column] = &[
    label("policy", "policy"),
    number("requests", "requests", "", 0),
    metric("latency_us", "p50", "ms", 2).scaled(1e-3).lower().show(LATENCY),
    share("duplicates_percent", "sent twice", 2, ("duplicates", "requests")).lower(),
    number("won_by_backup", "answered by backup", "", 0),
    metric("simulated_us", "simulated: p99", "ms", 2).scaled(1e-3).show(&[Part::P99]),
    metric("restart_us", "restart: p99", "ms", 2).scaled(1e-3).lower().show(&[Part::P99]),
];

/// Measures each policy with the same requests and pauses. The servers are those of `elfen-hedge
/// answer`.
fn stopped(
    plan: &Plan,
    cases: &[Case],
    runs: usize,
    progress: Progress<'_>,
) -> Result<Table, BenchError> {
    let scratch = Scratch::new(1)?;
    // The number of the round, and its requests without stops.
    let mut undisturbed: (Option<usize>, Vec<Asked>) = (None, Vec::new());
    measure(("policies", POLICIES), cases, runs, progress, |case, round, values| {
        if undisturbed.0 != Some(round) {
            let (asked, ..) = turn(&Plan { pauses: 0, ..*plan }, "none", round, &scratch)?;
            undisturbed = (Some(round), asked);
        }
        let (name, policy) = policies()[case];
        let (asked, pauses, done) = turn(plan, name, round, &scratch)?;
        let simulated_us = simulated::latencies_us(policy, &undisturbed.1, plan.work_us, &pauses);
        values.extend("latency_us", asked.iter().map(|asked| asked.took_us));
        values.extend("simulated_us", simulated_us);
        done.count_in(values);
        Ok(())
    })
}

/// When the first server was stopped: start and end, on the clock of the requests.
type Pauses = Vec<(Duration, Duration)>;

/// Plays one turn. Within a round, the requests are the same under all policies.
fn turn(
    plan: &Plan,
    policy: &str,
    round: usize,
    scratch: &Scratch,
) -> Result<(Vec<Asked>, Pauses, Done), LiveError> {
    let (first, to) = server("first", scratch)?;
    let (_second, backup) = server("second", scratch)?;
    let proxy = Proxy::start(policy, [&to, &backup], scratch)?;
    let due = due(plan, round as u64)?;
    let (asked, pauses) = thread::scope(|scope| {
        // The server outlives the thread that stops it.
        let (first, began) = (&first, Instant::now());
        let pauses = scope.spawn(move || pause(plan, first, began));
        let ask = |stream: &mut _, number| ask_for(stream, number, plan.work_us);
        let asked = load(&due, &proxy.at, began, &|| true, &ask);
        (asked, joined(pauses))
    });
    Ok((asked?, pauses, proxy.end()?))
}

fn pause(plan: &Plan, server: &Process, began: Instant) -> Pauses {
    let every = plan.time / (plan.pauses + 1);
    let stop = |_| {
        thread::sleep(every.saturating_sub(plan.pause));
        send(server.id(), libc::SIGSTOP);
        let from = began.elapsed();
        thread::sleep(plan.pause);
        send(server.id(), libc::SIGCONT);
        (from, began.elapsed())
    };
    (0..plan.pauses).map(stop).collect()
}

/// The number of concurrent clients in the throughput test.
const MANY: usize = 32;

const WAYS: &[Column] = &[
    label("way", "way"),
    metric("p50_us", "p50", "us", 0).lower().show(&[Part::Median]),
    metric("added_p50_us", "added", "us", 0).added_to("p50_us").lower(),
    metric("p99_us", "p99", "us", 0).lower().show(&[Part::Median]),
    metric("rps", "requests", "1/s", 0).higher().show(&[Part::Median]),
];

/// Sends the same requests directly to a server and through the proxy, without pauses.
fn alone(lasting: Duration, runs: usize, progress: Progress<'_>) -> Result<Table, BenchError> {
    let scratch = Scratch::new(1)?;
    let ways = with_baseline(cases("way", ["direct", "proxied"]));
    measure(("ways", WAYS), &ways, runs, progress, |case, _, values: &mut Values| {
        let (_first, to) = server("first", &scratch)?;
        let (_second, backup) = server("second", &scratch)?;
        let proxy = Proxy::start("none", [&to, &backup], &scratch)?;
        let at = if case == 0 { &to } else { &proxy.at };
        let one = busy(at, lasting).explain("one client", TRY_AGAIN)?;
        let many = by_many(at, lasting).explain("many clients", TRY_AGAIN)?;
        proxy.end()?;
        let idle = || BenchError::failed("no request was answered", TRY_AGAIN);
        let stats = Stats::of(one).ok_or_else(idle)?;
        values.add("p50_us", stats.median);
        values.add("p99_us", stats.p99);
        values.add("rps", duration::number(many as u64) / lasting.as_secs_f64());
        Ok(())
    })
}

const TRY_AGAIN: &str = "see `ulimit -n`, and try again";

fn by_many(at: &str, lasting: Duration) -> io::Result<usize> {
    thread::scope(|scope| {
        let clients: Vec<_> = (0..MANY).map(|_| scope.spawn(|| busy(at, lasting))).collect();
        clients.into_iter().map(|client| Ok(joined(client)?.len())).sum()
    })
}

/// Runs one client without think time. Returns how long each of its requests took.
fn busy(at: &str, lasting: Duration) -> io::Result<Vec<f64>> {
    let mut stream = connect(at)?;
    let (began, mut took_us) = (Instant::now(), Vec::new());
    while began.elapsed() < lasting {
        let asked = Instant::now();
        ask_for(&mut stream, took_us.len(), 0)?;
        took_us.push(asked.elapsed().as_secs_f64() * 1e6);
    }
    Ok(took_us)
}
