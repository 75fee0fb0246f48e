//! Tests `elfen doctor` on recorded machines, compared with files, and on this machine.
//!
//! `doctor/NAME.machine` is a recorded machine with the results of attempts, and `doctor/NAME.txt`
//! is its report. There is one machine for each topology, and `doctor/faults.txt` edits one of
//! them. After an intended change, `SNAPSHOTS=overwrite cargo test -p elfen --test doctor` writes
//! the reports.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use snapbox::data::DataFormat;
use snapbox::{Assert, Data};

/// Machines, each with the arguments for its report.
const MACHINES: [(&str, &[&str]); 6] = [
    // A virtual machine that shows no SMT, with cgroup version 1 and without BTF; an ordinary user.
    ("bare", &["--all"]),
    // A user namespace without cgroups, on a virtual machine with SMT; idle states are disabled.
    ("container", &["--all"]),
    // Four cores of two lanes; elfend refuses the user.
    ("desktop-user", &["--all"]),
    // Four cores of two lanes, prepared for Elfen; root.
    ("server-root", &["--all"]),
    // Four cores after `echo off > smt/control`; root.
    ("smt-off", &["--all"]),
    // A virtual machine that shows no SMT, with a pair from `--lanes` and running JVMs; root.
    ("vm", &["--all", "--lanes", "0:1"]),
];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/doctor")
}

/// `elfen doctor` with these arguments, without variables of this process.
fn doctor(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfen"));
    command.env_remove("ELFEN_LANES").env_remove("ELFEN_MACHINE").arg("doctor").args(words);
    command
}

fn on_machine(file: &Path, words: &[&str]) -> Output {
    doctor(words).env("ELFEN_MACHINE", file).output().expect("elfen starts")
}

fn on_recorded(machine: &str, words: &[&str]) -> Output {
    on_machine(&folder().join(machine).with_extension("machine"), words)
}

/// The text that the command printed, and its exit status. A report is printed to stdout only.
fn report(output: &Output) -> (String, i32) {
    assert!(output.stderr.is_empty(), "{output:?}");
    let text = String::from_utf8(output.stdout.clone()).expect("UTF-8");
    (text, output.status.code().expect("it exits"))
}

fn json(output: &Output) -> (Value, i32) {
    let (text, status) = report(output);
    (serde_json::from_str(&text).expect("one JSON value"), status)
}

fn assert_file(name: &str, actual: String) {
    let expected = Data::read_from(&folder().join(name), Some(DataFormat::Text));
    Assert::new().action_env("SNAPSHOTS").normalize_paths(false).eq(actual, expected);
}

/// Goal: the report of each topology is as recorded. Method: every machine as text, one also as
/// JSON.
#[test]
fn recorded_machines() {
    for (machine, words) in MACHINES {
        assert_file(&format!("{machine}.txt"), report(&on_recorded(machine, words)).0);
    }
    for (machine, words) in [("bare", &[][..]), ("vm", &["--lanes", "0:1"])] {
        assert_file(&format!("{machine}-problems.txt"), report(&on_recorded(machine, words)).0);
    }
    assert_file("server-root.json", report(&on_recorded("server-root", &["--json"])).0);
}

fn checks(report: &Value) -> &Vec<Value> {
    report["checks"].as_array().expect("a list")
}

fn word<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_else(|| panic!("{key} of {value}"))
}

fn names(report: &Value) -> Vec<&str> {
    checks(report).iter().map(|check| word(check, "name")).collect()
}

/// Asserts what scripts can rely on for any machine.
fn assert_shape(report: &Value, status: i32) {
    let ok = report["ok"].as_bool().expect("true or false");
    assert_eq!(status, if ok { 0 } else { 3 }, "{report}");
    assert_eq!(report["schema"], 1);
    assert_eq!(report["missing"].as_array().expect("a list").is_empty(), ok);
    assert_eq!(word(report, "next").is_empty(), ok);
    for check in checks(report) {
        let status = word(check, "status");
        assert!(["yes", "no", "warn"].contains(&status), "{check}");
        assert!(!word(check, "why").is_empty(), "{check}");
        assert_eq!(word(check, "fix").is_empty(), status == "yes", "{check}");
        let kebab = |c: char| c.is_ascii_lowercase() || c == '-';
        assert!(word(check, "name").chars().all(kebab), "{check}");
    }
    let distinct: BTreeSet<&str> = names(report).into_iter().collect();
    assert_eq!(distinct.len(), checks(report).len());
}

/// The text without line breaks and without the marks of fixes.
fn unwrapped(text: &str) -> String {
    text.split_whitespace().filter(|word| *word != ">").collect::<Vec<_>>().join(" ")
}

/// Goal: scripts can rely on the JSON, and the text agrees with it. The text has 100 columns, no
/// escapes in a pipe, and the verdict at the end. Method: every recorded machine.
#[test]
fn text_agrees_with_json() {
    let (first, _) = json(&on_recorded("vm", &["--json"]));
    for (machine, words) in MACHINES {
        let (report, status) = json(&on_recorded(machine, &[words, &["--json"]].concat()));
        assert_shape(&report, status);
        assert_eq!(names(&report), names(&first), "{machine}");
        assert_text(&self::report(&on_recorded(machine, words)), &report, status);
    }
}

fn assert_text((text, text_status): &(String, i32), report: &Value, status: i32) {
    assert_eq!(*text_status, status);
    assert!(!text.contains('\u{1b}'), "{text}");
    let (first, lines) = text.split_once("\n\n").expect("a verdict in the first line");
    assert!(lines.lines().all(|line| line.chars().count() <= 100), "{lines}");
    let lines = unwrapped(lines);
    for check in checks(report) {
        let [status, name, why, fix] = ["status", "name", "why", "fix"].map(|key| word(check, key));
        let line = unwrapped(&format!("{status} {name} {why} {fix}"));
        assert!(lines.contains(&line), "{line:?}: {text}");
    }
    let verdict = if status == 0 { "can run here" } else { "cannot run here" };
    assert!(first.contains(verdict) && first.ends_with(word(report, "next")), "{first}");
    assert_eq!(first.lines().count(), 1, "{first}");
}

/// `server-root` with edits. An edit is a file's new content, as in `/proc/version: x`, or the
/// result of an attempt, as in `attach: not-permitted`.
fn edited(edits: &str) -> tempfile::NamedTempFile {
    let machine = fs::read_to_string(folder().join("server-root.machine")).expect("UTF-8");
    let mut lines: Vec<String> = machine.lines().map(str::to_owned).collect();
    for edit in edits.lines() {
        let (name, content) = edit.split_once(": ").expect("NAME: CONTENT");
        let is_file = name.starts_with('/');
        let before = lines.len();
        lines.retain(|line| !line.starts_with(&format!("{name}:")));
        assert!(is_file || lines.len() < before, "no attempt {name}");
        let content = content.replace("\\e", "\u{1b}");
        let new = content.split("\\n").filter(|line| !(is_file && *line == "absent"));
        lines.extend(new.map(|line| format!("{name}: {line}")));
    }
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    fs::write(file.path(), lines.join("\n")).expect("room for it");
    file
}

/// Goal: each fault is found by its check, with its cause and a fix. Method: one fault at a time on
/// a prepared machine, and words that only this cause or its fix has.
#[test]
fn one_fault_at_a_time() {
    let faults = fs::read_to_string(folder().join("faults.txt")).expect("UTF-8");
    // sched_ext gives its scheduler's folder this name, which the file must not contain.
    let faults = faults.replace("LOADED", "root");
    let mut failed = Vec::new();
    // The first block of the file is an explanation.
    for fault in faults.trim_end().split("\n\n").skip(1) {
        let (head, edits) = fault.split_once('\n').expect("edits");
        let (check, words) = head.split_once(": ").expect("words");
        let (name, status) = check.split_once(' ').expect("a status");
        let machine = edited(edits);
        let (report, code) = json(&on_machine(machine.path(), &["--json"]));
        assert_shape(&report, code);
        let check = checks(&report).iter().find(|check| check["name"] == name).expect(name);
        let text = format!("{}; {}", word(check, "why"), word(check, "fix"));
        if word(check, "status") != status || !text.contains(words) {
            failed.push(format!("{fault}\n=> {check}"));
        }
        if text.contains('\u{1b}') {
            let (text, _) = self::report(&on_machine(machine.path(), &[]));
            assert!(
                !text.contains('\u{1b}'),
                "control characters of names are not printed: {text}"
            );
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
}

/// Goal: a recording replays. Method: record this machine, and check the form of the recording's
/// report. A recording of the recording must equal it.
#[test]
fn a_recording_replays() {
    let (recording, status) = report(&doctor(&["--dump-machine"]).output().expect("elfen starts"));
    assert_eq!(status, 0);
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    fs::write(file.path(), &recording).expect("room for it");
    let (replayed, status) = json(&on_machine(file.path(), &["--json"]));
    assert_shape(&replayed, status);

    let (once, _) = report(&on_machine(file.path(), &["--dump-machine"]));
    fs::write(file.path(), &once).expect("room for it");
    assert_eq!(report(&on_machine(file.path(), &["--dump-machine"])).0, once);
    assert_eq!(json(&on_machine(file.path(), &["--json"])).0, replayed);
}

/// Goal: invalid arguments are refused in one line with status 2. Method: invalid lanes, recordings
/// without attempts, and two outputs at once.
#[test]
fn refused() {
    let of_lanes = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sysfs/desktop-2way.machine");
    let cases = [
        (on_recorded("server-root", &["--lanes", "0:0"]), "CPU 0 is named twice"),
        (on_recorded("smt-off", &["--lanes", "0:1"]), "CPU 1 is offline"),
        (on_machine(&of_lanes, &[]), "no line capabilities"),
        (on_machine(Path::new("/nonexistent"), &[]), "No such file"),
        (on_recorded("vm", &["--json", "--dump-machine"]), "cannot be used with"),
    ];
    for (output, why) in cases {
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.starts_with("elfen: ") && stderr.lines().count() == 1, "{stderr}");
        assert!(stderr.contains(why) && output.stdout.is_empty(), "{stderr}");
    }
}
