//! Goal: Java methods that get checks while they run do the same work, whatever the virtual machine
//! does with their code meanwhile, and the checks answer. Method: a program with many kinds of work
//! (`Everything.java`), with the compilers and collectors that change code, next to a request lane
//! that is alternately busy and idle. Output and status must be those of the program alone.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use super::{BusyTurns, LANES, elfen_run_live, output_and_status, require_live_checks};

/// Both compilers; each compiler alone; a small code cache, whose space is reused; collectors whose
/// barriers change running code; loops that poll once in a thousand rounds.
const MACHINES: [&[&str]; 6] = [
    &[],
    &["-XX:TieredStopAtLevel=1"],
    &["-XX:-TieredCompilation"],
    &["-XX:ReservedCodeCacheSize=5m", "-XX:+UseSerialGC"],
    &["-XX:+UseG1GC", "-Xmx64m"],
    &["-XX:+UseZGC", "-Xmx256m"],
];

/// Compiles the program's class.
fn build(folder: &Path) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/live_checks/Everything.java");
    let mut compiler = Command::new("javac");
    compiler.arg("-d").arg(folder).arg(source).stderr(Stdio::null());
    assert!(compiler.status().expect("needs javac").success());
}

fn arguments(folder: &Path, machine: &[&str], rest: &[&str]) -> Vec<String> {
    let path = folder.to_str().unwrap();
    let common = ["-cp", path, "Everything"];
    [machine, &common, rest].concat().into_iter().map(str::to_owned).collect()
}

fn run_alone(arguments: &[String]) -> (String, Option<i32>) {
    let output = Command::new("java").args(arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    output_and_status(&output)
}

fn run_lent(folder: &Path, arguments: &[String]) -> (Output, Value) {
    let report = folder.join("report");
    let mut command = elfen_run_live(&["--json-out", report.to_str().unwrap()], Path::new("java"));
    let output = command.args(arguments).output().unwrap();
    let report = fs::read(&report).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    (output, serde_json::from_slice(&report).unwrap())
}

#[test]
#[ignore = "needs root, two idle CPUs, eBPF and a JDK"]
fn java_does_the_same_with_checks_in_compiled_methods() {
    let _lanes = LANES.lock();
    let folder = tempfile::tempdir().unwrap();
    require_live_checks();
    build(folder.path());
    let expected = run_alone(&arguments(folder.path(), &[], &[]));
    for machine in MACHINES {
        let arguments = arguments(folder.path(), machine, &[]);
        let turns = BusyTurns::start();
        let (output, report) = run_lent(folder.path(), &arguments);
        drop(turns);
        assert_eq!(output_and_status(&output), expected, "{machine:?}: {output:?}");
        assert!(report["live"]["refused"].is_null(), "{machine:?}: {report}");
    }
}

/// Goal: compiled methods get checks, which answer probes, and the report names the methods.
/// Method: work on collections, until there are such checks.
#[test]
#[ignore = "needs root, two idle CPUs, eBPF and a JDK"]
fn checks_in_compiled_methods_answer_probes() {
    let _lanes = LANES.lock();
    let folder = tempfile::tempdir().unwrap();
    require_live_checks();
    build(folder.path());
    let mut last = Value::Null;
    for times in ["10", "40", "160"] {
        let turns = BusyTurns::start();
        let (output, report) =
            run_lent(folder.path(), &arguments(folder.path(), &[], &[times, "collections"]));
        drop(turns);
        assert_eq!(output.status.code(), Some(7), "{output:?}");
        let live = &report["live"];
        let count = |word: &Value| word.as_u64().unwrap();
        let answered = count(&live["probes"]) - count(&live["missed"]);
        let methods = live["methods"].as_array().unwrap();
        let is_named = |name: &Value| name.as_str().is_some_and(|name| name.contains('.'));
        if count(&live["sites"]["compiled"]) > 0
            && answered > 0
            && count(&live["stopped_by_check"]) > 0
        {
            assert!(!methods.is_empty() && methods.iter().all(is_named), "{live}");
            return;
        }
        last = report;
    }
    panic!("no method got a check: {last}");
}
