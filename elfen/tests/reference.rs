//! The generated pages in docs/reference are current. After an intended change,
//! `SNAPSHOTS=overwrite cargo test --test reference` writes them.

use std::fs;
use std::process::{Command, Output};

mod reference_fields;
mod reference_pages;

use reference_fields::assert_fields;
use reference_pages::{assert_pages, folder};

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
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.elfprof");
    let file = file.to_str().unwrap();
    assert!(
        run(&["profile", "record", "-q", "--by", "everything", "-o", file, "--", "true"])
            .status
            .success()
    );
    let output = run(&["profile", "report", file, "--json"]);
    assert_fields("elfen profile report", &output.stdout);
    let output = run(&["profile", "compare", file, file, "--json"]);
    assert_fields("elfen profile compare", &output.stdout);
    let output = run(&["profile", "diff", file, file, "--json"]);
    assert_fields("elfen profile diff", &output.stdout);
    let report: serde_json::Value =
        serde_json::from_slice(&run(&["profile", "report", file, "--json"]).stdout).unwrap();
    let function = report["functions"][0]["function"].as_str().unwrap();
    let output = run(&["profile", "report", file, "--annotate", function, "--json"]);
    assert_fields("elfen profile report --annotate", &output.stdout);
    let file = folder.path().join("run.elftrace");
    let file = file.to_str().unwrap();
    let words = ["profile", "trace", "-q", "--instructions", "20k", "-o", file, "--", "true"];
    assert!(run(&words).status.success());
    let output = run(&["profile", "core", file, "--json"]);
    assert_fields("elfen profile core", &output.stdout);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let address = format!("{:#x}", report["rows"][0]["address"].as_u64().unwrap());
    let output = run(&["profile", "core", file, "--pipeline", &address, "--json"]);
    assert_fields("elfen profile core --pipeline", &output.stdout);
    let output = run(&["profile", "core", file, "--paths", "--json"]);
    assert_fields("elfen profile core --paths", &output.stdout);
    let output = run(&["profile", "core", file, "--beside", file, "--json"]);
    assert_fields("elfen profile core --beside", &output.stdout);
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
