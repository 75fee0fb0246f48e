//! The generated pages in docs/reference are current. After an intended change,
//! `SNAPSHOTS=overwrite cargo test --test reference` writes them.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

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

/// Goal: the page is that of this version. Method: write it into another folder.
#[test]
fn the_page_is_current() {
    let mut lab = Command::new(env!("CARGO_BIN_EXE_elfen-lab"));
    assert_eq!(assert_pages(lab.args(["generate", "reference"])), ["commands-lab.md"]);
}

/// Goal: the fields of JSON objects are what commands print. Method: commands that need no
/// machine of their own.
#[test]
fn json_has_the_listed_fields() {
    const MODEL: [&str; 6] = ["--rps", "100", "--demand", "exp:5ms", "--requests", "1000"];
    let results = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/report_files/results.jsonl");
    let cases: [(&str, &[&str], bool); 5] = [
        ("elfen lab simulate", &["simulate"], true),
        ("elfen lab simulate --scenario", &["simulate", "--scenario", "none,borrow-idle"], true),
        ("elfen lab plan", &["plan", "--slo", "p99=50ms"], true),
        ("elfen lab thesis", &["thesis", "--requests", "1000"], false),
        ("elfen lab report", &["report", results], false),
    ];
    for (command, words, needs_model) in cases {
        let model = if needs_model { &MODEL[..] } else { &[] };
        let mut lab = Command::new(env!("CARGO_BIN_EXE_elfen-lab"));
        let output = lab.args(words).args(model).arg("--json").output().expect("elfen-lab starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_fields(command, &output.stdout);
    }
}

/// Goal: run-report.md has each command with --json. Method: the options in commands-lab.md.
#[test]
fn every_command_with_json_is_listed() {
    let page = fs::read_to_string(folder().join("commands-lab.md")).unwrap();
    for section in page.split("\n## ").skip(1) {
        let name = section.lines().next().unwrap_or_default();
        // All benchmarks have one row.
        let row = if name.starts_with("elfen lab bench") { "elfen lab bench" } else { name };
        if section.contains("\n- `--json`: ") {
            assert!(!listed_fields(row).0.is_empty(), "{name}");
        }
    }
}
