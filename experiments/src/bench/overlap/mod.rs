//! `elfen lab bench overlap`: how long a batch runs next to requests, and how fast it leaves its
//! lane and comes back. Two small programs measure this from outside of Elfen.
//!
//! The request program is busy and idle by turns, with random pauses. It records when its lane was
//! busy. The batch program reads the clock all the time. It records when it was off its lane. Both
//! use the kernel's record of context switches. The benchmark prints the overlap of their records
//! next to the overlap that `elfen run` reports for the same time.

mod notes;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::Duration;

use elfen_machine::process::below;
use elfen_rt::signal::lane::LaneSlot;
use elfen_run::batches::{Batch, runs as running};

use super::program::{Compiled, NextToArgs, Running, Sources, Starts};
use super::{
    BenchError, BenchReport, Column, Explain, Part, Progress, Values, label, lanes, measure,
    metric, number, poll_timing_row, runs, share, value_of,
};
use notes::Stretch;

const EXAMPLE: &str = "\
Example:
  sudo elfen lab bench overlap --lanes 0:1

Column `agree` shows whether Elfen's report matches the measured overlap. The difference may be at \
most 20 % of the measured overlap or 0.1 % of the busy time.";

/// Measure how long a batch runs next to requests under borrow-idle, and how fast it leaves its
/// lane
///
/// A small program simulates requests: it is alternately busy and idle, with random pauses. A
/// second program, the batch, reads the clock all the time under `elfen run`. Both record when they
/// had their CPU, independently of Elfen. The batch has checks in its source, or a guard, or the
/// checks that `elfen run` chooses for a stripped program after one second of learning. This
/// program works in a loop without calls. The table also shows the overlap that `elfen run`
/// reports. Requires a C compiler, and root for the task map.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLE)]
pub(crate) struct BenchOverlapArgs {
    #[command(flatten)]
    next_to: NextToArgs,

    /// Number of rounds; each round has every kind of checks and every length of a turn
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = runs())]
    runs: usize,
}

pub(crate) fn run(
    args: &BenchOverlapArgs,
    progress: Progress<'_>,
) -> Result<BenchReport, BenchError> {
    let poll_timing = args.next_to.poll_timing.timing()?;
    let (sources, folder) = (build()?, tempfile::tempdir()?);
    let options = args.next_to.options();
    let starts = Starts {
        lanes: lanes(&args.next_to.lanes)?,
        options: &options,
        folder: folder.path(),
        keeps_output: true,
    };
    let overlaps = Overlaps { sources, starts };
    // `inline`: checks in the source. `auto`: what `elfen run` chooses for an unmodified program
    // that works in a loop without a call.
    let (kinds, cases) = args.next_to.cases(["inline", "guard", "auto"]);
    let run = |case: usize, _, values: &mut Values| {
        overlaps.run(kinds[case], args.next_to.duration, values)
    };
    let mut table = measure(("overlaps", OVERLAPS), &cases, args.runs, progress, run)?;
    for row in &mut table.rows {
        let keys = ["reported_ns", "seen_ns", "busy_ns"];
        let [reported, seen, busy] = keys.map(|key| value_of(row, key).as_u64().unwrap_or(0));
        let agrees = reported.abs_diff(seen) <= (seen / 5).max(busy / 1000);
        row.push(("agrees", agrees.into()));
    }
    Ok(BenchReport::from(table).about(poll_timing_row(poll_timing)))
}

const OVERLAPS: &[Column] = &[
    label("checks", "checks"),
    number("turn_ns", "turn", "us", 0).scaled(1e-3),
    number("turns", "turns", "", 0),
    share("seen_percent", "measured", 3, ("seen_ns", "busy_ns")).lower(),
    share("reported_percent", "reported", 3, ("reported_ns", "busy_ns")).lower(),
    label("agrees", "agree"),
    metric("stop_ns", "to stop", "us", 2).scaled(1e-3).lower().show(&[Part::Median, Part::P99]),
    metric("resume_ns", "to resume", "us", 2).scaled(1e-3).lower().show(&[Part::Median]),
];

/// How long `elfen run` learns about the `auto` program. This time is not counted.
const LEARN: Duration = Duration::from_secs(1);
/// How long a batch may take to end. It still writes its records, on a lane that other tasks may
/// use.
const TO_NOTE: Duration = Duration::from_secs(60);

const SOURCES: [(&str, &str); 3] = [
    ("switches.h", include_str!("switches.h")),
    ("request.c", include_str!("request.c")),
    ("batch.c", include_str!("batch.c")),
];

fn build() -> Result<Sources, BenchError> {
    let sources = Sources::new(&SOURCES)?;
    let compile = |words: &[&str]| sources.compile(words);
    let compiled = [
        compile(&["request.c", "-o", "request"])?,
        compile(&["batch.c", "-o", "guard"])?,
        // elfen_check.h finds its slow path in the library that `elfen run` preloads.
        compile(&["batch.c", "-o", "inline", "-DCHECKS"])?,
        // The program is stripped, so no symbol tells where its functions are. Static libraries may
        // not be installed.
        match compile(&["batch.c", "-o", "auto", "-DLOOP", "-s", "-static"])? {
            Ok(()) => Ok(()),
            Err(_) => compile(&["batch.c", "-o", "auto", "-DLOOP", "-s"])?,
        },
    ];
    let compiled: Compiled = compiled.into_iter().collect();
    compiled.explain(
        "building its programs",
        "check that cc builds programs that run on this machine",
    )?;
    Ok(sources)
}

struct Overlaps<'a> {
    sources: Sources,
    starts: Starts<'a>,
}

impl Overlaps<'_> {
    fn run(
        &self,
        (checks, turn): (&str, Duration),
        lasting: Duration,
        values: &mut Values,
    ) -> Result<(), BenchError> {
        let notes = self.sources.path("pauses");
        let words = [self.sources.path(checks), notes.clone()].map(PathBuf::into_os_string);
        let mut front = self.starts.under(checks, &words)?;
        let found = run_of(&mut front, self.starts.folder)?;
        // Wait for the first polls of the run, and for the lane's first lease.
        thread::sleep(Duration::from_millis(300));
        if checks == "auto" {
            self.play(turn, LEARN)?;
        }
        let before_ns = overlapped_ns(&found)?;
        let (turns, others) = self.play(turn, lasting)?;
        // The overlap that the guard adds at its next poll belongs to these turns.
        thread::sleep(Duration::from_millis(50));
        let reported_ns = overlapped_ns(&found)?.saturating_sub(before_ns);
        front.stop(TO_NOTE);
        let pauses = notes::joined(notes::read(&notes)?);
        let seen = notes::compare(&turns, &others, &pauses);
        values.count("turns", turns.len() as u64);
        values.count("busy_ns", seen.busy_ns);
        values.count("seen_ns", seen.overlapped_ns);
        values.count("reported_ns", reported_ns);
        values.extend("stop_ns", seen.stops_ns);
        values.extend("resume_ns", seen.resumes_ns);
        Ok(())
    }

    /// Runs the request program. Returns its own turns, and the times in which only other tasks
    /// kept the lane busy.
    fn play(
        &self,
        turn: Duration,
        lasting: Duration,
    ) -> Result<(Vec<Stretch>, Vec<Stretch>), BenchError> {
        let [turn, lasting] = [turn, lasting].map(|time| time.as_nanos().to_string());
        let program = self.sources.path("request").into_os_string();
        let words = [program, turn.into(), lasting.into(), "7".into()];
        let request = self.starts.lanes.0;
        let ended = self.starts.alone(request, &words, "turns")?.wait_until(|| false)?;
        if let Some(status) = ended.filter(|status| !status.success()) {
            let why = format!(
                "the program that simulates requests failed: {status}; status 3 means that \
                    perf_event_open(2) is not permitted"
            );
            return Err(BenchError::unsupported(why, "run this as root"));
        }
        let mut turns = notes::read(&self.starts.folder.join("turns"))?;
        let own = turns.iter().position(|turn| *turn == (0, 0)).unwrap_or(turns.len());
        let others = turns.split_off(own);
        Ok((turns, others.into_iter().skip(1).collect()))
    }
}

/// Returns the pages of the run, once the batch has printed that it runs.
fn run_of(front: &mut Running, folder: &Path) -> Result<Batch, BenchError> {
    let is_ready =
        || fs::read_to_string(folder.join("output")).is_ok_and(|text| text.starts_with("ready"));
    if let Some(status) = front.wait_until(is_ready)? {
        return Err(front.refusal(status).into());
    }
    // `elfen run` starts a spare process, and the spare process starts the supervisor.
    let family = below(front.id().unsigned_abs());
    let ours = |found: &Batch| family.contains(&found.supervisor.pid().unsigned_abs());
    running()?.into_iter().find(ours).ok_or_else(no_account)
}

fn overlapped_ns(batch: &Batch) -> Result<u64, BenchError> {
    let slot = batch.lanes.slot(0).filter(|slot: &&LaneSlot| slot.is_counted());
    slot.map(|slot| slot.overlapped_ns.load(Relaxed)).ok_or_else(no_account)
}

fn no_account() -> BenchError {
    let why = "the batch is not listed, or the kernel does not count its time";
    BenchError::unsupported(why, "run this as root, because counting requires eBPF")
}
