//! `elfen lab bench batch`: how any program of the user behaves as a batch. It measures:
//!
//! - how long the program overlaps with requests that come at random,
//! - how fast it leaves its lane,
//! - what `elfen run` costs it while the lane idles,
//! - whether its output and exit status are the same as alone.
//!
//! Baseline: `--checks guard`. The times come from the scheduler's own trace, not from Elfen.

mod seen;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use clap::builder::PossibleValuesParser;
use elfen_console::duration;
use elfen_instrument::CheckMethod;
use elfen_machine::affinity;
use elfen_rt::clock::nanos;
use elfen_run::report::RunReport;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use self::seen::{Cast, seen};
use super::program::{Ended, NextToArgs, Running, Starts};
use super::trace::{Buffer, TraceError};
use super::{
    BenchError, BenchReport, Column, Part, Progress, Table, Values, cases, label, lanes, measure,
    metric, number, poll_timing_row, row, share, with_baseline,
};
use crate::live::process::STOP_TIMEOUT;
use crate::live::{LiveError, install_signal_handlers};

const AUTO: &str = "auto";
/// The baseline.
const GUARD: &str = "guard";
/// In a shorter program, the wall time is mostly the time of starting it.
const TOO_SHORT: Duration = Duration::from_millis(50);
/// Only the user knows how long a program takes alone, so the limit is generous.
const A_DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// About how long `elfen run` takes to attach.
const TO_START: Duration = Duration::from_millis(300);
/// The trace buffer for each second, enough for a lane with events every 50 us.
const KB_A_SECOND: u64 = 2048;

const EXAMPLES: &str = "\
Examples:
  sudo elfen lab bench batch --lanes 0:1 -- xz -6 -k -c big.tar
  sudo elfen lab bench batch --checks patch --turns 200us -- ./batch
  sudo elfen lab bench batch --runs 0 -- ./does-not-end     only turns

Overlap and reaction are computed from the scheduler's trace. Overlap is the part of the request's \
time during which the program ran on the batch lane, in %; the time of --learn does not count. \
Reaction is the time from the start of a turn until the program is off its lane; if the turn ends \
earlier, it is the length of the turn.

If the program's output or exit status differs from a run without Elfen, the benchmark fails (exit \
status 1).";

/// Measure a program of your own as a batch: overlap, reaction, slowdown, output
///
/// A thread simulates requests: it is busy for a turn and then sleeps for a random time. Meanwhile
/// the program runs repeatedly under `elfen run`. Then the program runs on an idle lane,
/// alternating with `--checks guard`. In these runs, naps next to other tasks on the request lane
/// do not count. Requires root and tracefs.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct BenchBatchArgs {
    #[command(flatten)]
    next_to: NextToArgs,

    /// The kind of checks; `guard` is always measured as well
    #[arg(long, value_name = "HOW", default_value = AUTO, env = "ELFEN_CHECKS",
        value_parser = checks_parser())]
    checks: String,

    /// The time at the start of each run that does not count, because Elfen still learns about the
    /// program
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = duration::parse)]
    learn: Duration,

    /// Pairs of whole runs on an idle lane; 0 skips the comparison of slowdown and output
    #[arg(long, value_name = "N", default_value_t = 5,
        value_parser = clap::value_parser!(u16).range(0..=1000))]
    runs: u16,

    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) program: Vec<OsString>,
}

/// Accepts what `elfen run --checks` accepts.
fn checks_parser() -> PossibleValuesParser {
    let names = CheckMethod::BEST_FIRST.map(CheckMethod::name);
    PossibleValuesParser::new([AUTO].into_iter().chain(names))
}

pub(crate) fn run(
    args: &BenchBatchArgs,
    progress: Progress<'_>,
) -> Result<BenchReport, BenchError> {
    let poll_timing = args.next_to.poll_timing.timing()?;
    let options = args.next_to.options();
    let (request, batch) = lanes(&args.next_to.lanes)?;
    install_signal_handlers()?;
    let folder = tempfile::tempdir()?;
    // Refuse before minutes have passed.
    drop(Buffer::start(&[request], 1)?);
    let starts = Starts {
        lanes: (request, batch),
        options: &options,
        folder: folder.path(),
        keeps_output: args.runs > 0,
    };
    let mut stage = Stage { args, starts, alone: None, patience: A_DAY, compared: BTreeMap::new() };
    for checks in stage.methods() {
        stage.starts.check(checks, &args.program)?;
    }
    progress("two runs without Elfen");
    let alone = stage.alone()?;
    let (kinds, turns) = args.next_to.cases(stage.methods());
    let rows = measure(("rows", ROWS), &turns, 1, progress, |case, _, values| {
        stage.next_to_requests(kinds[case], values)
    })?;
    for checks in stage.methods() {
        progress(&format!("a whole run with --checks {checks}"));
        stage.once_next_to_requests(checks)?;
    }
    let mut left_out = Vec::new();
    if rows.rows.iter().any(|row| super::value_of(row, "busy_ns") == 0) {
        let learn = duration::show(nanos(args.learn));
        left_out.push(format!(
            "overlap: the program ends within or shortly after the first {learn}, which do not \
             count: see --learn"
        ));
    }
    let mut tables = vec![rows];
    match no_slowdown(args, alone.as_ref()) {
        Some(why) => left_out.push(format!("slowdown: {why}")),
        None => {
            let both = with_baseline(cases("checks", [GUARD, &args.checks]));
            let run = |case: usize, _, values: &mut Values| {
                stage.whole_on_an_idle_lane(if case == 0 { GUARD } else { &args.checks }, values)
            };
            tables.push(measure(("whole", WHOLE), &both, args.runs.into(), progress, run)?);
        }
    }
    let words = args.program.iter().map(|word| word.to_string_lossy().into_owned());
    let mut about = row![
        "program" => words.collect::<Vec<_>>(),
        "lanes" => format!("{request}:{batch}"),
        "learn_ns" => nanos(args.learn),
    ];
    about.extend(poll_timing_row(poll_timing));
    let uncompared = match &alone {
        None => Some("--runs is 0".to_owned()),
        Some(alone) => {
            about.extend(row![
                "alone_wall_ns" => nanos(alone.wall),
                "alone_exit_status" => alone.status,
            ]);
            alone.unlike.as_ref().map(|why| format!("two runs without Elfen differ: {why}"))
        }
    };
    let not_compared = |why: String| format!("comparison of output and exit status: {why}");
    left_out.extend(uncompared.map(not_compared));
    let (mut rows, mut wrong) = (Vec::new(), Vec::new());
    for (checks, unlike) in &stage.compared {
        let (runs, different) = (unlike.len(), unlike.iter().flatten().collect::<Vec<_>>());
        rows.push(row![
            "checks" => checks,
            "runs" => runs,
            "different" => different.len(),
            "first_difference" => different.first(),
        ]);
        if let Some(first) = different.first() {
            let count = different.len();
            wrong.push(format!("--checks {checks}: {count} of {runs} runs differ ({first})"));
        }
    }
    tables.push(Table { key: "compared", columns: COMPARED, rows });
    let wrong = (!wrong.is_empty()).then(|| wrong.join("; "));
    Ok(BenchReport { about, tables, left_out, wrong })
}

/// Returns why whole runs are not compared, if they are not.
fn no_slowdown(args: &BenchBatchArgs, alone: Option<&Alone>) -> Option<String> {
    match alone {
        None => Some("--runs is 0".to_owned()),
        Some(alone) if alone.wall < TOO_SHORT => {
            let wall = duration::show(nanos(alone.wall));
            Some(format!("the program is too short: it takes {wall} without Elfen"))
        }
        Some(_) if args.checks == GUARD => {
            Some("only the guard was measured: choose another value of --checks".to_owned())
        }
        Some(_) => None,
    }
}

/// The comparison of whole runs with the run alone.
const COMPARED: &[Column] = &[
    label("checks", "output and exit status"),
    number("runs", "runs", "", 0),
    number("different", "different", "", 0).lower(),
    label("first_difference", "first difference"),
];

/// Two runs of the program by itself, without `elfen run`.
#[derive(Debug)]
struct Alone {
    /// The wall time of the shorter run.
    wall: Duration,
    status: u8,
    /// How the second run differed from the first. If it did, other runs cannot be compared with
    /// them.
    unlike: Option<String>,
}

/// Turns of one length, next to the program under one kind of checks.
const ROWS: &[Column] = &[
    label("checks", "checks"),
    // The kind of checks that `elfen run` used.
    label("used", "used"),
    number("turn_ns", "turn", "us", 0).scaled(1e-3),
    number("turns", "turns", "", 0),
    share("percent", "traced", 2, ("overlapped_ns", "busy_ns")).lower(),
    metric("reaction_ns", "to stop", "us", 0).scaled(1e-3).lower().show(&[
        Part::Median,
        Part::P90,
        Part::P99,
        Part::N,
    ]),
];

/// Whole runs on an idle lane, with the guard and with the chosen checks.
const WHOLE: &[Column] = &[
    label("checks", "whole runs on an idle lane"),
    metric("wall_ns", "time", "ms", 1).scaled(1e-6).lower().show(&[Part::Median]),
    metric("slowdown", "slowdown", "", 3).ratio_of("wall_ns").lower().show(RATIO),
    metric("own_slowdown", "slowdown of CPU time", "", 3).ratio_of("ran_ns").lower().show(RATIO),
];

const RATIO: &[Part] = &[Part::Median, Part::Range, Part::N];

/// The state of the benchmark: how runs are started, and what their output is compared with.
struct Stage<'a> {
    args: &'a BenchBatchArgs,
    starts: Starts<'a>,
    /// The output of a run alone. `None` if two such runs differ, or if there was none.
    alone: Option<Ended>,
    /// The time limit of a whole run.
    patience: Duration,
    /// For each kind of checks: how each run differed from the run alone.
    compared: BTreeMap<String, Vec<Option<String>>>,
}

impl<'a> Stage<'a> {
    /// The kinds of checks to measure, the baseline first.
    fn methods(&self) -> Vec<&'a str> {
        let chosen = (self.args.checks != GUARD).then_some(self.args.checks.as_str());
        [GUARD].into_iter().chain(chosen).collect()
    }

    fn alone(&mut self) -> Result<Option<Alone>, BenchError> {
        if self.args.runs == 0 {
            return Ok(None);
        }
        let (cpu, words) = (self.starts.lanes.1, &self.args.program);
        let (first, first_wall) = whole(&mut self.starts.alone(cpu, words, "alone")?, A_DAY)?;
        let (second, second_wall) = whole(&mut self.starts.alone(cpu, words, "again")?, A_DAY)?;
        let [Some(first), Some(second)] = [first, second] else { return Ok(None) };
        let unlike = first.unlike(&second)?;
        let status = first.status;
        // Next to turns of any length, the program has its lane for at least a third of the time.
        self.patience = first_wall.max(second_wall) * 10 + Duration::from_secs(30);
        self.alone = unlike.is_none().then_some(first);
        Ok(Some(Alone { wall: first_wall.min(second_wall), status, unlike }))
    }

    fn next_to_requests(
        &mut self,
        (checks, turn): (&str, Duration),
        values: &mut Values,
    ) -> Result<(), BenchError> {
        let (request_cpu, batch_cpu) = self.starts.lanes;
        let limit = 3 * self.args.next_to.duration + Duration::from_secs(5) + self.args.learn;
        let trace = Buffer::start(&[request_cpu, batch_cpu], KB_A_SECOND * limit.as_secs())?;
        let player = Player::start(request_cpu, turn)?;
        let request = player.thread;
        let (fronts, used) = self.run_next_to(player, checks, limit)?;
        values.count("runs", fronts.len() as u64);
        let learn_ns = nanos(self.args.learn);
        let cast = Cast { request_cpu, batch_cpu, request, fronts, learn_ns };
        let seen = seen(&trace.read()?, &cast);
        if !seen.any_request {
            return Err(TraceError::Strangers.into());
        }
        values.label("used", used);
        values.count("turns", seen.turns);
        values.count("busy_ns", seen.busy_ns);
        values.count("overlapped_ns", seen.overlapped_ns);
        values.extend("reaction_ns", seen.reactions_ns.into_iter().map(duration::number));
        Ok(())
    }

    fn whole_on_an_idle_lane(
        &mut self,
        checks: &str,
        values: &mut Values,
    ) -> Result<(), BenchError> {
        let Some(RunReport { wall_ns, figures, .. }) = self.whole_under(checks)? else {
            return Ok(());
        };
        // A nap next to another task on the request lane does not belong to the cost of the chosen
        // checks.
        let wall_ns = wall_ns.saturating_sub(figures.napped_ns);
        values.add("wall_ns", duration::number(wall_ns.max(1)));
        // How long the batch itself ran. The rest of the wall time was taken from it.
        values.extend("ran_ns", figures.ran_ns().map(|ns| duration::number(ns.max(1))));
        Ok(())
    }

    /// Runs the program again and again while requests are played, until they have been counted for
    /// long enough or `limit` is over. Returns the pids of the `elfen run` processes, and the kind
    /// of checks that was used.
    fn run_next_to(
        &mut self,
        player: Player,
        checks: &str,
        limit: Duration,
    ) -> Result<(Vec<i32>, String), BenchError> {
        let begin = Instant::now();
        let wanted = self.args.next_to.duration;
        let (mut fronts, mut used, mut counted) = (Vec::new(), None, Duration::ZERO);
        let mut player = Some(player);
        while player.is_some() {
            let start = Instant::now();
            let mut running = self.starts.under(checks, &self.args.program)?;
            fronts.push(running.id());
            let is_enough = |counted: Duration| {
                let counts = start.elapsed().saturating_sub(self.args.learn + TO_START);
                counted + counts >= wanted || begin.elapsed() >= limit
            };
            let ended = running.wait_until(|| is_enough(counted))?;
            if is_enough(counted) {
                // Stop the requests before the batch. A batch that handles SIGTERM gets its lane
                // even next to a request.
                player = None;
            }
            counted += start.elapsed().saturating_sub(self.args.learn + TO_START);
            if ended.is_none() {
                running.stop(STOP_TIMEOUT);
            }
            let report = running.report()?;
            used = report.map(|report| report.checks).or(used);
            self.compare(checks, ended.and_then(|status| running.ended(status)))?;
        }
        let used = used.ok_or_else(|| LiveError::Refused {
            why: format!("no run with --checks {checks} wrote a report"),
            fix: "choose a longer --duration, and check whether other programs keep the machine \
                busy",
        })?;
        Ok((fronts, used))
    }

    /// Runs the program once to its end, if no run ended while turns were counted. So its output is
    /// compared as well.
    fn once_next_to_requests(&mut self, checks: &str) -> Result<(), BenchError> {
        let ran = self.compared.contains_key(checks);
        let (Some(_), false, Some(&turn)) = (&self.alone, ran, self.args.next_to.turns.first())
        else {
            return Ok(());
        };
        let player = Player::start(self.starts.lanes.0, turn)?;
        self.whole_under(checks)?;
        drop(player);
        Ok(())
    }

    fn whole_under(&mut self, checks: &str) -> Result<Option<RunReport>, BenchError> {
        let mut running = self.starts.under(checks, &self.args.program)?;
        let (ended, _) = whole(&mut running, self.patience)?;
        let report = running.report()?;
        self.compare(checks, ended)?;
        Ok(report)
    }

    fn compare(&mut self, checks: &str, ended: Option<Ended>) -> Result<(), BenchError> {
        let (Some(alone), Some(ended)) = (&self.alone, ended) else { return Ok(()) };
        let unlike = alone.unlike(&ended)?;
        self.compared.entry(checks.to_owned()).or_default().push(unlike);
        Ok(())
    }
}

/// Waits for a program to end, with a time limit: other programs may occupy the lanes.
fn whole(
    running: &mut Running,
    patience: Duration,
) -> Result<(Option<Ended>, Duration), LiveError> {
    let begin = Instant::now();
    let status = running.wait_until(|| begin.elapsed() > patience)?;
    let status = status.ok_or_else(|| LiveError::Refused {
        why: format!("the program did not end within {} s", patience.as_secs()),
        fix: "check whether other programs use these lanes; use --runs 0 for a program that does \
            not end",
    })?;
    Ok((running.ended(status), begin.elapsed()))
}

const SEED: u64 = 7;

/// The requests: a thread that is busy for a turn, and then sleeps for a random time. So it is not
/// synchronized with any timer. It plays until this value is dropped.
#[derive(Debug)]
struct Player {
    /// The thread's id.
    thread: i32,
    stop: Arc<AtomicBool>,
    handle: Option<JoinHandle<()>>,
}

impl Player {
    fn start(cpu: u32, turn: Duration) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let (said, placed) = channel();
        let handle = thread::Builder::new()
            .name("request".to_owned())
            .spawn(move || play(cpu, turn, &stopped, &said))?;
        let mut player = Self { thread: 0, stop, handle: Some(handle) };
        let ended = |_| io::Error::other("the thread that simulates requests ended early");
        player.thread = placed.recv().map_err(ended)??;
        Ok(player)
    }
}

/// Lets the thread finish its current turn.
impl Drop for Player {
    fn drop(&mut self) {
        // Relaxed: a flag that is polled; no other data depends on it.
        self.stop.store(true, Relaxed);
        if let Some(Err(panic)) = self.handle.take().map(JoinHandle::join) {
            std::panic::resume_unwind(panic);
        }
    }
}

fn play(cpu: u32, turn: Duration, stop: &AtomicBool, said: &Sender<io::Result<i32>>) {
    let placed = affinity::pin(cpu).map(|()| nix::unistd::gettid().as_raw());
    let go_on = placed.is_ok();
    if said.send(placed).is_err() || !go_on {
        return;
    }
    let mut random = Xoshiro256PlusPlus::seed_from_u64(SEED);
    // The pause is between half a turn and one and a half turns, and up to a millisecond longer.
    let span_ns = u64::try_from(turn.as_nanos()).unwrap_or(u64::MAX / 2) + 1_000_000;
    while !stop.load(Relaxed) {
        thread::sleep(turn / 2 + Duration::from_nanos(random.random_range(0..span_ns)));
        let begin = Instant::now();
        while begin.elapsed() < turn {}
    }
}
