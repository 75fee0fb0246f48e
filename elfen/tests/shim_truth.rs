//! Goal: what `elfen shim` exports agrees with what the observed says of itself. Method: a program
//! whose every turn has a number, which is watched, and a stamp of its own; rows and stamps are
//! held against each other here, by these two files alone. Turns are long beside the period of a
//! debug build, and all bounds are ratios: `elfen bench shim` measures the short ones.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

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

/// Turns that lie behind each other without a gap, as they were seen: number, start, end.
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

fn missing() -> Option<&'static str> {
    let online = fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
    let truth = Path::new(env!("CARGO_BIN_EXE_elfen")).with_file_name("elfen-truth");
    match (online.trim() == "0", truth.is_file()) {
        (true, _) => Some("observer and observed take two CPUs"),
        (_, false) => Some("elfen-truth is not built; `cargo test --workspace` builds it"),
        _ => None,
    }
}

#[test]
fn an_export_agrees_with_the_programs_own_stamps() {
    if let Some(why) = missing() {
        writeln!(std::io::stderr(), "skipped: elfen shim and the truth: {why}").unwrap();
        return;
    }
    let elfen = Path::new(env!("CARGO_BIN_EXE_elfen"));
    let folder = tempfile::tempdir().unwrap();
    let (recording, stamps) = (folder.path().join("run.shim"), folder.path().join("turns.csv"));
    let mut run = Command::new(elfen);
    run.args(["shim", "--json", "--period", "max", "--watch", "tag", "--watch", "value", "-o"]);
    run.arg(&recording).arg("--").arg(elfen.with_file_name("elfen-truth")).arg(&stamps);
    run.args(["--for", "2s", "--shortest", "20us", "--longest", "2ms"]);
    let output = run.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let summary: Value = serde_json::from_slice(&output.stdout).unwrap();

    let export = Command::new(elfen).args(["shim", "export"]).arg(&recording).output().unwrap();
    let csv = String::from_utf8(export.stdout).unwrap();
    let text = fs::read_to_string(&stamps).unwrap();
    // Of each turn its length; turns have numbers from 1.
    let truth: Vec<u64> = std::iter::once(0)
        .chain(text.lines().skip(1).map(|row| {
            let fields: Vec<u64> = row.split(',').skip(2).map(|at| at.parse().unwrap()).collect();
            fields[1] - fields[0]
        }))
        .collect();

    let stretches = unbroken(&rows(&csv, "value"));
    let (mut whole, mut seen, mut errors) = (0, 0, Vec::new());
    let (mut odd_seen, mut odd_true, mut all_seen, mut all_true) = (0, 0, 0, 0);
    let tags = rows(&csv, "tag");
    for stretch in &stretches {
        // The first and the last may have begun and ended when nobody looked.
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
        all_seen += to - from;
        let inside = tags.iter().filter(|row| row.state == "odd");
        let clipped = inside.map(|row| row.end.min(to).saturating_sub(row.start.max(from)));
        odd_seen += clipped.sum::<u64>();
    }
    // Someone else may have had either lane most of the time.
    assert!(whole > 50, "{whole} turns could be compared; {summary:#}");
    assert!(seen * 100 >= whole * 98, "{seen} of {whole} turns were seen");
    errors.sort_by(f64::total_cmp);
    let median = errors[errors.len() / 2];
    assert!(median <= 2.0, "lengths are off by {median} % in the median");
    let share = |part: u64, all: u64| 100.0 * part as f64 / all as f64;
    let (by_export, by_stamps) = (share(odd_seen, all_seen), share(odd_true, all_true));
    assert!((by_export - by_stamps).abs() <= 1.0, "{by_export} % and {by_stamps} %");
}
