//! `elfen lab bench batch`: what any program of the user's is like as a batch. Measured are what it
//! overlaps of requests that come at random, how fast it is off its lane, what `elfen run` costs it
//! while the lane idles, and whether it does the same as alone. Baseline: `--checks guard`.
//!
//! The scheduler's own trace says which task ran when; nothing here asks Elfen but for the report
//! that stands next to it.

mod seen;

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
use elfen_run::report::Report as RunReport;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use self::seen::{Cast, Seen, seen};
use super::program::{Ended, NextToArgs, Running, Starts};
use super::trace::{Buffer, TraceError};
use super::{
    BenchError, Column, Hear, Part, Report, Row, Scenario, Table, Values, label, lanes, looked,
    metric, number, percent, rounded, row,
};
use crate::live::process::STOP_TIMEOUT;
use crate::live::{LiveError, install_signal_handlers};

const AUTO: &str = "auto";
/// The baseline.
const GUARD: &str = "guard";
/// Below this a program's wall time is that of being started.
const TOO_SHORT: Duration = Duration::from_millis(50);
/// Only the user knows how long a program takes alone.
const A_DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// What `elfen run` takes to attach, about.
const TO_START: Duration = Duration::from_millis(300);
/// Of the trace, on a lane where everything happens every 50 us.
const KB_A_SECOND: u64 = 2048;

const EXAMPLES: &str = "\
Examples:
  sudo elfen lab bench batch --lanes 0:1 -- xz -6 -k -c big.tar
  sudo elfen lab bench batch --checks patch --turns 200us -- ./batch
  sudo elfen lab bench batch --runs 0 -- ./does-not-end     turns alone

Overlap and reaction are the scheduler's own account, in its trace. Overlap is the time in which a \
task of the program was on the batch lane, in % of the time in which the request was on its own: \
traced once the program has been learned, of whole runs, and reported by the runs. A reaction is \
the time from a turn's beginning until the program is off its lane, if it was there; all of a turn \
that ends first. What is reported agrees with what is traced of whole runs if they are no further \
apart than a tenth, or a thousandth of the busy time.

A program that prints something else than alone, or ends otherwise, is a failure (exit status 1).";

/// Measure a program of your own as a batch: overlap, reaction, slowdown, output
///
/// A thread plays requests: busy for a turn, then asleep for a time drawn at random. Meanwhile the
/// program runs under `elfen run`, again and again. Then it runs on an idle lane, by turns with
/// `--checks guard`; naps next to others that come by there are left out. Needs root, and tracefs.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    next_to: NextToArgs,

    /// How the program is checked, besides by its guard; `guard` is always measured as well
    #[arg(long, value_name = "HOW", default_value = AUTO, env = "ELFEN_CHECKS",
        value_parser = checks_parser())]
    checks: String,

    /// How much of each run is not counted, as the program is learned meanwhile
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = duration::parse)]
    learn: Duration,

    /// Pairs of whole runs on an idle lane; 0 for none, and for no comparison of what it prints
    #[arg(long, value_name = "N", default_value_t = 5,
        value_parser = clap::value_parser!(u16).range(0..=1000))]
    runs: u16,

    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) program: Vec<OsString>,
}

/// As `elfen run --checks` takes it.
fn checks_parser() -> PossibleValuesParser {
    let names = CheckMethod::BEST_FIRST.map(CheckMethod::name);
    PossibleValuesParser::new([AUTO].into_iter().chain(names))
}

pub(crate) fn run(args: &Args, hear: Hear<'_>) -> Result<Report, BenchError> {
    let looks = args.next_to.looks.timing()?;
    let options = args.next_to.options();
    let (request, batch) = lanes(&args.next_to.lanes)?;
    install_signal_handlers()?;
    let folder = tempfile::tempdir()?;
    // Refused before minutes go by.
    drop(Buffer::start(&[request], 1)?);
    let starts = Starts {
        lanes: (request, batch),
        nice: 0,
        options: &options,
        folder: folder.path(),
        keeps_output: args.runs > 0,
    };
    let mut stage = Stage { args, starts, alone: None, patience: A_DAY, compared: Vec::new() };
    for checks in stage.methods() {
        stage.starts.check(checks, &args.program)?;
    }
    hear("alone, twice");
    let alone = stage.alone()?;
    let mut next_to = NextTo::new(&mut stage);
    let rows = next_to.table("rows", 1, hear)?;
    for checks in stage.methods() {
        hear(&format!("under {checks}, to its end"));
        stage.once_next_to_requests(checks)?;
    }
    let mut left_out = Vec::new();
    if rows.rows.iter().any(|row| super::value_of(row, "busy_ns") == 0) {
        let learn = duration::show(nanos(args.learn));
        left_out.push(format!(
            "overlap: the program ends within the {learn} that are not counted, or nearly so: see \
             --learn"
        ));
    }
    let mut tables = vec![rows];
    match no_slowdown(args, alone.as_ref()) {
        Some(why) => left_out.push(format!("slowdown: {why}")),
        None => {
            let whole = Whole(&mut stage).table("whole", args.runs.into(), hear)?;
            tables.push(whole);
        }
    }
    let words = args.program.iter().map(|word| word.to_string_lossy().into_owned());
    let mut about = row![
        "program" => words.collect::<Vec<_>>(),
        "lanes" => format!("{request}:{batch}"),
        "learn_ns" => nanos(args.learn),
    ];
    about.extend(looked(looks));
    let uncompared = match &alone {
        None => Some("as --runs is 0".to_owned()),
        Some(alone) => {
            about.extend(row![
                "alone_wall_ns" => nanos(alone.wall),
                "alone_exit_status" => alone.status,
            ]);
            alone.unlike.as_ref().map(|why| format!("as two runs alone differ: {why}"))
        }
    };
    let not_compared = |why: String| format!("output and exit status: not compared, {why}");
    left_out.extend(uncompared.map(not_compared));
    let wrong = different(&stage.compared);
    let rows = stage.compared.iter().map(Compared::row).collect();
    tables.push(Table { key: "compared", columns: COMPARED, rows });
    Ok(Report { about, tables, left_out, wrong })
}

/// Why whole runs are not compared, if they are not.
fn no_slowdown(args: &Args, alone: Option<&Alone>) -> Option<String> {
    match alone {
        None => Some("not measured, as --runs is 0".to_owned()),
        Some(alone) if alone.wall < TOO_SHORT => {
            let wall = duration::show(nanos(alone.wall));
            Some(format!("not measured, as the program is too short for it: {wall} alone"))
        }
        Some(_) if args.checks == GUARD => {
            Some("not measured, as there is only the guard: give another --checks".to_owned())
        }
        Some(_) => None,
    }
}

/// Runs that did not do the same as alone.
fn different(compared: &[Compared]) -> Option<String> {
    let say = |Compared { checks, runs, different, first_difference }: &Compared| {
        let first = first_difference.as_deref().unwrap_or_default();
        format!("--checks {checks}: {different} of {runs} runs differ ({first})")
    };
    let wrong = compared.iter().filter(|compared| compared.different > 0);
    let all: Vec<String> = wrong.map(say).collect();
    (!all.is_empty()).then(|| all.join("; "))
}

/// Runs that were compared with the run alone.
#[derive(Debug)]
struct Compared {
    checks: String,
    runs: usize,
    different: usize,
    first_difference: Option<String>,
}

const COMPARED: &[Column] = &[
    label("checks", "output and exit status"),
    number("runs", "runs", "", 0),
    number("different", "NOT as alone", "", 0).lower(),
    label("first_difference", "the first difference"),
];

impl Compared {
    fn row(&self) -> Row {
        row![
            "checks" => self.checks,
            "runs" => self.runs,
            "different" => self.different,
            "first_difference" => self.first_difference,
        ]
    }
}

/// Two runs alone.
#[derive(Debug)]
struct Alone {
    /// The shorter one.
    wall: Duration,
    status: u8,
    /// What the second did otherwise than the first: then there is nothing to compare with.
    unlike: Option<String>,
}

/// Turns of one length, next to the program under one kind of checks.
#[derive(Debug)]
struct Case {
    checks: String,
    turn: Duration,
    seen: Seen,
    /// How the program was checked indeed.
    used: String,
    /// Over whole runs; nothing where the kernel counted nothing.
    reported_ns: Option<u64>,
    runs: usize,
}

impl Case {
    fn row(&self) -> Row {
        let (learned, whole) = (self.seen.learned, self.seen.whole);
        let percent = |part: u64, of: u64| (of > 0).then(|| rounded(percent(part, of)));
        let agrees = |reported_ns: u64| {
            let apart_ns = reported_ns.abs_diff(whole.overlapped_ns);
            apart_ns <= (whole.overlapped_ns / 10).max(whole.busy_ns / 1000)
        };
        row![
            "checks" => self.checks,
            "used" => self.used,
            "turn_ns" => nanos(self.turn),
            "turns" => self.seen.turns,
            "runs" => self.runs,
            "busy_ns" => learned.busy_ns,
            "overlapped_ns" => learned.overlapped_ns,
            "percent" => percent(learned.overlapped_ns, learned.busy_ns),
            "whole_busy_ns" => whole.busy_ns,
            "whole_overlapped_ns" => whole.overlapped_ns,
            "whole_percent" => percent(whole.overlapped_ns, whole.busy_ns),
            "reported_ns" => self.reported_ns,
            "reported_percent" => self.reported_ns.and_then(|ns| percent(ns, whole.busy_ns)),
            "agrees" => self.reported_ns.map(agrees),
            // The batch on its lane again in the middle of a turn.
            "let_in" => self.seen.let_in_ns.len(),
            "let_in_longest_ns" => self.seen.let_in_ns.iter().max(),
        ]
    }
}

/// Every kind of checks, next to turns of each length.
struct NextTo<'a, 'b> {
    stage: &'a mut Stage<'b>,
    cases: Vec<Case>,
}

impl<'a, 'b> NextTo<'a, 'b> {
    fn new(stage: &'a mut Stage<'b>) -> Self {
        let case = |checks: &str, turn: Duration| Case {
            checks: checks.to_owned(),
            turn,
            seen: Seen::default(),
            used: String::new(),
            reported_ns: None,
            runs: 0,
        };
        let of_method = |checks| {
            stage.args.next_to.turns.iter().map(move |&turn| case(checks, turn)).collect::<Vec<_>>()
        };
        let cases = stage.methods().into_iter().flat_map(of_method).collect();
        Self { stage, cases }
    }
}

impl Scenario for NextTo<'_, '_> {
    const COLUMNS: &'static [Column] = &[
        label("checks", "checks"),
        label("used", "used"),
        number("turn_ns", "turn", "us", 0).scaled(1e-3),
        number("turns", "turns", "", 0),
        number("percent", "traced", "%", 2).lower(),
        number("whole_percent", "whole", "%", 2).lower(),
        number("reported_percent", "reported", "%", 2).lower(),
        label("agrees", "agree"),
        metric("reaction_ns", "to stop", "us", 0).scaled(1e-3).lower().show(&[
            Part::Median,
            Part::P90,
            Part::P99,
            Part::N,
        ]),
        number("let_in", "let in", "", 0).lower(),
        number("let_in_longest_ns", "at most", "us", 0).scaled(1e-3).lower(),
    ];

    fn cases(&self) -> Vec<Row> {
        self.cases.iter().map(Case::row).collect()
    }

    fn run(&mut self, case: usize, _: usize, values: &mut Values) -> Result<(), BenchError> {
        let Case { checks, turn, .. } = &self.cases[case];
        let mut found = self.stage.case(checks, *turn)?;
        let reactions_ns = std::mem::take(&mut found.seen.reactions_ns);
        values.extend("reaction_ns", reactions_ns.into_iter().map(duration::number));
        self.cases[case] = found;
        Ok(())
    }
}

/// Whole runs on an idle lane, under the guard and as chosen.
struct Whole<'a, 'b>(&'a mut Stage<'b>);

impl Scenario for Whole<'_, '_> {
    const COLUMNS: &'static [Column] = &[
        label("checks", "whole runs on an idle lane"),
        metric("wall_ns", "time", "ms", 1).scaled(1e-6).lower().show(&[Part::Median]),
        metric("slowdown", "slowdown", "", 3).ratio_of("wall_ns").lower().show(RATIO),
        metric("own_slowdown", "its own time", "", 3).ratio_of("ran_ns").lower().show(RATIO),
    ];

    fn cases(&self) -> Vec<Row> {
        self.0.methods().iter().map(|checks| row!["checks" => checks]).collect()
    }

    fn baseline(&self, case: usize) -> Option<usize> {
        (case > 0).then_some(0)
    }

    fn run(&mut self, case: usize, _: usize, values: &mut Values) -> Result<(), BenchError> {
        let checks = self.0.methods()[case];
        let Some(RunReport { wall_ns, figures, .. }) = self.0.whole_under(checks)? else {
            return Ok(());
        };
        // A nap next to another task on the request lane is no cost of what was chosen.
        let wall_ns = wall_ns.saturating_sub(figures.napped_ns);
        values.add("wall_ns", duration::number(wall_ns.max(1)));
        // How long the batch itself ran: what is missing to the whole was taken from it.
        values.extend("ran_ns", figures.ran_ns().map(|ns| duration::number(ns.max(1))));
        Ok(())
    }
}

const RATIO: &[Part] = &[Part::Median, Part::Range, Part::N];

/// Where runs keep their files, and what they are compared with.
struct Stage<'a> {
    args: &'a Args,
    starts: Starts<'a>,
    /// Nothing if two runs alone differ, or none was made.
    alone: Option<Ended>,
    /// For a whole run.
    patience: Duration,
    compared: Vec<Compared>,
}

impl<'a> Stage<'a> {
    /// The baseline first.
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
        // Next to turns of any length it has a third of its lane at least.
        self.patience = first_wall.max(second_wall) * 10 + Duration::from_secs(30);
        self.alone = unlike.is_none().then_some(first);
        Ok(Some(Alone { wall: first_wall.min(second_wall), status, unlike }))
    }

    fn case(&mut self, checks: &str, turn: Duration) -> Result<Case, BenchError> {
        let (request_cpu, batch_cpu) = self.starts.lanes;
        let limit = 3 * self.args.next_to.duration + Duration::from_secs(5) + self.args.learn;
        let trace = Buffer::start(&[request_cpu, batch_cpu], KB_A_SECOND * limit.as_secs())?;
        let player = Player::start(request_cpu, turn)?;
        let request = player.thread;
        let (fronts, reports) = self.run_next_to(player, checks, limit)?;
        let learn_ns = nanos(self.args.learn);
        let runs = fronts.len();
        let cast = Cast { request_cpu, batch_cpu, request, fronts, learn_ns };
        let seen = seen(&trace.read()?, &cast);
        if !seen.any_request {
            return Err(TraceError::Strangers.into());
        }
        let Some(last) = reports.last() else { return Err(unreported(checks).into()) };
        let used = last.checks.clone();
        let reported = reports.iter().map(|report| report.figures.overlapped_ns);
        let reported_ns = reported.sum();
        Ok(Case { checks: checks.to_owned(), turn, seen, used, reported_ns, runs })
    }

    /// Runs the program again and again while requests are played, until they have been counted
    /// for long enough or `limit` is over.
    fn run_next_to(
        &mut self,
        player: Player,
        checks: &str,
        limit: Duration,
    ) -> Result<(Vec<i32>, Vec<RunReport>), BenchError> {
        let begin = Instant::now();
        let wanted = self.args.next_to.duration;
        let (mut fronts, mut reports, mut counted) = (Vec::new(), Vec::new(), Duration::ZERO);
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
                // Before the batch is told to end: that takes the lane, whatever runs on the other.
                player = None;
            }
            counted += start.elapsed().saturating_sub(self.args.learn + TO_START);
            match ended {
                Some(status) => {
                    reports.extend(running.report()?);
                    self.compare(checks, running.ended(status))?;
                }
                None => {
                    running.stop(STOP_TIMEOUT);
                    reports.extend(running.report()?);
                }
            }
        }
        Ok((fronts, reports))
    }

    /// A program that came to no end while turns were counted is compared with itself alone
    /// all the same.
    fn once_next_to_requests(&mut self, checks: &str) -> Result<(), BenchError> {
        let ran = self.compared.iter().any(|compared| compared.checks == checks);
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
        let at = self.compared.iter().position(|compared| compared.checks == checks);
        let at = at.unwrap_or_else(|| {
            let checks = checks.to_owned();
            let none = Compared { checks, runs: 0, different: 0, first_difference: None };
            self.compared.push(none);
            self.compared.len() - 1
        });
        let compared = &mut self.compared[at];
        compared.runs += 1;
        compared.different += usize::from(unlike.is_some());
        compared.first_difference = compared.first_difference.take().or(unlike);
        Ok(())
    }
}

fn unreported(checks: &str) -> LiveError {
    LiveError::Refused {
        why: format!("no run under {checks} came as far as its report"),
        fix: "give a longer --duration; see whether the machine is busy with other things",
    }
}

/// Waits for its end, but not for ever: others may hold the lanes.
fn whole(
    running: &mut Running,
    patience: Duration,
) -> Result<(Option<Ended>, Duration), LiveError> {
    let begin = Instant::now();
    let status = running.wait_until(|| begin.elapsed() > patience)?;
    let status = status.ok_or_else(|| LiveError::Refused {
        why: format!("the program did not end within {} s", patience.as_secs()),
        fix: "see whether others use these lanes; give --runs 0 for a program that does not end",
    })?;
    Ok((running.ended(status), begin.elapsed()))
}

const SEED: u64 = 7;

/// The requests: a thread that is busy for a turn and asleep for a pause drawn at random, so that
/// it is in step with no timer. It plays until this drops.
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
        let ended = |_| io::Error::other("the thread of requests ended early");
        player.thread = placed.recv().map_err(ended)??;
        Ok(player)
    }
}

/// The turn that goes on is played to its end.
impl Drop for Player {
    fn drop(&mut self) {
        // Relaxed: nothing is published through it.
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
    // From half a turn to one and a half, and up to a millisecond more.
    let span_ns = u64::try_from(turn.as_nanos()).unwrap_or(u64::MAX / 2) + 1_000_000;
    while !stop.load(Relaxed) {
        thread::sleep(turn / 2 + Duration::from_nanos(random.random_range(0..span_ns)));
        let begin = Instant::now();
        while begin.elapsed() < turn {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::value_of;
    use seen::Shared;
    use serde_json::Value;

    /// Goal: a row says what was measured. Method: figures made up, and their row.
    #[test]
    fn figures_are_shares_of_the_busy_time() {
        let case = |reported_ns, seen| Case {
            checks: "auto".to_owned(),
            turn: Duration::from_micros(200),
            seen,
            used: "patch".to_owned(),
            reported_ns,
            runs: 1,
        };
        let seen = Seen {
            learned: Shared { busy_ns: 1_000_000, overlapped_ns: 125_000 },
            whole: Shared { busy_ns: 2_000_000, overlapped_ns: 500_000 },
            let_in_ns: vec![7_000, 240_000],
            ..Seen::default()
        };
        let figures = |case: Case| {
            let row = case.row();
            let keys = ["percent", "whole_percent", "reported_percent", "let_in_longest_ns"];
            (keys.map(|key| value_of(&row, key).clone()), value_of(&row, "agrees").clone())
        };
        let (shares, agrees) = figures(case(Some(540_000), seen.clone()));
        assert_eq!((&shares[..3], agrees), (&[12.5, 25.0, 27.0].map(Value::from)[..], true.into()));
        assert_eq!(shares[3], 240_000);
        assert_eq!(figures(case(Some(560_000), seen)).1, false);
        let (shares, agrees) = figures(case(None, Seen::default()));
        assert!(shares.iter().chain([&agrees]).all(Value::is_null), "{shares:?}");
    }

    /// Goal: a run that does something else than alone is named. Method: one of two check methods
    /// that did.
    #[test]
    fn differences_are_named() {
        let compared = |checks: &str, different| Compared {
            checks: checks.to_owned(),
            runs: 7,
            different,
            first_difference: (different > 0).then(|| "exit status 2 instead of 0".to_owned()),
        };
        assert_eq!(different(&[compared("guard", 0), compared("auto", 0)]), None);
        let why = "--checks auto: 2 of 7 runs differ (exit status 2 instead of 0)";
        let found = different(&[compared("guard", 0), compared("auto", 2)]);
        assert_eq!(found.as_deref(), Some(why));
    }
}
