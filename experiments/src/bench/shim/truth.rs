//! Whether a recording agrees with the observed: `elfen shim`, as a user starts it, looks at
//! `elfen-truth`, whose turns have numbers that it publishes and stamps that it keeps.
//!
//! A turn that a gap touches, or that its thread did not run through, has no length that anybody
//! saw: it is in no figure.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Instant;

use elfen_console::duration::number;
use elfen_console::programs::find_program;
use elfen_shim::recording::{self, Recording, State, write};
use serde::Serialize;

use super::stage::{Error, Lanes, at, percent};

const RUN: &str = "3s";
/// How it is asked, and how it is called.
const PERIODS: [&str; 4] = ["max", "115ns", "1us", "10us"];
/// Lengths of turns, two classes to a power of ten, from 100 ns to 100 us.
const CLASSES_NS: [u64; 7] = [100, 316, 1_000, 3_162, 10_000, 31_623, 100_001];

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Off {
    pub(crate) median: f64,
    pub(crate) p90: f64,
}

/// Turns of one class of lengths, at one period.
#[derive(Debug, Serialize)]
pub(crate) struct Truth {
    pub(crate) period: &'static str,
    /// From, and below.
    pub(crate) run_ns: (u64, u64),
    pub(crate) runs: u64,
    pub(crate) seen_percent: f64,
    /// How far off the lengths are of those that were seen.
    pub(crate) error_percent: Off,
    /// How far off the share of a tag is, of all turns at this period.
    pub(crate) share_error_percent: f64,
}

/// What a recording takes.
#[derive(Debug, Serialize)]
pub(crate) struct Size {
    pub(crate) program: String,
    pub(crate) period: &'static str,
    pub(crate) period_ns: u64,
    pub(crate) runs_a_second: f64,
    pub(crate) bytes_a_run: f64,
    pub(crate) bytes_a_second: f64,
    pub(crate) gigabytes_a_minute: f64,
    /// What it takes to put a second of it into a file's form, once all has been seen.
    pub(crate) write_ms_a_second: f64,
}

pub(super) fn measure(lanes: Lanes) -> Result<(Vec<Truth>, Vec<Size>), Error> {
    let run = Run::new()?;
    let (mut rows, mut sizes) = (Vec::new(), Vec::new());
    for period in PERIODS {
        let output = run.start(lanes, period)?.wait_with_output()?;
        let (recording, stamps) = run.read(&output)?;
        let bytes = fs::metadata(run.recording())?.len();
        sizes.push(size(&recording, bytes, "elfen-truth".to_owned(), period));
        rows.extend(compare(&recording, &stamps, period)?);
    }
    Ok((rows, sizes))
}

/// `elfen shim` beside `elfen-truth`, and the files that they leave.
pub(super) struct Run {
    elfen: PathBuf,
    truth: PathBuf,
    folder: tempfile::TempDir,
}

impl Run {
    pub(super) fn new() -> Result<Self, Error> {
        let truth = find_program("elfen-truth")?;
        Ok(Self { elfen: find_program("elfen")?, truth, folder: tempfile::tempdir()? })
    }

    fn recording(&self) -> PathBuf {
        self.folder.path().join("run.shim")
    }

    fn turns(&self) -> PathBuf {
        self.folder.path().join("turns.csv")
    }

    pub(super) fn start(&self, lanes: Lanes, period: &str) -> io::Result<Child> {
        let mut command = Command::new(&self.elfen);
        let (on, from) = (lanes.on.to_string(), lanes.from.to_string());
        command.args(["shim", "--json", "--on", &on, "--from", &from, "--period", period]);
        command.args(["--watch", "tag", "--watch", "value", "-o"]).arg(self.recording());
        command.arg("--").arg(&self.truth).args(["--for", RUN]).arg(self.turns());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()
    }

    /// What was recorded, and the lengths of the turns.
    pub(super) fn read(&self, output: &Output) -> Result<(Recording, Vec<u64>), Error> {
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            let why = said.lines().next().unwrap_or("elfen shim failed");
            return Err(Error::Truth(why.to_owned()));
        }
        let recording = recording::open(&self.recording());
        let recording = recording.map_err(|error| Error::Truth(error.to_string()))?;
        Ok((recording, stamps(&self.turns())?))
    }
}

/// Lengths of turns by their numbers; 0 for none.
fn stamps(file: &Path) -> Result<Vec<u64>, Error> {
    let text = fs::read_to_string(file)?;
    let length = |row: &str| {
        let mut fields = row.split(',').skip(2).map(str::parse::<u64>);
        let (start, end) = (fields.next()?.ok()?, fields.next()?.ok()?);
        end.checked_sub(start)
    };
    let lengths = text.lines().skip(1).map(length);
    let lengths: Option<Vec<u64>> = std::iter::once(Some(0)).chain(lengths).collect();
    lengths.ok_or_else(|| Error::Truth("a stamp is no number".to_owned()))
}

pub(super) fn size(
    recording: &Recording,
    bytes: u64,
    program: String,
    period: &'static str,
) -> Size {
    let clock = recording.head.clock;
    let runs = recording.runs.iter().map(|runs| runs.len() as u64).sum::<u64>().max(1);
    let span = recording.span().map_or(1, |(first, last)| last - first).max(1);
    let seconds = number(clock.ns(span)) / 1e9;
    Size {
        program,
        period,
        period_ns: recording.head.period_ns.median,
        runs_a_second: number(runs) / seconds,
        bytes_a_run: number(bytes) / number(runs),
        bytes_a_second: number(bytes) / seconds,
        gigabytes_a_minute: number(bytes) / seconds * 60.0 / 1e9,
        write_ms_a_second: write_ms(recording) / seconds,
    }
}

/// Without the disk.
fn write_ms(recording: &Recording) -> f64 {
    let pool = recording.to_pool();
    let start = Instant::now();
    let written = write(&recording.head, &pool, &mut io::sink());
    let took = start.elapsed().as_secs_f64() * 1e3;
    written.expect("nothing is full that drops what it is given");
    took
}

/// A turn as it was seen: its number, and its first and last tick.
type Seen = (usize, u64, u64);

/// Turns that follow each other without a gap. The first and the last of each may have begun or
/// ended when nobody looked.
fn unbroken(recording: &Recording, signal: usize) -> Vec<Vec<Seen>> {
    let mut found = vec![Vec::new()];
    for (run, end) in recording.runs_with_ends(signal) {
        match run.state {
            State::Value(turn) if turn > 0 => {
                let turn = usize::try_from(turn).unwrap_or(usize::MAX);
                if let Some(stretch) = found.last_mut() {
                    // A chunk begins a run anew.
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

/// Turns of one class while they are counted.
#[derive(Default)]
struct Class {
    runs: u64,
    off: Vec<f64>,
}

pub(super) fn compare(
    recording: &Recording,
    stamps: &[u64],
    period: &'static str,
) -> Result<Vec<Truth>, Error> {
    let index_of = |name: &str| {
        let index = recording.head.signals.iter().position(|signal| signal.name == name);
        index.ok_or_else(|| Error::Truth(format!("the recording has no {name}")))
    };
    let (value, tag) = (index_of("value")?, index_of("tag")?);
    let names = &recording.head.signals[tag].names;
    let odd = names.iter().find(|(_, name)| name == "odd").map(|(odd, _)| State::Value(*odd));
    let odd = odd.ok_or_else(|| Error::Truth("the tag was not seen".to_owned()))?;
    let clock = recording.head.clock;
    let mut classes: Vec<Class> = CLASSES_NS.windows(2).map(|_| Class::default()).collect();
    let class_of =
        |ns: u64| CLASSES_NS.windows(2).position(|class| (class[0]..class[1]).contains(&ns));
    let (mut odd_ns, mut all_ns, mut odd_ticks, mut all_ticks) = (0, 0, 0, 0);
    let mut tags = recording.runs_with_ends(tag).peekable();
    for stretch in unbroken(recording, value) {
        let (first, last) = (stretch[0], stretch[stretch.len() - 1]);
        let Some(inner) = stamps.get(first.0 + 1..last.0) else {
            return Err(Error::Truth("turns were seen that were not taken".to_owned()));
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
        let Class { runs, mut off } = class;
        off.sort_by(f64::total_cmp);
        Truth {
            period,
            run_ns: (bounds[0], bounds[1] - bounds[1] % 2),
            runs,
            seen_percent: percent(off.len() as u64, runs),
            error_percent: Off { median: at(&off, 50), p90: at(&off, 90) },
            share_error_percent: share_error,
        }
    };
    Ok(classes.into_iter().zip(CLASSES_NS.windows(2)).map(row).collect())
}
