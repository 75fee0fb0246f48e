//! Goal: the exports of `elfen shim` agree with the observed program's own records. Method: a
//! program that works in numbered turns. The number is watched, and the program takes a timestamp
//! for each turn. The test compares rows of the export with the timestamps. Turns are long compared
//! with the period of a debug build, and all bounds are ratios. `elfen lab bench shim` measures
//! short turns. `unmodified.rs` tests programs of other projects.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

#[path = "../needs/mod.rs"]
mod needs;
mod unmodified;

/// A row of the export.
struct Row {
    start: u64,
    end: u64,
    state: String,
}

fn rows(csv: &str, signal: &str) -> Vec<Row> {
    let of_signal = csv.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split(',').collect();
        (fields[0] == signal).then_some(fields)
    });
    let row = |fields: Vec<&str>| {
        let [start, end] = [1, 2].map(|at: usize| fields[at].parse().unwrap());
        Row { start, end, state: fields[3].to_owned() }
    };
    of_signal.map(row).collect()
}

/// Groups turns that follow each other without a gap. Each turn has a number, a start and an end.
fn unbroken(rows: &[Row]) -> Vec<Vec<(usize, u64, u64)>> {
    let mut found = vec![Vec::new()];
    for row in rows {
        match row.state.parse::<usize>().ok().filter(|&turn| turn > 0) {
            Some(turn) => found.last_mut().unwrap().push((turn, row.start, row.end)),
            None => found.push(Vec::new()),
        }
    }
    found.retain(|stretch| stretch.len() > 2);
    found
}

fn require_truth() {
    needs::built("elfen-truth");
    needs::idle_lanes();
}

/// A run of the program: the summary, the export, and the ground truth.
struct Observation {
    summary: Value,
    csv: String,
    /// The length of each turn. Turns are numbered from 1.
    truth: Vec<u64>,
    /// The start of each turn, in CLOCK_MONOTONIC.
    starts: Vec<u64>,
}

fn observe(folder: &Path, period: &str, turns: &[&str]) -> Observation {
    let elfen = Path::new(env!("CARGO_BIN_EXE_elfen"));
    let (recording, stamps) = (folder.join("run.shim"), folder.join("turns.csv"));
    let mut run = Command::new(elfen);
    run.args(["shim", "--json", "--period", period, "--watch", "tag", "--watch", "value", "-o"]);
    run.arg(&recording).arg("--").arg(elfen.with_file_name("elfen-truth")).arg(&stamps);
    let output = run.args(turns).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
    let export = Command::new(elfen).args(["shim", "export"]).arg(&recording).output().unwrap();
    let csv = String::from_utf8(export.stdout).unwrap();
    let text = fs::read_to_string(&stamps).unwrap();
    let turn = |row: &str| {
        let fields: Vec<u64> = row.split(',').skip(2).map(|at| at.parse().unwrap()).collect();
        (fields[0], fields[1] - fields[0])
    };
    let turns = text.lines().skip(1).map(turn);
    let (starts, truth) = std::iter::once((0, 0)).chain(turns).unzip();
    Observation { summary, csv, truth, starts }
}

#[test]
#[ignore = "needs two idle CPUs"]
fn an_export_agrees_with_the_programs_own_stamps() {
    require_truth();
    let _lanes = LANES.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().unwrap();
    let turns = ["-d", "2s", "--shortest", "20us", "--longest", "2ms"];
    let Observation { summary, csv, truth, .. } = observe(folder.path(), "max", &turns);
    let stretches = unbroken(&rows(&csv, "value"));
    let (mut whole, mut seen, mut errors) = (0, 0, Vec::new());
    let (mut seen_ns, mut odd_true, mut all_true) = ([0, 0], 0, 0);
    let tags = rows(&csv, "tag");
    for stretch in &stretches {
        // The first turn may have begun in a gap, and the last turn may have ended in a gap.
        let (first, last) = (stretch[0], stretch[stretch.len() - 1]);
        let inner = &stretch[1..stretch.len() - 1];
        whole += last.0 - first.0 - 1;
        seen += inner.len();
        for (turn, start, end) in inner {
            let off = (end - start).abs_diff(truth[*turn]);
            errors.push(100.0 * off as f64 / truth[*turn] as f64);
        }
        for (turn, ns) in truth.iter().enumerate().take(last.0).skip(first.0 + 1) {
            all_true += ns;
            odd_true += if turn % 2 == 1 { *ns } else { 0 };
        }
        let (from, to) = (first.2, last.1);
        // Numbers of turns are joined across gaps, because they only increase. Tags are not joined.
        for (seen, tag) in seen_ns.iter_mut().zip(["odd", "even"]) {
            let inside = tags.iter().filter(|row| row.state == tag);
            let clipped = inside.map(|row| row.end.min(to).saturating_sub(row.start.max(from)));
            *seen += clipped.sum::<u64>();
        }
    }
    // Other work may have occupied either lane most of the time.
    assert!(whole > 50, "{whole} turns could be compared; {summary:#}");
    assert!(seen * 100 >= whole * 98, "{seen} of {whole} turns were seen");
    errors.sort_by(f64::total_cmp);
    let median = errors[errors.len() / 2];
    assert!(median <= 2.0, "the median length is off by {median} %");
    let share = |part: u64, all: u64| 100.0 * part as f64 / all as f64;
    let (by_export, by_stamps) =
        (share(seen_ns[0], seen_ns.iter().sum()), share(odd_true, all_true));
    assert!((by_export - by_stamps).abs() <= 1.0, "{by_export} % and {by_stamps} %");
}

/// Each test holds this lock while it runs, because each uses both lanes.
static LANES: Mutex<()> = Mutex::new(());

/// Goal: a row that spans several timer ticks of the observer has the right length. Method: turns
/// of 1 to 10 ms, whose numbers join the pieces between ticks. 90 % of the rows are within 1 % of
/// the timestamps. Turns next to a long gap, or to a time without the thread, do not count: other
/// work occupied a lane.
#[test]
#[ignore = "needs two idle CPUs"]
fn turns_of_milliseconds_have_their_length() {
    require_truth();
    const ROUNDS: u32 = 12;
    const ENOUGH: u64 = 40;
    let _lanes = LANES.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().unwrap();
    let (mut compared, mut right, mut offsets) = (0, 0, Vec::new());
    for _ in 0..ROUNDS {
        let turns = ["-d", "4s", "--shortest", "1ms", "--longest", "10ms"];
        let observation = observe(folder.path(), "1us", &turns);
        let Observation { summary, csv, truth, starts } = observation;
        let began = summary["began_monotonic_ns"].as_u64().unwrap();
        let line = csv.lines().next().unwrap();
        assert!(line.starts_with('#') && line.contains(&format!("MONOTONIC {began} ns")), "{line}");
        let all = rows(&csv, "value");
        for (at, row) in all.iter().enumerate() {
            let Ok(turn @ 1..) = row.state.parse::<usize>() else { continue };
            if is_seen(&mut all[..at].iter().rev()) && is_seen(&mut all[at + 1..].iter()) {
                compared += 1;
                offsets.push((began + row.start).abs_diff(starts[turn]));
                right +=
                    u64::from((row.end - row.start).abs_diff(truth[turn]) * 100 <= truth[turn]);
            }
        }
        // If other work runs, only few turns of a run can be compared.
        if compared >= ENOUGH {
            break;
        }
    }
    offsets.sort_unstable();
    let offset = offsets[offsets.len() / 2];
    println!("{right} of {compared} turns are within 1 %; the median start is off by {offset} ns");
    assert!(compared >= ENOUGH && right * 100 >= compared * 90, "{right} of {compared}");
    assert!(offset < 20_000, "the clocks differ: {offset} ns");
}

/// Whether the gaps on one side of a row are short, and the thread ran there.
fn is_seen(next_to: &mut dyn Iterator<Item = &Row>) -> bool {
    const LONG_NS: u64 = 30_000;
    let mut unseen_ns = 0;
    for row in next_to {
        match row.state.as_str() {
            "(gap)" => unseen_ns += row.end - row.start,
            "(not running)" => return false,
            _ => return unseen_ns <= LONG_NS,
        }
    }
    false
}
