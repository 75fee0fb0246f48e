//! Goal: `elfen lab bench check` prints its measurements, or the reason why it cannot measure.
//! Method: one round with the preload library as it is shipped, and environments that lack
//! something.

use std::fs;
use std::process::{Command, Output};
use std::sync::OnceLock;

use serde_json::Value;
use tempfile::TempDir;

#[path = "../../elfen/tests/preload/mod.rs"]
mod preload;

/// Returns the command in a folder of its own, with the preload library as it is shipped. A library
/// next to the command would be preferred to `ELFEN_LIB`, and cargo may have put a debug build
/// there.
fn bench(arguments: &[&str]) -> Command {
    static LAB: OnceLock<TempDir> = OnceLock::new();
    let folder = LAB.get_or_init(|| {
        let folder = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let lab = folder.path().join("elfen-lab");
        fs::hard_link(env!("CARGO_BIN_EXE_elfen-lab"), lab).unwrap();
        folder
    });
    let mut command = Command::new(folder.path().join("elfen-lab"));
    command.env("ELFEN_LIB", preload::library());
    command.args(["bench", "check"]).args(arguments);
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn left_out(report: &Value) -> Vec<&str> {
    report["left_out"].as_array().unwrap().iter().map(|why| why.as_str().unwrap()).collect()
}

#[test]
fn every_program_is_measured_with_every_kind_that_the_compiler_builds() {
    let output = bench(&["--json", "--runs", "1"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let checks = report["checks"].as_array().unwrap();
    let left_out = left_out(&report);
    let kinds_left_out = left_out.iter().filter(|why| !why.starts_with("instructions: ")).count();
    let counts = kinds_left_out == left_out.len();
    let mut programs: Vec<&str> =
        checks.iter().map(|check| check["program"].as_str().unwrap()).collect();
    programs.dedup();
    assert_eq!(programs, ["calls", "fib", "matrix", "words"]);
    assert_eq!(checks.len() + programs.len() * kinds_left_out, programs.len() * 10);
    for check in checks {
        assert!(check["added_ns_per_call"]["median"].is_f64(), "{check}");
        assert!(check["slowdown"]["median"].as_f64().unwrap() > 0.0, "{check}");
        let counted = check["program"] == "calls" && counts;
        assert_eq!(check["added_instructions_per_call"].is_f64(), counted, "{check}");
    }
}

/// Goal: the benchmark counts exactly the instructions of a check. Method: compare with the counts
/// of callgrind, which do not vary.
#[test]
#[ignore = "needs GCC and valgrind"]
fn instructions_are_those_of_the_check() {
    let output = bench(&["--json", "--runs", "1"]).output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let left_out = left_out(&report);
    assert!(left_out.is_empty(), "needs GCC and valgrind: {left_out:?}");
    let added = |kind: &str| {
        let checks = report["checks"].as_array().unwrap().iter();
        let mut of_kind = checks.filter(|check| check["kind"] == kind);
        of_kind.find_map(|check| check["added_instructions_per_call"].as_f64())
    };
    // A load, a comparison, and a branch.
    assert_eq!(added("patch-pair"), Some(3.0));
    // The call and the return.
    assert_eq!(added("fentry-return"), Some(2.0));
    assert!(added("fentry") > Some(2.0), "{:?}", added("fentry"));
}

fn fails(output: &Output, status: i32, with: &str) {
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(stderr.contains(with), "{stderr}");
    assert!(output.stdout.is_empty());
}

#[test]
fn what_is_missing_is_named_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    fails(&bench(&["--cpu", "8191"]).output().unwrap(), 2, "but not CPU 8191");
    fails(&bench(&["--runs", "0"]).output().unwrap(), 2, "arguments");
    let no_cc = bench(&[]).env("PATH", folder.path()).output().unwrap();
    fails(&no_cc, 3, "the C compiler `cc` cannot be started");
    let no_library = bench(&[]).env("ELFEN_LIB", folder.path()).output().unwrap();
    fails(&no_library, 1, "no libelfen_preload.so at ");
    let no_room = bench(&[]).env("TMPDIR", folder.path().join("none")).output().unwrap();
    fails(&no_room, 1, "a folder to build in");
}
