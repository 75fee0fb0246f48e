//! Goal: an experiment performs the runs of its plan and completes a results file, and its
//! parameters reach the model. Method: real experiments with a small index, results files that are
//! cut off or changed, and invalid plans. The tests do not check speed.

use std::fs;
use std::path::Path;

use crate::sandbox::{Sandbox, text, wait_until};
use serde_json::Value;

pub(crate) const SHORT: &str = "experiment --lanes 0:1 --source service --docs 200 --load 20 \
     --scenario none,borrow-idle --batch loop --runs 2 --duration 300ms \
     --warmup 0ms --output it.jsonl";

pub(crate) fn lines(file: &Path) -> Vec<Value> {
    let text = fs::read_to_string(file).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns the scenario, the batch and the number of each run.
fn runs(file: &Path) -> Vec<String> {
    let lines = lines(file);
    let runs = lines.iter().filter(|line| line["kind"] == "run");
    let mut runs: Vec<String> = runs
        .map(|run| format!("{} {} {}", run["asked"], run["batch"], run["invocation"]))
        .collect();
    runs.sort();
    runs
}

const ALL: [&str; 4] = [
    "\"borrow-idle\" \"loop\" 0",
    "\"borrow-idle\" \"loop\" 1",
    "\"none\" null 0",
    "\"none\" null 1",
];

/// Goal: after an interruption and a cut-off line, the file has every run once, under one setup.
/// Method: end an experiment after its first run, cut its file within the last line, and repeat the
/// command.
#[test]
fn an_interrupted_experiment_is_completed() {
    let sandbox = Sandbox::new("an_experiment_goes_on");
    let file = sandbox.path("it.jsonl");
    let running = sandbox.start(SHORT);
    wait_until("the first run", || {
        fs::read_to_string(&file).is_ok_and(|text| text.contains("\"kind\":\"run\""))
    });
    running.signal(libc::SIGINT);
    let output = running.end();
    let said = text(&output.stderr);
    // The experiment may have ended before the signal. Then only the file is checked.
    if !output.status.success() {
        assert_eq!(output.status.code(), Some(130), "{said}");
        assert!(
            said.contains("repeat the command to make the runs that are missing in it.jsonl"),
            "{said}"
        );
    }
    let scratch = sandbox.scratch();
    assert_eq!(scratch, Vec::<String>::new());
    let begun = fs::read_to_string(&file).unwrap();
    let setup = begun.lines().next().unwrap().to_owned();
    let cut = begun.trim_end().len() - 20;
    fs::write(&file, &begun[..cut]).unwrap();

    let report = sandbox.json(&format!("{SHORT} --json --html it.html --json-out it.json"));
    assert_eq!(runs(&file), ALL);
    assert_eq!(fs::read_to_string(&file).unwrap().lines().next().unwrap(), setup);
    let written = fs::read(sandbox.path("it.json")).unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&written).unwrap(), report);
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    for row in rows {
        assert_eq!(row["runs"], 2, "{row}");
    }
    assert_eq!(rows[1]["batch_verified"], true);
    assert!(report["setup"]["capacity_rps"].as_f64().unwrap() > 0.0);
    assert!(fs::read_to_string(sandbox.path("it.html")).unwrap().contains("<html"));

    // All runs are in the file, so the command measures nothing, and the output is the same.
    let whole = fs::read(&file).unwrap();
    assert_eq!(sandbox.json(&format!("{SHORT} --json"))["rows"], report["rows"]);
    assert!(fs::read(&file).unwrap() == whole);

    // Runs of another plan are not added.
    let says = "loads of the file's plan is [0.2] and not [0.3]; choose another file";
    sandbox.assert_fails(&SHORT.replace("--load 20", "--load 30"), 2, says);
    assert_eq!(runs(&file), ALL);
}

#[test]
fn options_override_the_plan_of_a_file() {
    let sandbox = Sandbox::new("plan");
    let plan = "load = [20, 50]\nscenario = [\"none\", \"fixed-budget:2ms\"]\n\
                batch = [\"loop\", \"spin\"]\n\
                runs = 2\nduration = \"3s\"\nwarmup = \"1s\"\nseed = 4\n";
    fs::write(sandbox.path("plan.toml"), plan).unwrap();
    let run = |more: &str| {
        sandbox.output(&format!("experiment --lanes 0:1 --plan plan.toml --dry-run {more}"))
    };
    let out = run("");
    assert!(out.starts_with("12 runs on lanes 0:1, at least 48 s, in this order:\n"), "{out}");
    assert_eq!(out.matches("20 %, fixed-budget:2ms with spin").count(), 2, "{out}");
    assert_eq!(run(""), out, "the same seed, the same order");
    assert_ne!(run("--seed 5"), out);
    let out = run("--load 70 --runs 1");
    assert_eq!(out.matches("70 %").count(), 3, "{out}");
}

/// Goal: a program of the user's own is the batch, or one of the batches. The command line
/// overrides the file. Method: dry runs of both kinds.
#[test]
fn a_program_of_the_users_own_is_planned() {
    let sandbox = Sandbox::new("own");
    let plan = "load = [20]\nscenario = [\"borrow-idle\"]\ncommand = [\"sleep\", \"1\"]\n\
                checks = \"guard\"\nruns = 1\n";
    fs::write(sandbox.path("plan.toml"), plan).unwrap();
    for (words, batches) in [
        ("", &["sleep"][..]),
        ("--batch loop", &["loop", "sleep"]),
        ("-- /bin/true -k", &["true"]),
        ("--batch spin -- true", &["spin", "true"]),
    ] {
        let words = format!("experiment --lanes 0:1 --plan plan.toml --dry-run {words}");
        let out = sandbox.output(&words);
        assert_eq!(out.lines().count(), 1 + batches.len(), "{out}");
        for batch in batches {
            assert!(out.contains(&format!("20 %, borrow-idle with {batch}\n")), "{out}");
        }
    }
}

#[test]
fn mistakes_are_named_before_anything_runs() {
    let sandbox = Sandbox::new("mistakes");
    fs::write(sandbox.path("key.toml"), "load = [20]\nloads = [20]\n").unwrap();
    fs::write(sandbox.path("type.toml"), "\nruns = \"two\"\n").unwrap();
    fs::write(sandbox.path("strange.jsonl"), "{\"kind\":\"walk\"}\n").unwrap();
    let cases = [
        ("--plan key.toml", 2, "line 2: unknown field `loads`"),
        ("--plan type.toml", 2, "line 2: "),
        ("--plan none.toml", 1, "choose a file that can be read"),
        ("--scenario all", 2, "unknown scenario \"all\", expected one of: none, unrestrained"),
        ("--scenario fixed-budget", 2, "as in fixed-budget:2ms"),
        ("--batch xz", 2, "unknown batch program \"xz\", expected one of: loop"),
        ("--load 0", 2, "a load of 0 %"),
        ("--load 2000", 2, "a load of 2000 %"),
        ("--load 20 --runs 0", 2, "nothing to measure"),
        ("--duration 5ms", 2, "100 ms to a day"),
        ("--capacity -1", 2, "'-1'"),
        ("--lanes 0:0", 2, "named twice"),
        (
            "--service-url http://a/ --rps 9",
            2,
            "the processes of the service are not given; name them with",
        ),
        ("--service-url http://a/ --service-pid 1", 2, "require a capacity"),
        ("--service-url http://a/ --service-pid 1 --load 20 --rps 9", 2, "require a capacity"),
        (
            "--service-url http://a/{} --service-pid 1 --rps 9",
            2,
            "add a file with one query per line: --q",
        ),
        (
            "--service-url ftp://a/ --service-pid 1 --rps 9",
            2,
            "does not begin with http:// or redis://",
        ),
        ("--service-url http://a/ --service-pid 1 --rps 9 --queries none", 1, "queries \"none\": "),
        (
            "--service-url http://a/ --service-pid 1 --rps 9 --emulate-smt 1.5",
            2,
            "only elfen-search runs on an emulated core",
        ),
        ("--service-pid 1", 2, "--service-url <URL>"),
        ("--service-url http://a/ --docs 300 --service-pid 1", 2, "cannot be used with"),
        (
            "--service-url http://a/ --service-pid 1 --rps 9 --scenario none,slo-budget:p99=20ms",
            2,
            "name it with --service",
        ),
        ("-- no-such-program -k", 1, "program \"no-such-program\": no such program in any folder"),
        ("-- /etc/passwd", 1, "is not an executable file"),
        (
            "--checks needle -- true",
            2,
            "unknown --checks \"needle\", expected one of: auto, inline",
        ),
        ("--emulate-smt 1.5 -- true", 2, "omit --emulate-smt or the program"),
        ("--batch loop -- /no/such/loop", 1, "program \"/no/such/loop\": "),
        ("--output /no/such/folder/it.jsonl", 1, "name a file that can be written"),
        ("--output /", 1, "it is a folder"),
        ("--output strange.jsonl", 1, "results \"strange.jsonl\": line 1: "),
    ];
    for (words, status, says) in cases {
        let lanes = if words.contains("--lanes") { "" } else { "--lanes 0:1" };
        sandbox.assert_fails(&format!("experiment {lanes} {words}"), status, says);
    }
}

/// Goal: measured parameters reach the simulator, which prints the name of their file. Method:
/// calibrate two CPUs, and simulate with the file.
#[test]
fn parameters_reach_the_model() {
    let sandbox = Sandbox::new("parameters_reach_the_model");
    let words =
        "calibrate --lanes 0:1 --batch loop,spin --runs 1 --duration 50ms --docs 200 --json";
    let report = sandbox.json(words);
    assert_eq!(report["model"]["batch"].as_array().unwrap().len(), 2);
    sandbox.assert_nothing_left(&[]);
    let file = fs::read_to_string(sandbox.path("elfen-model.toml")).unwrap();
    let siblings = report["model"]["machine"]["siblings"].as_bool().unwrap();
    assert_eq!(file.contains("NOT MEASURED ON SMT"), !siblings);

    let simulate =
        "simulate --rps 80 --policy borrow-idle --requests 1000 --model elfen-model.toml";
    let parameters = &sandbox.json(&format!("{simulate} --batch spin --json"))["parameters"];
    assert!(parameters["source"].as_str().unwrap().contains("elfen-model.toml"), "{parameters}");
    assert_eq!(parameters["batch"], "spin");
    let measured = &report["model"]["batch"][1];
    let slowdown = measured["request_slowdown"].as_f64().unwrap().max(1.0);
    let used = parameters["request_slowdown"].as_f64().unwrap();
    assert!((used - slowdown).abs() < 0.001, "{used}, {slowdown}");
    let nap = &report["model"]["nap"][0];
    assert_eq!(parameters["nap"], nap["name"]);
    let slowdown = nap["nap_slowdown"].as_f64().unwrap().max(1.0);
    let used = parameters["nap_slowdown"].as_f64().unwrap();
    assert!((used - slowdown).abs() < 0.001, "{used}, {slowdown}");
    let out = sandbox.output(&format!("{simulate} --slowdown 1.25"));
    assert!(
        out.contains("elfen-model.toml") && out.contains("and --slowdown: batch loop"),
        "{out}"
    );

    sandbox.assert_fails(&format!("{simulate} --batch typical"), 2, "use one of loop, spin");
}

#[test]
fn an_interrupted_calibration_reports_the_signal_and_leaves_nothing() {
    let sandbox = Sandbox::new("an_interrupted_calibration");
    let running = sandbox.start("calibrate --lanes 0:1 --batch loop --duration 600s --docs 200");
    running.await_child("elfen-batch");
    let scratch = sandbox.scratch();
    running.signal(libc::SIGINT);
    let output = running.end();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(said.contains("calibrating: interrupted by signal 2; temporary files"), "{said}");
    assert!(!sandbox.path("elfen-model.toml").exists());
    sandbox.assert_nothing_left(&scratch);
}

#[test]
fn invalid_models_and_batches_are_refused() {
    let sandbox = Sandbox::new("models");
    fs::write(sandbox.path("key.toml"), "[machine]\nelfen = \"0\"\nlanes = 3\n").unwrap();
    for (words, says) in [
        ("--model key.toml", "line 3: "),
        ("--model none.toml", "elfen lab calibrate"),
        ("--batch loop", "use typical or pause"),
    ] {
        sandbox.assert_fails(&format!("simulate --rps 80 {words}"), 2, says);
    }
    let out = sandbox.output("simulate --rps 80 --requests 1000");
    assert!(out.contains("parameters: the numbers of the thesis: batch typical"), "{out}");
}
