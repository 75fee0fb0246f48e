//! The generated pages in docs/reference are current. After an intended change,
//! `SNAPSHOTS=overwrite cargo test --test reference` writes them.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use snapbox::data::DataFormat;
use snapbox::{Assert, Data};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference")
}

/// Compares the pages that a command writes with those in the repository. Returns their names.
fn assert_pages(command: &mut Command) -> Vec<String> {
    let written = tempfile::tempdir().unwrap();
    let output = command.arg(written.path()).output().expect("the command starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let entries = fs::read_dir(written.path()).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let names: Vec<String> = names.collect();
    for name in &names {
        let actual = fs::read_to_string(written.path().join(name)).unwrap();
        let expected = Data::read_from(&folder().join(name), Some(DataFormat::Text));
        let assert = Assert::new().action_env("SNAPSHOTS").normalize_paths(false);
        assert.eq(Data::text(actual), expected);
    }
    names
}

/// The fields of an object of a command in run-report.md: all of them, and the required ones.
fn listed_fields(command: &str) -> (BTreeSet<String>, BTreeSet<String>) {
    let page = fs::read_to_string(folder().join("run-report.md")).unwrap();
    let begin = format!("| `{command}` | ");
    let row = page.lines().find_map(|line| line.strip_prefix(&begin)).expect(command);
    let codes = |text: &str| text.split('`').skip(1).step_by(2).map(str::to_owned).collect();
    let always: String =
        row.split('[').map(|part| part.split_once(']').map_or(part, |p| p.1)).collect();
    (codes(row), codes(&always))
}

/// Asserts that the output of a command has the fields of its row.
fn assert_fields(command: &str, output: &[u8]) {
    let object: Value = serde_json::from_slice(output).expect(command);
    let mut found: BTreeSet<String> =
        object.as_object().expect("an object").keys().cloned().collect();
    assert!(found.remove("schema"), "{command}");
    let (all, always) = listed_fields(command);
    assert!(found.is_subset(&all), "{command}: not listed: {:?}", found.difference(&all));
    assert!(always.is_subset(&found), "{command}: missing: {:?}", always.difference(&found));
}

/// Pages of programs of other packages, which have the same test.
const OTHERS: [&str; 2] = ["commands-hedge.md", "commands-lab.md"];

/// Goal: the pages are those of this version, and each page has a program that writes it. Method:
/// write them into another folder.
#[test]
fn pages_are_current() {
    let elfen = || Command::new(env!("CARGO_BIN_EXE_elfen"));
    let elfend = || Command::new(env!("CARGO_BIN_EXE_elfend"));
    let mut written = assert_pages(elfen().args(["generate", "reference"]));
    written.extend(assert_pages(elfend().arg("reference")));
    written.extend(OTHERS.map(str::to_owned));
    for entry in fs::read_dir(folder()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(written.contains(&name), "no program writes {name}");
    }
}

fn run(words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfen"));
    for variable in ["ELFEN_LANES", "ELFEN_MACHINE", "ELFEN_RUN_DIR"] {
        command.env_remove(variable);
    }
    command.args(words).output().expect("elfen starts")
}

/// Goal: the fields of JSON objects are what commands print. Method: commands that need no
/// privileges.
#[test]
fn json_has_the_listed_fields() {
    let machine = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doctor/server-root.machine");
    let cases: [(&str, &[&str]); 6] = [
        ("elfen doctor", &["doctor", "--machine", machine, "--json"]),
        ("elfen doctor", &["doctor", "--machine", machine, "--json", "--", "true"]),
        ("elfen lanes", &["lanes", "--machine", machine, "--json"]),
        ("elfen lanes --slurm", &["lanes", "--machine", machine, "--slurm", "--json"]),
        ("elfen status", &["status", "--run-dir", "/nonexistent", "--json"]),
        ("elfen shim signals", &["shim", "signals", "--json", "--", "true"]),
    ];
    for (command, words) in cases {
        let output = run(words);
        assert_ne!(output.stdout, b"", "{command}: {}", String::from_utf8_lossy(&output.stderr));
        assert_fields(command, &output.stdout);
    }
}

/// Goal: exit statuses are those of exit-status.md. Method: a failure of each kind.
#[test]
fn statuses_are_those_of_the_page() {
    let page = fs::read_to_string(folder().join("exit-status.md")).unwrap();
    let without_pairs = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doctor/bare.machine");
    let cases: [(&[&str], i32); 6] = [
        (&["lanes", "--machine", without_pairs], 0),
        (&["doctor", "--", "/nonexistent"], 1),
        (&["lanes", "--unknown"], 2),
        (&["lanes", "--machine", without_pairs, "--slurm"], 3),
        (&["doctor", "--machine", without_pairs], 3),
        (&["run", "--", "/nonexistent"], 127),
    ];
    for (words, status) in cases {
        assert_eq!(run(words).status.code(), Some(status), "{words:?}");
        assert!(page.contains(&format!("| `{status}` | ")), "{status}");
    }
}
