//! Goal: `elfen demo` measures its three scenarios, and always removes its processes and files.
//! Method: real demos with a small index, which are interrupted, killed, or have a child killed.
//! The tests do not check speed.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::sandbox::{Running, Sandbox, descendants, kill, lives, text, wait_until};
use serde_json::Value;

const SHORT: &str =
    "demo --lanes 0:1 --source service --docs 200 --batch loop --runs 1 --duration 300ms";
/// A demo that has to be ended by a signal.
const ENDLESS: &str = "demo --lanes 0:1 --source service --docs 200 --batch loop --duration 600s";
const FAMILY: [&str; 5] = ["elfen-lab", "elfen", "elfen-search", "elfen-load", "elfen-batch"];

#[test]
fn a_demo_measures_three_scenarios_and_writes_a_report() {
    let sandbox = Sandbox::new("a_demo_shows_three_kinds_of_runs");
    let report = sandbox.json(&format!("{SHORT} --html it.html --json-out it.json --json"));
    let written = fs::read(sandbox.path("it.json")).unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&written).unwrap(), report);
    let rows = report["rows"].as_array().unwrap();
    let scenarios: Vec<&str> = rows.iter().map(|row| row["scenario"].as_str().unwrap()).collect();
    assert_eq!(scenarios, ["none", "unrestrained", "borrow-idle"]);
    for row in rows {
        assert!(row["requests"].as_u64().unwrap() > 0 && row["errors"] == 0, "{row}");
        assert!(row["p50_ms"]["median"].as_f64() <= row["p99_ms"]["median"].as_f64(), "{row}");
    }
    for row in &rows[1..] {
        assert_eq!(row["batch_verified"], true, "{row}");
        assert!(row["batch_per_second"]["median"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["p99_ratio"]["median"].as_f64().unwrap() > 0.0, "{row}");
    }
    let mechanisms = rows[2]["mechanisms"].as_str().unwrap();
    assert!(mechanisms.contains("source service alone"), "{mechanisms}");
    let remarks = report["remarks"].to_string();
    assert!(remarks.contains("not shown: the overlap"), "{remarks}");
    assert_eq!(remarks.contains("SMT"), report["smt"] == false, "{remarks}");
    let html = fs::read_to_string(sandbox.path("it.html")).unwrap();
    assert!(html.contains("Elfen: demo") && html.trim_end().ends_with("</html>"));
    sandbox.assert_nothing_left(&[]);
}

/// Starts a demo and waits until it is in the middle of a run. Returns it with its descendants and
/// the names of its temporary folders.
fn in_the_middle(sandbox: &Sandbox) -> (Running, Vec<u32>, Vec<String>) {
    let running = sandbox.start(ENDLESS);
    running.await_child("elfen-load");
    let family = descendants(running.id());
    let scratch = sandbox.scratch();
    assert!(scratch.iter().any(|name| name.starts_with("elfen-live-")), "{scratch:?}");
    (running, family, scratch)
}

#[track_caller]
fn assert_all_ended(family: &[u32]) {
    wait_until(&format!("the end of {family:?}"), || {
        family.iter().all(|&pid| !lives(pid, &FAMILY))
    });
}

#[test]
fn an_interrupted_demo_reports_the_signal_and_leaves_nothing() {
    let sandbox = Sandbox::new("an_interrupted_demo");
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        let (running, family, scratch) = in_the_middle(&sandbox);
        running.signal(signal);
        let output = running.end();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(128 + signal), "{said}");
        assert!(said.contains(&format!("interrupted by signal {signal}")), "{said}");
        assert!(!sandbox.path("elfen-demo.html").exists());
        assert_all_ended(&family);
        sandbox.assert_nothing_left(&scratch);
    }
}

/// Goal: SIGKILL of the demo also ends its children, and the next demo removes the files of the
/// killed demo. Method: kill a demo in the middle of a run.
#[test]
fn children_and_files_of_a_killed_demo_are_removed() {
    let sandbox = Sandbox::new("a_killed_demo");
    let (running, family, scratch) = in_the_middle(&sandbox);
    running.signal(libc::SIGKILL);
    running.end();
    assert_all_ended(&family);
    let next = sandbox.start(ENDLESS);
    next.await_child("elfen-search");
    let now = sandbox.scratch();
    assert!(scratch.iter().all(|name| !now.contains(name)), "{scratch:?}, {now:?}");
    next.signal(libc::SIGTERM);
    next.end();
    sandbox.assert_nothing_left(&[scratch, now].concat());
}

#[test]
fn a_dead_child_is_named_and_the_others_end() {
    let sandbox = Sandbox::new("a_child_that_dies");
    for name in ["elfen-search", "elfen-load"] {
        let (running, family, scratch) = in_the_middle(&sandbox);
        kill(running.await_child(name), libc::SIGKILL);
        let output = running.end();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(&format!("{name} ended early (signal: 9 (SIGKILL))")), "{said}");
        assert_all_ended(&family);
        sandbox.assert_nothing_left(&scratch);
    }
}

#[test]
fn a_single_cpu_is_refused() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfen-lab"));
    command.arg("demo").env_remove("ELFEN_LANES");
    let first = [1_u64];
    let stay = move || {
        // SAFETY: the kernel reads 8 bytes of `first`, which is an array of one u64.
        let set = unsafe { libc::syscall(libc::SYS_sched_setaffinity, 0, 8, first.as_ptr()) };
        if set < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
    };
    // SAFETY: between fork and exec, the closure makes only one system call.
    unsafe { command.pre_exec(stay) };
    let output = command.output().expect("needs CPU 0");
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("require two CPUs, and this process may use only CPU 0"), "{said}");
}

/// Goal: missing files and folders are reported before anything runs. Method: an `elfen-lab`
/// without the other programs, a page that cannot be written, and a missing folder for temporary
/// files.
#[test]
fn missing_files_are_reported_before_measuring() {
    let sandbox = Sandbox::new("what_is_missing");
    let alone = sandbox.path("bin/elfen-lab");
    fs::create_dir(sandbox.path("bin")).unwrap();
    fs::hard_link(env!("CARGO_BIN_EXE_elfen-lab"), &alone).unwrap();
    let fails = |command: &mut Command, says: &str| {
        let output = command.stdin(Stdio::null()).output().unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(says), "{said}");
    };
    let words = ["demo", "--lanes", "0:1"];
    let mut command = Command::new(&alone);
    command.args(words).current_dir(sandbox.path("")).env("ELFEN_LIB", "/no/such/folder");
    let tried = format!("no elfen at {}/elfen, ", sandbox.path("bin").display());
    fails(&mut command, &tried);
    fails(&mut command, "/no/such/folder/elfen; build all of Elfen");
    let nowhere = "demo --lanes 0:1 --html /no/such/folder/it.html";
    sandbox.assert_fails(nowhere, 1, "name a file that can be written");
    let mut command = sandbox.lab(SHORT);
    fails(command.env("TMPDIR", Path::new("/no/such/folder")), "/no/such/folder");
    sandbox.assert_nothing_left(&[]);
}
