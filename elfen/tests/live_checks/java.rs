//! Goal: Java methods that get checks while they run do the same work, and the checks react. This
//! holds whatever the virtual machine does with their code meanwhile. Method: a program with many
//! kinds of work (`Everything.java`), with the compilers and collectors that change code. It runs
//! next to a request lane that is alternately busy and idle. Output and status must equal those
//! without Elfen.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use super::{all_positive, output_and_status, run_next_to_requests, take_lanes};

/// Options of the virtual machine: both compilers; each compiler alone; a small code cache, whose
/// space is reused. Also collectors whose barriers change running code, and loops that poll once in
/// 1,000 rounds.
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

/// The arguments of `java` that run the program.
fn arguments<'a>(folder: &'a Path, machine: &[&'a str], rest: &[&'a str]) -> Vec<&'a str> {
    [machine, &["-cp", folder.to_str().unwrap(), "Everything"], rest].concat()
}

#[test]
#[ignore = "needs root, two idle CPUs, eBPF and a JDK"]
fn java_does_the_same_with_checks_in_compiled_methods() {
    let _lanes = take_lanes();
    let folder = tempfile::tempdir().unwrap();
    build(folder.path());
    let alone = Command::new("java").args(arguments(folder.path(), &[], &[])).output().unwrap();
    assert_eq!(alone.status.code(), Some(7), "{alone:?}");
    for machine in MACHINES {
        let (output, report) =
            run_next_to_requests(Path::new("java"), &arguments(folder.path(), machine, &[]));
        let (lent, alone) = (output_and_status(&output), output_and_status(&alone));
        assert_eq!(lent, alone, "{machine:?}: {output:?}");
        assert!(report["live"]["refused"].is_null(), "{machine:?}: {report}");
    }
}

/// Goal: compiled methods get checks that answer probes, and the report names the methods. Method:
/// work on collections, repeated until such checks exist.
#[test]
#[ignore = "needs root, two idle CPUs, eBPF and a JDK"]
fn checks_in_compiled_methods_answer_probes() {
    let _lanes = take_lanes();
    let folder = tempfile::tempdir().unwrap();
    build(folder.path());
    let mut last = Value::Null;
    for times in ["10", "40", "160"] {
        let words = arguments(folder.path(), &[], &[times, "collections"]);
        let (output, report) = run_next_to_requests(Path::new("java"), &words);
        assert_eq!(output.status.code(), Some(7), "{output:?}");
        let live = &report["live"];
        let methods = live["methods"].as_array().unwrap();
        let is_named = |name: &Value| name.as_str().is_some_and(|name| name.contains('.'));
        let answers = live["probes"].as_u64().unwrap() > live["missed"].as_u64().unwrap();
        if answers && all_positive(live, ["/sites/compiled", "/stopped_by_check"]) {
            assert!(!methods.is_empty() && methods.iter().all(is_named), "{live}");
            return;
        }
        last = report;
    }
    panic!("no method got a check: {last}");
}
