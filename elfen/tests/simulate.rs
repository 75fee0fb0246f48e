//! `elfen simulate` and `elfen plan` as a user meets them: keys, arguments, files.

use std::fs;
use std::process::{Command, Output};

use serde_json::Value;

fn elfen(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_elfen")).args(words).output().expect("elfen starts")
}

/// What a command line prints, which has to succeed.
#[track_caller]
fn json(line: &str) -> Value {
    let words: Vec<&str> = line.split_whitespace().collect();
    let output = elfen(&words);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{line}: {stderr}");
    assert!(output.stderr.is_empty(), "{line}: {stderr}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{line}: {error}"))
}

#[track_caller]
fn number(report: &Value, key: &str) -> f64 {
    report[key].as_f64().unwrap_or_else(|| panic!("{key} in {report}"))
}

/// Goal: the keys that scripts rely on, with values that belong together. Method: two runs under
/// one seed, alone and with borrow-idle.
#[test]
fn what_scripts_rely_on() {
    let alone = json("simulate --rps 100 --requests 100000 --seed 3 --json");
    let line = "simulate --rps 100 --requests 100000 --seed 3 --policy borrow-idle --json";
    let borrowing = json(line);
    for report in [&alone, &borrowing] {
        for key in ["p50_ms", "p95_ms", "p99_ms", "mean_ms", "simulated_requests_per_second"] {
            assert!(number(report, key) > 0.0, "{key}");
        }
        assert_eq!((number(report, "requests"), number(report, "seed")), (1e5, 3.0));
        let parts = number(report, "request_lane_utilisation")
            + number(report, "borrowed_fraction")
            + number(report, "overlapped_fraction");
        assert!((parts - number(report, "utilisation")).abs() < 1e-12);
    }
    assert!(number(&alone, "borrowed_fraction") == 0.0);
    assert!(number(&borrowing, "utilisation") > 0.97);
    let slower = number(&borrowing, "p99_ms") / number(&alone, "p99_ms");
    assert!((1.0..1.02).contains(&slower), "{slower}");
}

/// Goal: the same seed is the same run, but for its speed. Method: three thread counts.
#[test]
fn the_same_seed_prints_the_same() {
    let run = |threads: u32| {
        let mut report = json(&format!(
            "simulate --rps 500 --cores 7 --machines 3 --requests 20000 --threads {threads} \
             --policy slo-budget --slo p99=100ms --json"
        ));
        report["simulated_requests_per_second"] = Value::Null;
        report
    };
    let alone = run(1);
    assert_eq!(alone, run(2));
    assert_eq!(alone, run(5));
}

/// Goal: a trace written is a trace read. Method: simulate, write, simulate what was written; and
/// a demand file of the service times alone gives their mean.
#[test]
fn traces_and_recorded_demands() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (csv, demand) = (path("trace.csv"), path("demand.csv"));
    let drawn = json(&format!("simulate --rps 90 --requests 5000 --trace-out {csv} --json"));
    let read = json(&format!("simulate --trace {csv} --json"));
    for key in ["requests", "p50_ms", "p99_ms", "mean_ms", "utilisation"] {
        assert_eq!(drawn[key], read[key], "{key}");
    }
    fs::write(&demand, "query,service_us,outcome\n1,2000,ok\n2,4000,ok\n3,,late\n").expect("room");
    let line = format!("simulate --rps 1 --demand file:{demand} --requests 20000 --json");
    let busy = number(&json(&line), "request_lane_utilisation");
    assert!((busy - 0.003).abs() < 0.0001, "{busy}");
}

/// Goal: the plan names the policies that keep the SLO, and more than borrow-idle is bought.
/// Method: a load with headroom, and one without.
#[test]
fn a_plan_and_one_that_cannot_be() {
    let plan = json("plan --slo p99=100ms --rps 60 --requests 100000 --batch-load 3 --json");
    let policies = plan["policies"].as_array().expect("a list");
    let names: Vec<&str> = policies.iter().filter_map(|one| one["policy"].as_str()).collect();
    assert_eq!(
        names,
        ["none", "borrow-idle", "fixed-budget", "refresh-budget", "dynamic-budget", "slo-budget"]
    );
    for one in policies {
        assert_eq!(one["keeps_slo"], Value::Bool(true), "{one}");
        assert!(number(one, "tail_ms") <= 100.0, "{one}");
    }
    let work = |at: usize| number(&policies[at], "batch_work");
    assert!(work(0) == 0.0 && work(1) < work(2) && work(2) < work(3), "{plan}");

    let output = elfen(&["plan", "--slo", "p99=100ms", "--rps", "160", "--requests", "50000"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(
        stderr.starts_with("elfen: SLO p99=100 ms: without any batch the tail is "),
        "{stderr}"
    );
    assert!(stderr.contains("times these requests") && stderr.lines().count() == 1, "{stderr}");
}

/// Goal: whatever is wrong is one line and status 2. Method: each option wrong in turn.
#[test]
fn wrong_arguments() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).expect("room");
        path.display().to_string()
    };
    let no_columns = file("a.csv", "time,work\n1,2\n");
    let backwards = file("b.csv", "arrival_ns,demand_ns\n5,1\n4,1\n");
    let huge = file("c.csv", "arrival_ns,demand_ns\n18446744073709551615,18446744073709551615\n");
    let empty = file("d.csv", "");
    let words = file("e.csv", "1\ntwo\n");
    for (line, why) in [
        ("simulate".to_owned(), "neither a rate of requests nor a trace is given"),
        ("simulate --rps -5".to_owned(), "a rate is a number of requests"),
        ("simulate --rps 0".to_owned(), "rates lie between"),
        ("simulate --rps nan".to_owned(), "a rate is a number"),
        ("simulate --rps 1e-9".to_owned(), "all of it ends within 100 years"),
        ("simulate --rps 1 --duration 99999999999s".to_owned(), "a duration is a whole number"),
        ("simulate --rps 1 --duration 9999999999s".to_owned(), "within 100 years"),
        ("simulate --rps 1 --duration 0s".to_owned(), "nothing to simulate"),
        ("simulate --rps 1 --requests 0".to_owned(), "nothing to simulate"),
        ("simulate --rps 1 --cores 0".to_owned(), "1 to 10000 cores"),
        ("simulate --rps 1 --cores 101 --machines 100".to_owned(), "1 to 10000 cores"),
        ("simulate --rps 1 --slowdown 0.5".to_owned(), "a factor between 1 and"),
        ("simulate --rps 1 --slowdown 101".to_owned(), "a slowdown is at least 1"),
        ("simulate --rps 1 --check 0s".to_owned(), "checks are at least 1 ns"),
        ("simulate --rps 1 --demand exp:0ms".to_owned(), "none of those known"),
        ("simulate --rps 1 --demand lognormal:5ms:-1".to_owned(), "none of those known"),
        ("simulate --rps 1 --demand fixed:100000s".to_owned(), "a request takes at most a day"),
        ("simulate --rps 1 --demand file:/nonexistent".to_owned(), "No such file"),
        (format!("simulate --rps 1 --demand file:{empty}"), "it has no service times"),
        (format!("simulate --rps 1 --demand file:{words}"), "line 2 is no service time"),
        (format!("simulate --trace {no_columns}"), "no columns arrival_ns and demand_ns"),
        (format!("simulate --trace {backwards}"), "line 3 arrives before the line above it"),
        (format!("simulate --trace {huge}"), "a request takes at most a day"),
        (format!("simulate --trace {empty}"), "no columns arrival_ns"),
        (format!("simulate --trace {huge} --rps 5"), "cannot be used with"),
        ("simulate --rps 1 --policy borrow-idle --budget 5ms".to_owned(), "has no use for"),
        ("simulate --rps 1 --policy fixed-budget".to_owned(), "it needs --budget"),
        ("simulate --rps 1 --policy fixed-budget --budget -5ms".to_owned(), "a whole number"),
        ("simulate --rps 1 --policy slo-budget".to_owned(), "it needs --slo"),
        ("simulate --rps 1 --policy slo-budget --slo p99=0".to_owned(), "an SLO is a percentile"),
        ("simulate --rps 1 --policy faster".to_owned(), "invalid value 'faster'"),
        ("simulate --rps 1 --slo p99=1ms --window 1us".to_owned(), "windows are at least"),
        ("plan --rps 1".to_owned(), "--slo"),
        ("plan --slo p99=1ms --rps 1 --held 101".to_owned(), "a percentage"),
        ("plan --slo p99=1ms --rps 1 --batch-load -1".to_owned(), "'-1'"),
    ] {
        let output = elfen(&line.split_whitespace().collect::<Vec<_>>());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{line}: {stderr}");
        assert!(stderr.starts_with("elfen: ") && stderr.contains(why), "{line}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{line}: {stderr}");
        assert!(output.stdout.is_empty(), "{line}");
    }
}

/// Goal: a trace that cannot be written is a failure that names it. Method: a folder that does not
/// exist, and a full device.
#[test]
fn a_trace_that_cannot_be_written() {
    for file in ["/nonexistent/trace.csv", "/dev/full"] {
        let output = elfen(&["simulate", "--rps", "9", "--requests", "9000", "--trace-out", file]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.starts_with(&format!("elfen: trace {file:?}: ")), "{stderr}");
    }
}

/// Goal: the check of the thesis prints every row with its error, and the model is near it. Method:
/// the JSON; the rows that the model was fitted to are within 5 %, and no bound but one is missed.
#[test]
fn the_thesis() {
    let report = json("simulate --check-thesis --requests 200000 --json");
    let rows = report["rows"].as_array().expect("rows");
    assert!(rows.len() > 20, "{}", rows.len());
    for row in rows {
        let error = number(row, "error").abs();
        if row["fitted"] == Value::Bool(true) {
            assert!(error < 0.05, "{row}");
        }
        let alone = row["what"] == "fixed-budget: utilisation";
        if row["claim"] != "about" && !alone {
            assert!(error < 0.02, "{row}");
        }
        assert!(error < 0.05 || row["remark"] != "", "{row}");
    }
}
