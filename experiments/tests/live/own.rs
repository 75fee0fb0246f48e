//! Goal: programs and services of the user's own are measured, and their failures are reported.
//! Method: scripts, and a service with known times. The tests do not check speed.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::experiment::{SHORT, lines};
use crate::sandbox::{Sandbox, lives, text, wait_until};
use serde_json::Value;

/// A script that computes for a moment, starts a child, and ends.
const OWN: &str = "i=0\nwhile [ $i -lt 100000 ]; do i=$((i+1)); done\nsh -c :\nexit ${1-0}\n";

fn own_program(sandbox: &Sandbox, name: &str) {
    let file = sandbox.path(name);
    fs::write(&file, format!("#!/bin/sh\n{OWN}")).unwrap();
    fs::set_permissions(file, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Goal: a program of the user's own is measured by its CPU time, started again when it ends with
/// status 0, and named in the results. A results file of another program is refused. Method: a
/// script that ends within a run, unrestrained and under Elfen.
#[test]
fn a_program_of_the_users_own_is_measured() {
    let sandbox = Sandbox::new("a_program_of_ones_own_is_measured");
    own_program(&sandbox, "worker");
    let words = SHORT.replace("none,borrow-idle", "none,unrestrained,borrow-idle");
    let words = words.replace("--batch loop --runs 2 --duration 300ms", "--runs 1 --duration 1s");
    let report = sandbox.json(&format!("{words} --json -- ./worker"));
    let remarks = report["remarks"].to_string();
    assert!(remarks.contains("worker: its work is measured as the CPU time"), "{remarks}");
    assert!(remarks.contains("the batch ended and was restarted"), "{remarks}");
    assert_eq!(report["setup"]["plan"]["command"], serde_json::json!(["./worker"]));
    let alone = &report["setup"]["alone"][0];
    assert_eq!(
        (&alone["batch"], &alone["unit"]),
        (&"worker".into(), &"seconds of CPU time".into())
    );
    let lines = lines(&sandbox.path("it.jsonl"));
    let with_batch: Vec<&Value> = lines.iter().filter(|line| line["batch"] == "worker").collect();
    assert_eq!(with_batch.len(), 2);
    for run in with_batch {
        assert!(run["batch_per_second"].as_f64().unwrap() > 0.0, "{run}");
        assert_eq!(run["batch_verified"], Value::Null, "{run}");
        assert_eq!(run["report"].is_null(), run["scenario"] == "unrestrained", "{run}");
    }
    sandbox.assert_nothing_left(&[]);

    let says = "command of the file's plan is [\"./worker\"] and not";
    sandbox.assert_fails(&format!("{words} -- ./worker 0"), 2, says);
}

/// Starts a service with known response times on these CPUs. Returns its process and its address.
fn reference_server(cpus: &str) -> (Child, String) {
    let load = Path::new(env!("CARGO_BIN_EXE_elfen-lab")).with_file_name("elfen-load");
    let mut command = Command::new("taskset");
    command.args(["-c", cpus]).arg(load);
    command.args(["--reference-server", "127.0.0.1:0", "--service", "fixed:1ms"]);
    let mut server = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim().strip_prefix("serving on ").unwrap().to_owned();
    (server, address)
}

/// Goal: a service of the user's own is measured and keeps running. A service that may leave its
/// lane, does not answer or does not exist is refused. Method: a service with known times, on the
/// request lane and on both lanes.
#[test]
fn a_service_of_the_users_own_is_measured_and_keeps_running() {
    let sandbox = Sandbox::new("a_service_of_ones_own_is_measured");
    let words = "experiment --lanes 0:1 --source service --batch loop --scenario none,unrestrained \
                 --rps 40 --runs 1 --duration 300ms --warmup 0ms --output it.jsonl --json";
    let fails = |more: &str, says: &str| {
        sandbox.assert_fails(&format!("{words} {more}"), 1, says);
        sandbox.assert_nothing_left(&[]);
    };
    let (mut server, address) = reference_server("0");
    let pid = server.id();
    let command = format!("{words} --service-url http://{address}/x --service-pid {pid}");
    let report = sandbox.json(&command);
    assert_eq!(report["setup"]["plan"]["service"]["url"], format!("http://{address}/x"));
    assert_eq!(report["setup"]["capacity_rps"], 40.0);
    for row in report["rows"].as_array().unwrap() {
        assert!(row["p50_ms"]["median"].as_f64().unwrap() >= 1.0, "{row}");
        assert!(row["request_lane_utilisation"]["median"].as_f64().unwrap() > 0.0, "{row}");
    }
    sandbox.assert_nothing_left(&[]);
    assert!(server.try_wait().unwrap().is_none(), "it lives on");

    fs::remove_file(sandbox.path("it.jsonl")).unwrap();
    let url = format!("--service-url http://{address}/x");
    fails(&format!("{url} --service-pid 4194303"), "there is no process 4194303");
    fails(&format!("{url} --service-cgroup {}", sandbox.path("").display()), "has no cpu.stat");
    server.kill().unwrap();
    server.wait().unwrap();
    let own = std::process::id();
    fails(&format!("{url} --service-pid {own}"), &format!("http://{address}/x does not answer"));

    let (mut stray, address) = reference_server("0,1");
    let pid = stray.id();
    let command = format!("--service-url http://{address}/x --service-pid {pid}");
    fails(
        &command,
        "works and may run on CPUs 0,1, outside the request lanes 0; limit it to these",
    );
    stray.kill().unwrap();
    stray.wait().unwrap();
}

/// Goal: an interrupted experiment also ends the descendants of the program. Method: a shell with a
/// sleeping child, interrupted during a run.
#[test]
fn an_interrupted_experiment_leaves_no_program_behind() {
    let sandbox = Sandbox::new("an_interrupted_experiment_leaves_no_program");
    let script = "#!/bin/sh\nsleep 599 &\nwhile :; do :; done\n";
    fs::write(sandbox.path("worker"), script).unwrap();
    let all = fs::Permissions::from_mode(0o755);
    fs::set_permissions(sandbox.path("worker"), all).unwrap();
    let words = SHORT.replace("--duration 300ms", "--duration 600s");
    let words = words.replace("none,borrow-idle", "unrestrained").replace("--batch loop ", "");
    let running = sandbox.start(&format!("{words} -- ./worker"));
    running.await_child("elfen-load");
    let sleeper = running.await_child("sleep");
    running.signal(libc::SIGINT);
    let output = running.end();
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    wait_until("the end of the program's child", || !lives(sleeper, &["sleep"]));
    sandbox.assert_nothing_left(&[]);
}

/// Goal: a program that fails ends the experiment. The message has its status and its last line.
/// Method: a program that fails alone, and one that fails only under Elfen.
#[test]
fn a_failing_program_is_reported() {
    let sandbox = Sandbox::new("a_program_of_ones_own_that_fails");
    own_program(&sandbox, "worker");
    let says = "worker ended by itself (exit status: 7): it printed no message";
    sandbox.assert_fails(&format!("{SHORT} -- ./worker 7"), 1, says);

    // ELFEN_RUN is only set for a batch under Elfen.
    let script = "#!/bin/sh\n[ -z \"$ELFEN_RUN\" ] || { echo no luck >&2; exit 9; }\n";
    fs::write(sandbox.path("worker"), format!("{script}{OWN}")).unwrap();
    let says = "worker ended by itself (exit status: 9): no luck; ";
    sandbox.assert_fails(&format!("{SHORT} --checks guard -- ./worker"), 1, says);
    sandbox.assert_nothing_left(&[]);
}
