//! The generated pages in docs/reference are current. After an intended change,
//! `SNAPSHOTS=overwrite cargo test --test reference` writes them.

use std::fs;
use std::process::Command;

#[path = "../../elfen/tests/reference_fields/mod.rs"]
mod reference_fields;
#[path = "../../elfen/tests/reference_pages/mod.rs"]
mod reference_pages;

use reference_fields::{assert_fields, listed_fields};
use reference_pages::{assert_pages, folder};

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
    let cases: [(&str, &[&str], bool); 6] = [
        ("elfen lab simulate", &["simulate"], true),
        ("elfen lab simulate --scenario", &["simulate", "--scenario", "none,borrow-idle"], true),
        ("elfen lab plan", &["plan", "--slo", "p99=50ms"], true),
        ("elfen lab thesis", &["thesis", "--requests", "1000"], false),
        ("elfen lab report", &["report", results], false),
        ("elfen lab hps", &["hps", "--program", "sort"], false),
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
