//! Goal: `elfen demo` shows what it says, and leaves nothing behind however it ends. Method: real
//! demos, made short with a small index, interrupted, killed, and robbed of their children. Nothing
//! is asserted about speeds.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::place::{Place, Running, descendants, kill, lives, text, wait_until};
use serde_json::Value;

const SHORT: &str =
    "demo --lanes 0:1 --signal service --docs 200 --batch loop --runs 1 --duration 300ms";
/// One that has to be ended.
const ENDLESS: &str = "demo --lanes 0:1 --signal service --docs 200 --batch loop --duration 600s";
const FAMILY: [&str; 5] = ["elfen-lab", "elfen", "elfen-search", "elfen-load", "elfen-batch"];

#[test]
fn a_demo_shows_three_kinds_of_runs_and_writes_a_report() {
    let place = Place::new("a_demo_shows_three_kinds_of_runs");
    let output =
        place.lab(&format!("{SHORT} --html it.html --report it.json --json")).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let written = fs::read(place.path("it.json")).unwrap();
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
    assert!(mechanisms.contains("signal service alone"), "{mechanisms}");
    let remarks = report["remarks"].to_string();
    assert!(remarks.contains("not shown: the overlap"), "{remarks}");
    assert_eq!(remarks.contains("SMT"), report["smt"] == false, "{remarks}");
    let html = fs::read_to_string(place.path("it.html")).unwrap();
    assert!(html.contains("Elfen: demo") && html.trim_end().ends_with("</html>"));
    place.assert_nothing_left(&[]);
}

/// A demo in the middle of a run, with its family and the names of what it made.
fn in_the_middle(place: &Place) -> (Running, Vec<u32>, Vec<String>) {
    let running = place.start(ENDLESS);
    running.await_child("elfen-load");
    let family = descendants(running.id());
    let scratch = place.scratch();
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
fn an_interrupted_demo_says_so_and_leaves_nothing() {
    let place = Place::new("an_interrupted_demo");
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        let (running, family, scratch) = in_the_middle(&place);
        running.signal(signal);
        let output = running.end();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(128 + signal), "{said}");
        assert!(said.contains(&format!("interrupted by signal {signal}")), "{said}");
        assert!(!place.path("elfen-demo.html").exists());
        assert_all_ended(&family);
        place.assert_nothing_left(&scratch);
    }
}

/// Goal: SIGKILL ends the children as well, and the next demo removes what the killed one could
/// not. Method: kill one in the middle.
#[test]
fn a_killed_demo_takes_its_children_along_and_is_cleared_up_after() {
    let place = Place::new("a_killed_demo");
    let (running, family, scratch) = in_the_middle(&place);
    running.signal(libc::SIGKILL);
    running.end();
    assert_all_ended(&family);
    let next = place.start(ENDLESS);
    next.await_child("elfen-search");
    let now = place.scratch();
    assert!(scratch.iter().all(|name| !now.contains(name)), "{scratch:?}, {now:?}");
    next.signal(libc::SIGTERM);
    next.end();
    place.assert_nothing_left(&[scratch, now].concat());
}

#[test]
fn a_child_that_dies_is_named_and_the_others_end() {
    let place = Place::new("a_child_that_dies");
    for name in ["elfen-search", "elfen-load"] {
        let (running, family, scratch) = in_the_middle(&place);
        kill(running.await_child(name), libc::SIGKILL);
        let output = running.end();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(&format!("{name} ended early (signal: 9 (SIGKILL))")), "{said}");
        assert_all_ended(&family);
        place.assert_nothing_left(&scratch);
    }
}

#[test]
fn one_cpu_is_too_few_and_that_is_said() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfen-lab"));
    command.arg("demo").env_remove("ELFEN_LANES");
    let first = [1_u64];
    let stay = move || {
        // SAFETY: the kernel reads 8 bytes of `first`.
        let set = unsafe { libc::syscall(libc::SYS_sched_setaffinity, 0, 8, first.as_ptr()) };
        if set < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
    };
    // SAFETY: between fork and exec the closure makes one system call.
    unsafe { command.pre_exec(stay) };
    let output = command.output().expect("needs CPU 0");
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("take two CPUs, and this process may use only CPU 0"), "{said}");
}

/// Goal: what is missing is said before anything runs. Method: an `elfen-lab` without the other
/// programs, a report that cannot be written, no folder for temporary files.
#[test]
fn what_is_missing_is_said_at_once() {
    let place = Place::new("what_is_missing");
    let alone = place.path("bin/elfen-lab");
    fs::create_dir(place.path("bin")).unwrap();
    fs::hard_link(env!("CARGO_BIN_EXE_elfen-lab"), &alone).unwrap();
    let fails = |command: &mut Command, says: &str| {
        let output = command.stdin(Stdio::null()).output().unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.lines().last().unwrap().starts_with("elfen: "), "{said}");
        assert!(said.contains(says), "{said}");
    };
    let words = ["demo", "--lanes", "0:1"];
    let mut command = Command::new(&alone);
    command.args(words).current_dir(place.path("")).env("ELFEN_LIB", "/no/such/folder");
    let tried = format!("no elfen at {}/elfen, ", place.path("bin").display());
    fails(&mut command, &tried);
    fails(&mut command, "/no/such/folder/elfen; build all of Elfen");
    let nowhere = "demo --lanes 0:1 --html /no/such/folder/it.html";
    fails(&mut place.lab(nowhere), "name a file that can be written");
    let mut command = place.lab(SHORT);
    fails(command.env("TMPDIR", Path::new("/no/such/folder")), "/no/such/folder");
    place.assert_nothing_left(&[]);
}
