//! `elfen doctor` on recorded machines, compared with files, and on the machine that runs the test.
//!
//! `doctor/NAME.machine` is a machine with the answers of its kernel; `doctor/NAME.txt` and
//! `doctor/NAME.json` are the output for it. After an intended change, `SNAPSHOTS=overwrite cargo
//! test -p elfen --test doctor` writes these files.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use snapbox::data::DataFormat;
use snapbox::{Assert, Data};

/// Report, machine, and further arguments.
const REPORTS: [(&str, &str, &[&str]); 11] = [
    ("bare", "bare", &[]),
    ("container", "container", &[]),
    ("desktop-user", "desktop-user", &[]),
    ("lockdown", "lockdown", &[]),
    ("old-kernel", "old-kernel", &[]),
    ("sched-ext-irqs", "sched-ext-irqs", &[]),
    ("server-root", "server-root", &[]),
    ("small-kernel", "small-kernel", &[]),
    ("smt-off", "smt-off", &[]),
    ("vm", "vm", &[]),
    ("vm-by-hand", "vm", &["--lanes", "0:1"]),
];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/doctor")
}

/// `elfen doctor` with these words, without variables of this process.
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

/// The printed text and the exit status. A report uses only stdout, whatever its verdict.
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

/// Goal: the report of each machine is that in the files. Method: every machine, as text and JSON.
#[test]
fn recorded_machines_have_the_recorded_reports() {
    for (name, machine, words) in REPORTS {
        let (text, _) = report(&on_recorded(machine, words));
        assert_file(&format!("{name}.txt"), text);
        let (json, _) = report(&on_recorded(machine, &[words, &["--json"]].concat()));
        assert_file(&format!("{name}.json"), json);
    }
}

/// Goal: every recording is tested, and every report has its machine. Method: the files in the
/// folder, compared with the list above.
#[test]
fn every_recording_is_used() {
    let files = fs::read_dir(folder()).expect("the recordings are in the repository");
    let names = files.map(|entry| entry.unwrap().file_name().into_string().expect("UTF-8"));
    let found: BTreeSet<String> = names.collect();
    let used = REPORTS.iter().flat_map(|(name, machine, _)| {
        [format!("{name}.txt"), format!("{name}.json"), format!("{machine}.machine")]
    });
    assert_eq!(found, used.collect());
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

/// Asserts what a script may rely on for all machines.
fn assert_shape(report: &Value, status: i32) {
    let ok = report["ok"].as_bool().expect("true or false");
    assert_eq!(status, if ok { 0 } else { 3 }, "{report}");
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

/// Goal: the names of checks are the same on every machine, every check that is not yes has a fix,
/// and the exit status agrees with `ok`. Method: every recorded machine.
#[test]
fn reports_have_the_same_shape_on_all_machines() {
    let (first, _) = json(&on_recorded("vm", &["--json"]));
    for (_, machine, words) in REPORTS {
        let (report, status) = json(&on_recorded(machine, &[words, &["--json"]].concat()));
        assert_shape(&report, status);
        assert_eq!(names(&report), names(&first), "{machine}");
    }
}

/// Goal: the text agrees with the JSON, fits 100 columns, has no colours in a pipe, and ends with
/// the verdict. Method: each check's line and the last line, on every recorded machine.
#[test]
fn text_agrees_with_json() {
    for (_, machine, words) in REPORTS {
        let (text, status) = report(&on_recorded(machine, words));
        let (report, json_status) = json(&on_recorded(machine, &[words, &["--json"]].concat()));
        assert_eq!(status, json_status, "{machine}");
        assert!(!text.contains('\u{1b}'), "{machine}");
        for check in checks(&report) {
            let line = format!("  {:4}  {} ", word(check, "status"), word(check, "name"));
            assert_eq!(text.matches(&line).count(), 1, "{machine}: {line:?}");
        }
        let (lines, last) = text.trim_end().rsplit_once("\n\n").expect("a verdict at the end");
        assert!(lines.lines().all(|line| line.chars().count() <= 100), "{machine}: {lines}");
        assert_eq!(last.lines().count(), 1, "{last}");
        let next = word(&report, "next");
        let verdict = if status == 0 { "can run here" } else { "cannot run here" };
        assert!(last.contains(verdict) && last.ends_with(next), "{last}");
    }
}

/// Goal: a recording can be examined, and a recording of a recording is equal to it. Method: a
/// recording of this machine.
#[test]
fn a_recording_can_be_examined_and_recorded() {
    let (recording, status) = report(&doctor(&["--record"]).output().expect("elfen starts"));
    assert_eq!(status, 0);
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    fs::write(file.path(), &recording).expect("room for it");
    let (replayed, status) = json(&on_machine(file.path(), &["--json"]));
    assert_shape(&replayed, status);

    let (once, _) = report(&on_machine(file.path(), &["--record"]));
    fs::write(file.path(), &once).expect("room for it");
    assert_eq!(report(&on_machine(file.path(), &["--record"])).0, once);
    assert_eq!(json(&on_machine(file.path(), &["--json"])).0, replayed);
}

/// Goal: the report of this machine has its keys, and agrees with the exit status. Method: run it.
#[test]
fn this_machine_has_a_report() {
    let (report, status) = json(&doctor(&["--json"]).output().expect("elfen starts"));
    assert_shape(&report, status);
}

/// Goal: invalid arguments are refused in one line with status 2. Method: invalid lanes, recordings
/// without answers or with unknown ones, two outputs at once.
#[test]
fn invalid_arguments_are_refused() {
    let of_lanes = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sysfs/desktop-2way.machine");
    let odd = tempfile::NamedTempFile::new().expect("a temporary file");
    let machine = fs::read_to_string(folder().join("vm.machine")).expect("UTF-8");
    fs::write(odd.path(), machine.replace("\"attach\": \"attached\"", "\"attach\": \"stuck\""))
        .expect("room for it");
    let cases = [
        (on_recorded("server-root", &["--lanes", "0:0"]), "CPU 0 is named twice"),
        (on_recorded("smt-off", &["--lanes", "0:1"]), "CPU 1 is offline"),
        (on_machine(&of_lanes, &[]), "no line answers"),
        (on_machine(odd.path(), &[]), "unknown variant `stuck`"),
        (on_machine(Path::new("/nonexistent"), &[]), "No such file"),
        (on_recorded("vm", &["--json", "--record"]), "cannot be used with"),
    ];
    for (output, why) in cases {
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.starts_with("elfen: ") && stderr.lines().count() == 1, "{stderr}");
        assert!(stderr.contains(why) && output.stdout.is_empty(), "{stderr}");
    }
}
