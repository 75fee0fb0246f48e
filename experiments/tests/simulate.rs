//! Tests `elfen lab simulate`, `plan` and `thesis` from outside: the keys of their JSON, their
//! arguments, and their files.

use std::fs;
use std::process::{Command, Output};

use serde_json::Value;

fn elfen(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_elfen-lab")).args(words).output().expect("elfen starts")
}

/// Runs a command line, which must succeed, and returns the JSON that it prints.
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

/// Goal: the JSON has the keys that scripts use, with consistent values. Method: two simulations
/// with one seed, without a batch and with borrow-idle.
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

/// Goal: the same seed gives the same output, except for the speed of the simulation. Method: three
/// numbers of threads.
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

/// Goal: a written trace can be read, and a demand file gives the mean of its service times.
/// Method: simulate, write a trace, and simulate the trace. Then simulate with a CSV of service
/// times.
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

/// Goal: a timeline shows both lanes, and the same command draws the same bytes. Method: evenly
/// long requests, next to an unrestrained batch and under borrow-idle. The first overlaps in every
/// request, the second nowhere for long enough to be seen.
#[test]
fn a_timeline_shows_both_lanes() {
    let folder = tempfile::tempdir().expect("a folder");
    let draw = |name: &str, scenarios: &str| {
        let file = folder.path().join(name);
        let line = format!(
            "simulate --rps 200 --demand fixed:2ms --requests 1000 --scenario {scenarios} \
             --timeline {} --between 100ms..200ms --json",
            file.display()
        );
        let rows = json(&line);
        (fs::read_to_string(&file).expect("a picture"), rows)
    };
    let (both, rows) = draw("both.svg", "unrestrained,borrow-idle");
    assert_eq!(both, draw("again.svg", "unrestrained,borrow-idle").0);
    let share = number(&rows["scenarios"][1], "overlapped") * 100.0;
    let share = format!("{share:.2} % of the requests&apos; time; here at most");
    assert!(both.contains(&share), "{share}: {both}");
    // One mark is in the legend.
    let overlaps = |picture: &str| picture.matches("fill=\"#E76E1C\" stroke").count() - 1;
    assert_eq!(overlaps(&draw("guarded.svg", "borrow-idle").0), 0);
    let unrestrained = draw("unrestrained.svg", "unrestrained").0;
    let busy = unrestrained.matches("fill=\"#706F6C\" stroke").count() - 1;
    assert!(busy > 10, "{busy}");
    assert_eq!(overlaps(&unrestrained), busy);
}

/// Goal: the plan lists the policies that keep the SLO, and budgets give more batch work than
/// borrow-idle. Method: a load with headroom, and a load without.
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
        stderr.starts_with("elfen: SLO p99=100 ms: even without a batch, the tail latency is "),
        "{stderr}"
    );
    assert!(stderr.contains("reduce the load to ") && stderr.lines().count() == 1, "{stderr}");
}

/// Goal: every mistake gives one line and status 2. Method: one wrong option in each command.
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
        ("simulate --rps -5".to_owned(), "a rate must be a number of requests"),
        ("simulate --rps 0".to_owned(), "a rate must be from 0"),
        ("simulate --rps nan".to_owned(), "a rate must be a number"),
        ("simulate --rps 1e-9".to_owned(), "at most 100 years"),
        ("simulate --rps 1 --duration 99999999999s".to_owned(), "a duration is a whole number"),
        ("simulate --rps 1 --duration 9999999999s".to_owned(), "at most 100 years"),
        ("simulate --rps 1 --duration 0s".to_owned(), "there is nothing to simulate"),
        ("simulate --rps 1 --requests 0".to_owned(), "there is nothing to simulate"),
        ("simulate --rps 1 --cores 0".to_owned(), "must be from 1 to 10000"),
        ("simulate --rps 1 --cores 101 --machines 100".to_owned(), "must be from 1 to 10000"),
        ("simulate --rps 1 --slowdown 0.5".to_owned(), "a factor from 1 to"),
        ("simulate --rps 1 --slowdown 101".to_owned(), "a slowdown must be from 1"),
        ("simulate --rps 1 --check-interval 0s".to_owned(), "the interval of checks or polls"),
        ("simulate --rps 1 --poll-interval 0s".to_owned(), "the interval of checks or polls"),
        (
            "simulate --rps 1 --poll-interval 1ms --check-interval 1us".to_owned(),
            "cannot be used with",
        ),
        (
            "simulate --rps 1 --batch-checks guard --check-interval 1us".to_owned(),
            "applies only to",
        ),
        (
            "plan --slo p99=1ms --rps 1 --batch-checks source --poll-interval 1ms".to_owned(),
            "applies",
        ),
        (
            "simulate --rps 1 --source tasks --policy refresh-budget --budget 1ms".to_owned(),
            "with only the task map, it is the same as borrow-idle",
        ),
        ("simulate --rps 1 --nap doze".to_owned(), "invalid value 'doze'"),
        ("simulate --rps 1 --nap-slowdown 0.9".to_owned(), "a factor from 1 to"),
        ("simulate --rps 1 --load 50".to_owned(), "cannot be used with"),
        ("simulate --rps 1 --scenario idle".to_owned(), "unknown scenario \"idle\""),
        (
            "simulate --rps 1 --scenario core-scheduling".to_owned(),
            "cannot simulate core scheduling",
        ),
        ("simulate --rps 1 --scenario none --policy borrow-idle".to_owned(), "cannot be used with"),
        ("simulate --rps 1 --timeline it.svg".to_owned(), "--scenario <NAME>"),
        ("simulate --rps 1 --scenario none --between 0ms..1ms".to_owned(), "--timeline <FILE>"),
        (
            "simulate --rps 1 --scenario none --timeline it.svg --between 2ms..1ms".to_owned(),
            "the second time is not after the first",
        ),
        (
            "simulate --rps 1 --policy fixed-budget-as-printed --budget 1ms --poll-interval 1ms"
                .to_owned(),
            "it requires checks in the batch",
        ),
        ("simulate --rps 1 --demand exp:0ms".to_owned(), "unknown distribution"),
        ("simulate --rps 1 --demand lognormal:5ms:-1".to_owned(), "unknown distribution"),
        ("simulate --rps 1 --demand fixed:100000s".to_owned(), "a request must take at most a day"),
        ("simulate --rps 1 --demand file:/nonexistent".to_owned(), "No such file"),
        (format!("simulate --rps 1 --demand file:{empty}"), "the file has no service times"),
        (format!("simulate --rps 1 --demand file:{words}"), "line 2 is not a valid service time"),
        (format!("simulate --trace {no_columns}"), "lacks column arrival_ns or demand_ns"),
        (format!("simulate --trace {backwards}"), "the request of line 3 arrives before"),
        (format!("simulate --trace {huge}"), "a request must take at most a day"),
        (format!("simulate --trace {empty}"), "lacks column arrival_ns"),
        (format!("simulate --trace {huge} --rps 5"), "cannot be used with"),
        ("simulate --rps 1 --policy borrow-idle --budget 5ms".to_owned(), "it does not use"),
        ("simulate --rps 1 --policy fixed-budget".to_owned(), "it requires --budget"),
        ("simulate --rps 1 --policy fixed-budget --budget -5ms".to_owned(), "a whole number"),
        ("simulate --rps 1 --policy slo-budget".to_owned(), "it requires --slo"),
        ("simulate --rps 1 --policy slo-budget --slo p99=0".to_owned(), "an SLO is a percentile"),
        ("simulate --rps 1 --policy faster".to_owned(), "invalid value 'faster'"),
        ("simulate --rps 1 --slo p99=1ms --window 1us".to_owned(), "a window must last"),
        ("plan --rps 1".to_owned(), "--slo"),
        ("plan --slo p99=1ms --rps 1 --held 101".to_owned(), "the percentage must be"),
        ("plan --slo p99=1ms --rps 1 --batch-load -1".to_owned(), "'-1'"),
    ] {
        let output = elfen(&line.split_whitespace().collect::<Vec<_>>());
        let stderr = String::from_utf8_lossy(&output.stderr);
        // The arguments are right, and a file that they name is not.
        let of_file = ["file", "line 3", "column"].iter().any(|word| why.contains(word))
            || line.contains("file:");
        let status = if of_file { 1 } else { 2 };
        assert_eq!(output.status.code(), Some(status), "{line}: {stderr}");
        assert!(stderr.starts_with("elfen: ") && stderr.contains(why), "{line}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{line}: {stderr}");
        assert!(output.stdout.is_empty(), "{line}");
    }
}

/// Goal: if a trace cannot be written, the command fails and names it. Method: a folder that does
/// not exist, and a full device.
#[test]
fn a_trace_that_cannot_be_written() {
    for file in ["/nonexistent/trace.csv", "/dev/full"] {
        let output = elfen(&["simulate", "--rps", "9", "--requests", "9000", "--trace-out", file]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.starts_with(&format!("elfen: trace {file:?}: ")), "{stderr}");
    }
}

/// The expected range of the simulated value of each row, whatever the thesis prints. A change of
/// the model that moves a row out of its range has to change this table and
/// `experiments/README.md`. Ten of these rows are fitted or built in, so they do not support the
/// model.
const BANDS: [(&str, &str, f64, f64); 17] = [
    ("p99 at 100 RPS", "fitted", 75.5, 77.5),
    ("rate at p99 = 60 ms", "fitted", 72.0, 74.0),
    ("wall: rate at p99 = 100 ms", "fitted", 117.0, 119.0),
    ("wall in 20 runs of 5705", "fitted", 118.0, 121.0),
    ("lane busy at 120 RPS", "fitted", 0.69, 0.70),
    ("idle time in pauses <= 15 ms", "built in", 0.53, 0.54),
    ("rate at p99 = 76 ms, batch of IPC 0.01", "fitted", 39.5, 40.5),
    ("borrow-idle: p99 / p99 alone", "built in", 1.0, 1.001),
    ("borrow-idle: utilisation", "built in", 0.999, 1.0001),
    ("borrow-idle: gain at 10 RPS", "follows", 0.935, 0.95),
    ("fixed-budget as printed: utilisation", "follows", 1.455, 1.475),
    ("dynamic-budget: utilisation", "follows", 1.59, 1.61),
    ("every budget policy: utilisation", "follows", 1.25, 1.265),
    ("fixed-budget: p99", "follows", 69.0, 71.0),
    ("refresh-budget: p99", "follows", 75.0, 77.5),
    ("dynamic-budget: p99", "follows", 98.5, 100.0),
    ("7 cores, dynamic: utilisation", "fitted", 1.73, 1.75),
];

/// The expected ranges of the rows that differ from the thesis, by 22, 25, 8, 11, 17 and 31 %.
const MISSES: [(&str, &str, f64, f64); 6] = [
    ("borrow-idle: gain at 120 RPS", "follows", 0.30, 0.31),
    ("borrow-idle: batch time, 80 RPS", "follows", 1.85, 1.88),
    ("fixed-budget: utilisation", "follows", 1.28, 1.295),
    ("7 cores: rate at p99 = 60 ms", "follows", 1095.0, 1130.0),
    ("7 cores, dynamic: best rate", "follows", 700.0, 700.0),
    ("7 cores, dynamic: p99 added", "follows", 25.5, 26.7),
];

/// Goal: `elfen lab thesis` prints every row within its expected range, and gives a reason for each
/// row that differs from the thesis. Method: compare the JSON with the tables above.
#[test]
fn the_thesis() {
    let report = json("thesis --requests 200000 --json");
    let rows = report["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), BANDS.len() + MISSES.len());
    for row in rows {
        let band = BANDS.iter().chain(&MISSES).find(|band| row["what"] == band.0);
        let &(_, basis, low, high) = band.unwrap_or_else(|| panic!("no band for {row}"));
        let simulated = number(row, "simulated");
        assert!((low..=high).contains(&simulated), "{row} is outside {low} to {high}");
        assert_eq!(row["basis"], basis, "{row}");
        let misses = MISSES.iter().any(|miss| row["what"] == miss.0);
        assert_eq!(number(row, "error").abs() >= 0.05, misses, "{row}");
        assert!(!misses || row["remark"] != "", "{row}");
    }
}

/// Goal: the kind of polling and the kind of nap affect the simulation, and the output names both.
/// Method: the same requests with checks, with a guard, and with PAUSE. Also the defaults of each
/// command.
#[test]
fn checks_guards_and_naps() {
    let simulate = |options: &str| {
        json(&format!("simulate --rps 80 --requests 50000 --policy borrow-idle --json {options}"))
    };
    let (checks, guard, pause) =
        (simulate(""), simulate("--poll-interval 500us"), simulate("--nap spin"));
    let said = |report: &Value, key: &str| report["parameters"][key].clone();
    assert_eq!(
        (said(&checks, "check_ns"), said(&checks, "poll_interval_ns")),
        (1000.into(), Value::Null)
    );
    assert_eq!(
        (said(&guard, "check_ns"), said(&guard, "poll_interval_ns")),
        (Value::Null, 500_000.into())
    );
    assert_eq!(said(&pause, "nap_slowdown"), 1.37);
    assert_eq!(said(&checks, "nap_slowdown"), 1.0);
    // A request that finds the lane idle shares its core for half a period. The guard's period is
    // 500 times as long as the time between two checks.
    let shared = number(&guard, "overlapped_fraction") / number(&checks, "overlapped_fraction");
    assert!((50.0..250.0).contains(&shared), "{shared}");
    let slower =
        number(&pause, "request_lane_utilisation") / number(&checks, "request_lane_utilisation");
    assert!((1.36..1.38).contains(&slower), "{slower}");
    assert!(number(&pause, "p99_ms") > 1.37 * number(&checks, "p99_ms"));

    let plan = |options: &str| {
        json(&format!("plan --slo p99=100ms --rps 60 --requests 20000 --json {options}"))
    };
    let usual = plan("");
    assert_eq!(said(&usual, "poll_interval_ns"), 500_000);
    assert_eq!(said(&usual, "nap"), "spin");
    let source = plan("--batch-checks source --nap device");
    assert_eq!((said(&source, "check_ns"), said(&source, "nap")), (1000.into(), "device".into()));
    let tasks = plan("--source tasks --nap device");
    let names: Vec<&str> = tasks["policies"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|one| one["policy"].as_str())
        .collect();
    assert_eq!(names, ["none", "borrow-idle", "fixed-budget"]);
    let text = |words: &[&str]| String::from_utf8_lossy(&elfen(words).stdout).into_owned();
    let plan = ["plan", "--slo", "p99=100ms", "--rps", "60", "--requests", "20000"];
    let usual = text(&plan);
    assert!(
        usual.contains("polls: by a guard, every 500 us")
            && usual.contains("nap spin executes PAUSE")
    );
    let source = text(&[&plan[..], &["--check-interval", "2us", "--nap", "umwait"]].concat());
    assert!(source.contains("polls: by checks in the batch's source, every 2.00 us"), "{source}");
    assert!(!source.contains("PAUSE"), "{source}");
}

/// Goal: `--scenario` predicts a live run, with the names of scenarios of `elfen lab experiment`.
/// Method: a file of service times, a load in percent of the capacity, and each policy. The row of
/// a scenario equals the result of its policy alone.
#[test]
fn what_a_live_run_should_find() {
    let folder = tempfile::tempdir().expect("a folder");
    let demand = folder.path().join("alone.csv");
    fs::write(&demand, "service_us\n200\n300\n400\n1100\n").expect("room");
    let model = format!(
        "--demand file:{} --load 50 --requests 100000 --slowdown 1.5 --batch-slowdown 1.5 \
         --nap spin --nap-slowdown 1 --json",
        demand.display()
    );
    let report = json(&format!(
        "simulate --scenario none,unrestrained,borrow-idle,fixed-budget:300us,refresh-budget:300us,\
         dynamic-budget:300us:0.9,slo-budget:p99=5ms {model}"
    ));
    let rows = report["scenarios"].as_array().expect("rows");
    let row = |at: usize, key: &str| number(&rows[at], key);
    assert_eq!((rows.len(), row(0, "p99_to_none"), row(0, "overlapped")), (7, 1.0, 0.0));
    assert!((row(0, "request_lane_utilisation") - 0.5).abs() < 0.01, "{report}");
    assert_eq!((row(1, "overlapped"), row(1, "batch_lane_utilisation")), (1.0, 1.0));
    let ratios: Vec<f64> = (1..7).map(|at| row(at, "p99_to_none")).collect();
    assert!(ratios[0] > 1.5 && (1.0..1.02).contains(&ratios[1]), "{ratios:?}");
    assert!(ratios[1] < ratios[2] && ratios[2] < ratios[3] && ratios[3] < ratios[4], "{ratios:?}");
    for at in 0..7 {
        let lanes = row(at, "request_lane_utilisation") + row(at, "batch_lane_utilisation");
        assert!((lanes - row(at, "utilisation")).abs() < 1e-9, "{report}");
    }
    let alone = json(&format!("simulate --policy refresh-budget --budget 300us {model}"));
    assert_eq!(alone["p99_ms"], rows[4]["p99_ms"]);
    assert_eq!(alone["utilisation"], rows[4]["utilisation"]);
}
