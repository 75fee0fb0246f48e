//! Goal: `elfen lab bench hedge` ends with figures of each policy of `elfen-hedge`. Method: short
//! turns; the benchmark itself checks that every answer is its request's.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

fn elfen(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfen-lab"));
    command.args(words).stdin(Stdio::null());
    command
}

fn skipped(what: &str, why: &str) {
    let mut terminal = std::io::stderr();
    writeln!(terminal, "skipped: {what}: {why}").unwrap();
}

fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// What each policy made of a benchmark, as it prints it; `None` if something is missing here.
fn benchmarked(words: &[&str]) -> Option<Vec<Value>> {
    let program = Path::new(env!("CARGO_BIN_EXE_elfen-lab")).with_file_name("elfen-hedge");
    if !program.is_file() {
        skipped("elfen lab bench hedge", "`cargo test --workspace` builds elfen-hedge");
        return None;
    }
    let words = [&["bench", "hedge", "--runs", "1", "-d", "1s", "--json"], words].concat();
    let output = elfen(&words).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(3) {
        skipped("elfen lab bench hedge --jvm", said.trim());
        return None;
    }
    assert!(output.status.success(), "{said}");
    let mut report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let Value::Array(policies) = report["policies"].take() else { panic!("{report}") };
    let names: Vec<&str> = policies.iter().map(|one| one["policy"].as_str().unwrap()).collect();
    let all = ["none", "after=p95", "look", "hazard"];
    assert_eq!(names, all[..3 + usize::from(is_root())]);
    for fared in &policies {
        let number = |key: &str| fared[key].as_f64().expect("a number");
        let p50_us = fared["latency_us"]["median"].as_f64();
        assert!(number("requests") > 100.0 && p50_us > Some(0.0), "{fared}");
        assert!(number("duplicates") <= number("requests") / 20.0, "{fared}");
    }
    Some(policies)
}

#[test]
fn the_benchmark_ends_with_figures_of_each_policy() {
    let Some(policies) = benchmarked(&["--pauses", "2"]) else { return };
    assert!(policies.iter().all(|one| one["restart_us"].is_null()), "{policies:?}");
    let foreseen = |one: &Value| one["simulated_us"]["p99"].as_f64() > Some(500.0);
    assert!(policies.iter().all(foreseen), "{policies:?}");
    let words = ["bench", "hedge", "--alone", "--runs", "1", "-d", "200ms", "--json"];
    let alone = elfen(&words).output().unwrap();
    let alone: Value = serde_json::from_slice(&alone.stdout).expect("JSON");
    let ways = alone["ways"].as_array().unwrap();
    assert_eq!(ways.iter().map(|way| &way["way"]).collect::<Vec<_>>(), ["direct", "proxied"]);
    assert!(ways.iter().all(|way| way["rps"]["median"].as_f64() > Some(0.0)), "{alone}");
}

#[test]
fn wrong_arguments() {
    for wrong in [&["-d", "1s", "--pauses", "60"][..], &["--jvm", "--pause", "1ms"]] {
        let wrong = elfen(&[&["bench", "hedge"], wrong].concat()).output().unwrap();
        assert_eq!(wrong.status.code(), Some(2));
    }
}

/// The same with servers in Java, of which the first is restarted under each policy.
#[test]
fn and_so_does_that_with_servers_in_java() {
    let Some(policies) = benchmarked(&["--pauses", "2", "--jvm"]) else { return };
    for one in policies {
        assert!(one["restart_us"]["p99"].as_f64() > Some(0.0), "{one}");
    }
}
