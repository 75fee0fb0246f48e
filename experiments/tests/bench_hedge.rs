//! Goal: `elfen lab bench hedge` prints figures of each policy of `elfen-hedge`. Method: short
//! measurements. The benchmark itself checks that each answer belongs to its request.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

fn elfen(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfen-lab"));
    command.args(words).stdin(Stdio::null());
    command
}

/// Runs the benchmark and returns its results for each policy.
#[track_caller]
fn benchmarked(words: &[&str]) -> Vec<Value> {
    let program = Path::new(env!("CARGO_BIN_EXE_elfen-lab")).with_file_name("elfen-hedge");
    assert!(program.is_file(), "needs elfen-hedge, which `cargo test --workspace` builds");
    let words = [&["bench", "hedge", "--runs", "1", "-d", "1s", "--json"], words].concat();
    let output = elfen(&words).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let mut report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let Value::Array(policies) = report["policies"].take() else { panic!("{report}") };
    for fared in &policies {
        let number = |key: &str| fared[key].as_f64().expect("a number");
        let p50_us = fared["latency_us"]["median"].as_f64();
        assert!(number("requests") > 100.0 && p50_us > Some(0.0), "{fared}");
        assert!(number("duplicates") <= number("requests") / 20.0, "{fared}");
    }
    policies
}

fn names(policies: &[Value]) -> Vec<&str> {
    policies.iter().map(|one| one["policy"].as_str().unwrap()).collect()
}

#[test]
fn the_benchmark_ends_with_figures_of_each_policy() {
    let policies = benchmarked(&["--pauses", "2"]);
    assert_eq!(names(&policies)[..3], ["none", "after=p95", "look"]);
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

/// Goal: the benchmark also works with servers in Java. Method: the first server is restarted under
/// each policy. The policy `hazard` needs root and eBPF.
#[test]
#[ignore = "needs root, eBPF and a JDK"]
fn and_so_does_that_with_servers_in_java() {
    let policies = benchmarked(&["--pauses", "2", "--jvm"]);
    let all = ["none", "after=p95", "look", "hazard"];
    assert_eq!(names(&policies), all, "`hazard` needs root and eBPF");
    for one in policies {
        assert!(one["restart_us"]["p99"].as_f64() > Some(0.0), "{one}");
    }
}
