//! Whether a recording agrees with the observed program. `elfen shim`, started as a user starts it,
//! observes `elfen-truth`. That program publishes numbered turns and records the time stamps of
//! each turn.
//!
//! A turn is left out if a gap touches it or its thread was preempted in it: nothing could see its
//! whole length.

use std::fs;
use std::hint::spin_loop;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use elfen_console::duration::number;
use elfen_console::programs::find_program;
use elfen_shim::clock;
use elfen_shim::observers::OBSERVER;
use elfen_shim::recording::{self, Recording, State};

use super::stage::{Lanes, Stage};
use crate::bench::{
    BUILD_ALL, BenchError, BenchReport, Column, Part, Row, Stats, Table, joined, label, metric,
    number as figure, percent, pin, rounded, row, value_of,
};

const RUN: &str = "3s";
/// The values of `--period`, which also name the rows.
const PERIODS: [&str; 4] = ["max", "115ns", "1us", "10us"];
/// Classes of turn lengths, two to a power of ten, from 100 ns to 100 us.
const CLASSES_NS: [u64; 7] = [100, 316, 1_000, 3_162, 10_000, 31_623, 100_001];

/// The turns of one class of lengths, at one period.
const TRUTH: &[Column] = &[
    label("period", "period"),
    figure("run_ns", "turns", "ns", 0),
    figure("runs", "n", "", 0),
    figure("seen_percent", "seen", "%", 1).higher(),
    // The error of the lengths of the turns that were seen.
    metric("error_percent", "error of lengths", "%", 1).lower().show(&[Part::Median, Part::P90]),
    // The error of the share of a tag, over all turns at this period.
    figure("share_error_percent", "error of share", "%", 1).lower(),
];

/// The size of a recording.
pub(super) const SIZES: &[Column] = &[
    label("program", "recording of"),
    label("period", "--period"),
    figure("period_ns", "sample period", "ns", 0),
    figure("runs_a_second", "runs", "1000/s", 0).scaled(1e-3),
    figure("bytes_a_run", "per run", "bytes", 2).lower(),
    figure("gigabytes_a_minute", "size", "GB/min", 2).lower(),
];

/// Reports a recording or stamps that are wrong.
fn untrue(why: impl std::fmt::Display) -> BenchError {
    BenchError::failed(format!("comparison with elfen-truth: {why}"), BUILD_ALL)
}

pub(super) fn measure(stage: &mut Stage<'_>) -> Result<BenchReport, BenchError> {
    let (run, lanes) = (Run::new()?, stage.lanes);
    let (mut rows, mut sizes) = (Vec::new(), Vec::new());
    for period in PERIODS {
        let (recording, stamps) = stage.undisturbed(|_| {
            let output = run.start(lanes, period)?.wait_with_output()?;
            run.read(&output)
        })?;
        let bytes = fs::metadata(run.recording())?.len();
        sizes.push(size(&recording, bytes, "elfen-truth".to_owned(), period));
        rows.extend(compare(&recording, &stamps, period)?);
    }
    let truth = Table { key: "truth", columns: TRUTH, rows };
    let sizes = Table { key: "sizes", columns: SIZES, rows: sizes };
    Ok(BenchReport { tables: vec![truth, sizes], ..BenchReport::default() })
}

/// Runs `elfen shim` with `elfen-truth`, and reads the files that they write.
struct Run {
    truth: PathBuf,
    folder: tempfile::TempDir,
}

impl Run {
    fn new() -> Result<Self, BenchError> {
        Ok(Self { truth: find_program("elfen-truth")?, folder: tempfile::tempdir()? })
    }

    fn recording(&self) -> PathBuf {
        self.folder.path().join("run.shim")
    }

    fn turns(&self) -> PathBuf {
        self.folder.path().join("turns.csv")
    }

    fn start(&self, lanes: Lanes, period: &str) -> Result<Child, BenchError> {
        let mut command = lanes.shim()?;
        command.args(["--json", "--period", period, "--watch", "tag", "--watch", "value", "-o"]);
        command.arg(self.recording());
        command.arg("--").arg(&self.truth).args(["-d", RUN]).arg(self.turns());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(command.spawn()?)
    }

    /// Returns the recording, and the lengths of the turns.
    fn read(&self, output: &Output) -> Result<(Recording, Vec<u64>), BenchError> {
        if !output.status.success() {
            let message = String::from_utf8_lossy(&output.stderr);
            let why = message.lines().next().unwrap_or("elfen shim failed");
            return Err(untrue(why));
        }
        let recording = recording::open(&self.recording());
        let recording = recording.map_err(untrue)?;
        Ok((recording, stamps(&self.turns())?))
    }
}

/// Returns the lengths of the turns by their numbers. Number 0 has the length 0.
fn stamps(file: &Path) -> Result<Vec<u64>, BenchError> {
    let text = fs::read_to_string(file)?;
    let length = |row: &str| {
        let mut fields = row.split(',').skip(2).map(str::parse::<u64>);
        let (start, end) = (fields.next()?.ok()?, fields.next()?.ok()?);
        end.checked_sub(start)
    };
    let lengths = text.lines().skip(1).map(length);
    let lengths: Option<Vec<u64>> = std::iter::once(Some(0)).chain(lengths).collect();
    lengths.ok_or_else(|| untrue("a time stamp is not a number"))
}

pub(super) fn size(recording: &Recording, bytes: u64, program: String, period: &str) -> Row {
    let clock = recording.head.clock;
    let runs = recording.runs.iter().map(|runs| runs.len() as u64).sum::<u64>().max(1);
    let span = recording.span().map_or(1, |(first, last)| last - first).max(1);
    let seconds = number(clock.ns(span)) / 1e9;
    row![
        "program" => program,
        "period" => period,
        "period_ns" => recording.head.period_ns.median,
        "runs_a_second" => rounded(number(runs) / seconds),
        "bytes_a_run" => rounded(number(bytes) / number(runs)),
        "gigabytes_a_minute" => rounded(number(bytes) / seconds * 60.0 / 1e9),
    ]
}

/// A turn as it was seen: its number, and its first and last tick.
type Seen = (usize, u64, u64);

/// Returns sequences of turns without a gap in between. The first and the last turn of each
/// sequence may have begun or ended while the observer did not look.
fn unbroken(recording: &Recording, signal: usize) -> Vec<Vec<Seen>> {
    let mut found = vec![Vec::new()];
    for (run, end) in recording.runs_with_ends(signal) {
        match run.state {
            State::Value(turn) if turn > 0 => {
                let turn = usize::try_from(turn).unwrap_or(usize::MAX);
                if let Some(stretch) = found.last_mut() {
                    // A new chunk starts a run again, so a turn may consist of several runs.
                    match stretch.last_mut() {
                        Some((last, _, until)) if *last == turn => *until = end,
                        _ => stretch.push((turn, run.start_ticks, end)),
                    }
                }
            }
            _ => found.push(Vec::new()),
        }
    }
    found.retain(|stretch: &Vec<Seen>| stretch.len() > 2);
    found
}

/// The statistics of one class while its turns are counted.
#[derive(Default)]
struct Class {
    runs: u64,
    off: Vec<f64>,
}

fn compare(recording: &Recording, stamps: &[u64], period: &str) -> Result<Vec<Row>, BenchError> {
    let index_of = |name: &str| {
        let index = recording.head.signals.iter().position(|signal| signal.name == name);
        index.ok_or_else(|| untrue(format_args!("the recording has no {name}")))
    };
    let (value, tag) = (index_of("value")?, index_of("tag")?);
    let names = &recording.head.signals[tag].names;
    let odd = names.iter().find(|(_, name)| name == "odd").map(|(odd, _)| State::Value(*odd));
    let odd = odd.ok_or_else(|| untrue("the recording lacks the tag odd"))?;
    let clock = recording.head.clock;
    let mut classes: Vec<Class> = CLASSES_NS.windows(2).map(|_| Class::default()).collect();
    let class_of =
        |ns: u64| CLASSES_NS.windows(2).position(|class| (class[0]..class[1]).contains(&ns));
    let (mut odd_ns, mut all_ns, mut odd_ticks, mut all_ticks) = (0, 0, 0, 0);
    let mut tags = recording.runs_with_ends(tag).peekable();
    for stretch in unbroken(recording, value) {
        let (first, last) = (stretch[0], stretch[stretch.len() - 1]);
        let Some(inner) = stamps.get(first.0 + 1..last.0) else {
            return Err(untrue("the recording has turns that elfen-truth did not take"));
        };
        for (turn, &ns) in (first.0 + 1..).zip(inner) {
            all_ns += ns;
            odd_ns += if turn % 2 == 1 { ns } else { 0 };
            if let Some(class) = class_of(ns) {
                classes[class].runs += 1;
            }
        }
        for &(turn, start, end) in &stretch[1..stretch.len() - 1] {
            let (seen, ns) = (clock.ns(end - start), stamps[turn]);
            if let Some(class) = class_of(ns) {
                classes[class].off.push(percent(seen.abs_diff(ns), ns));
            }
        }
        let (from, to) = (first.2, last.1);
        all_ticks += to - from;
        while let Some((run, end)) = tags.next_if(|(run, _)| run.start_ticks < to) {
            if run.state == odd {
                odd_ticks += end.min(to).saturating_sub(run.start_ticks.max(from));
            }
        }
    }
    let share_error = (percent(odd_ticks, all_ticks) - percent(odd_ns, all_ns)).abs();
    let row = |(class, bounds): (Class, &[u64])| {
        let Class { runs, off } = class;
        row![
            "period" => period,
            // The class includes its lower bound and excludes its upper bound.
            "run_ns" => [bounds[0], bounds[1] - bounds[1] % 2],
            "runs" => runs,
            "seen_percent" => rounded(percent(off.len() as u64, runs)),
            "error_percent" => Stats::of(off),
            "share_error_percent" => rounded(share_error),
        ]
    };
    Ok(classes.into_iter().zip(CLASSES_NS.windows(2)).map(row).collect())
}

const COMPETED_PERIOD: &str = "1us";
/// How long after the start the kernel's account is read first, and how long after that it is read
/// again.
const BEFORE: Duration = Duration::from_millis(500);
const BETWEEN: Duration = Duration::from_millis(2_000);
const LOOKS: u32 = 400;

const COMPETITOR: &[Column] = &[
    figure("time_ns", "next to a competitor", "ms", 1).scaled(1e-6),
    figure("gap_ns", "gaps", "ms", 1).scaled(1e-6),
    figure("not_run_ns", "not running, by the kernel", "ms", 1).scaled(1e-6),
    figure("gap_error_percent", "error of gaps", "%", 2).lower(),
    figure("share_error_percent", "error of share", "%", 2).lower(),
];

/// Whether gaps cover all of the time in which the observer did not run. A thread that spins takes
/// half of the observer's lane. The kernel's account of the observer shows how much time that was.
pub(super) fn competitor(stage: &mut Stage<'_>) -> Result<BenchReport, BenchError> {
    let lanes = stage.lanes;
    let row = stage.undisturbed(|_| {
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let competitor = scope.spawn(|| -> Result<(), BenchError> {
                pin(lanes.from)?;
                while !stop.load(Relaxed) {
                    spin_loop();
                }
                Ok(())
            });
            let found = next_to(lanes);
            stop.store(true, Relaxed);
            joined(competitor).and(found)
        })
    })?;
    Ok(Table { key: "competitor", columns: COMPETITOR, rows: vec![row] }.into())
}

fn next_to(lanes: Lanes) -> Result<Row, BenchError> {
    let run = Run::new()?;
    let mut child = run.start(lanes, COMPETED_PERIOD)?;
    let accounts_read = accounts(&mut child);
    let output = child.wait_with_output()?;
    let (recording, stamps) = run.read(&output)?;
    let [first, last] = accounts_read?;
    let clock = recording.head.clock;
    // Compare the gaps in the recording with the time that the observer did not run, between two
    // readings of the kernel's account.
    let gap_ns = clock.ns(gaps(&recording, first.at, last.at));
    let time_ns = clock.ns(last.at - first.at);
    let not_run_ns = time_ns.saturating_sub(last.ran_ns - first.ran_ns);
    let rows = compare(&recording, &stamps, COMPETED_PERIOD)?;
    Ok(row![
        "time_ns" => time_ns,
        "gap_ns" => gap_ns,
        "not_run_ns" => not_run_ns,
        "gap_error_percent" => rounded(percent(gap_ns.abs_diff(not_run_ns), not_run_ns)),
        "share_error_percent" => rows.first().map(|row| value_of(row, "share_error_percent")),
    ])
}

/// How long a thread had run at some time.
#[derive(Clone, Copy, Debug)]
struct Account {
    at: u64,
    ran_ns: u64,
}

/// Reads the observer's account twice.
fn accounts(elfen: &mut Child) -> Result<[Account; 2], BenchError> {
    let tasks = format!("/proc/{}/task", elfen.id());
    let gone = || untrue("the observer of `elfen shim` did not run");
    let observer = (0..LOOKS).find_map(|_| {
        thread::sleep(Duration::from_millis(5));
        let mut tasks = fs::read_dir(&tasks).ok()?.flatten().map(|task| task.path());
        tasks.find(|task| {
            fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim_end() == OBSERVER)
        })
    });
    let schedule = observer.ok_or_else(gone)?.join("schedstat");
    let account = || -> Result<Account, BenchError> {
        let before = clock::before();
        let text = fs::read_to_string(&schedule)?;
        let at = before + (clock::before() - before) / 2;
        let ran = text.split_whitespace().next().and_then(|ran| ran.parse().ok());
        Ok(Account { at, ran_ns: ran.ok_or_else(gone)? })
    };
    thread::sleep(BEFORE);
    let first = account()?;
    thread::sleep(BETWEEN);
    Ok([first, account()?])
}

/// Returns the ticks of gaps between two times.
fn gaps(recording: &Recording, from: u64, to: u64) -> u64 {
    let gaps = recording.runs_with_ends(0).filter(|(run, _)| run.state == State::Gap);
    gaps.map(|(run, end)| end.min(to).saturating_sub(run.start_ticks.max(from))).sum()
}
