//! Goal: `elfen lab ladder` measures every rung, reports the causes of its slow requests, and
//! always removes its processes and files. Method: a short ladder on few articles, complete and
//! interrupted. The tests do not check times.

use crate::sandbox::{Sandbox, descendants, lives, text, wait_until};
use serde_json::Value;

const SHORT: &str = "ladder --runs 2 --queries 50 --rps 100 --articles 300";
const FAMILY: [&str; 6] = ["elfen-lab", "elfen", "elfen-hedge", "elfen-load", "java", "bash"];

#[test]
#[ignore = "needs a JDK and Lucene"]
fn a_short_ladder_has_all_its_rungs() {
    let sandbox = Sandbox::new("a_short_ladder");
    let report = sandbox.json(&format!("{SHORT} --json"));
    let iterations = report["iterations"].as_array().unwrap();
    let order: Vec<_> = iterations
        .iter()
        .map(|one| (one["number"].as_u64().unwrap(), one["rung"].as_str().unwrap()))
        .collect();
    let names = ["as-is", "nodelay", "pre-touch", "hedge"];
    let expected: Vec<_> = [1, 2].into_iter().flat_map(|n| names.map(|name| (n, name))).collect();
    assert_eq!(order, expected, "rungs take turns");
    let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("{report:#}"));
    for one in iterations {
        let [p50, p999, max] = ["p50_ms", "p999_ms", "max_ms"].map(|key| number(&one[key]));
        assert!(0.0 < p50 && p50 <= p999 && p999 <= max, "{one:#}");
        assert!(one["page_faults"].as_u64().is_some(), "{one:#}");
    }
    let rungs = report["rungs"].as_array().unwrap();
    assert_eq!(rungs.len(), names.len());
    assert!(rungs.iter().zip(names).all(|(rung, name)| rung["rung"] == name), "{report:#}");
    let charged = report["charged"].as_array().unwrap();
    assert_eq!(charged.is_empty(), report["not_recorded"].is_string(), "{report:#}");
    for one in charged {
        let causes = one["causes"].as_array().unwrap();
        let shares: f64 = causes.iter().map(|cause| number(&cause["share"])).sum();
        assert!((shares - 1.0).abs() < 1e-6, "{shares}: {one:#}");
    }
    assert_eq!(report["rows"].as_array().unwrap().len(), 4, "the thesis's causes: {report:#}");
    let fold = number(&rungs[0]["p999_ms"]) / number(&rungs[3]["p999_ms"]);
    assert!((number(&report["fold_p999"]) - fold).abs() < 1e-6, "{report:#}");
    sandbox.assert_nothing_left(&[]);
}

#[test]
#[ignore = "needs a JDK and Lucene"]
fn an_interrupted_ladder_leaves_nothing() {
    let sandbox = Sandbox::new("an_interrupted_ladder");
    let running = sandbox.start("ladder --articles 300");
    // The generator starts once the first virtual machine serves.
    running.await_child("elfen-load");
    let family = descendants(running.id());
    running.signal(libc::SIGINT);
    let output = running.end();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(
        said.contains("interrupted by signal 2; temporary files and processes were removed"),
        "{said}"
    );
    wait_until("the end of all", || family.iter().all(|&pid| !lives(pid, &FAMILY)));
    sandbox.assert_nothing_left(&[]);
}

#[test]
fn invalid_options_are_refused() {
    let sandbox = Sandbox::new("what_a_ladder_takes");
    let cases = [
        ("ladder --runs 0", "invalid value '0'"),
        ("ladder --queries 5", "invalid value '5'"),
        ("ladder --rps 0", "invalid value '0'"),
        ("ladder -- xz", "unexpected argument"),
        ("experiment --runs 2 ladder", "unexpected argument"),
    ];
    for (words, why) in cases {
        sandbox.assert_fails(words, 2, why);
    }
}
