//! Programs that drop rights while they run.

use std::fs;
use std::process::Command;

use serde_json::Value;

use super::{BusyTurns, LANES, build_source, elfen_run, elfen_run_live, require_live_checks};

const RUNS: u32 = 20;

/// Goal: no program is made to call a system call that it has forbidden. Method: programs for which
/// mmap is fatal, from times at which checks are about to be written. Each ends as it does alone.
#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn a_program_that_forbids_mmap_survives() {
    let _lanes = LANES.lock();
    require_live_checks();
    let folder = tempfile::tempdir().unwrap();
    let program = build_source("filtered.c", folder.path(), "filtered", &[]);
    let turns = BusyTurns::start();
    for run in 0..RUNS {
        let before = (run * 3 % 40).to_string();
        let mmap = libc::SYS_mmap.to_string();
        let output = elfen_run_live(&[], &program).args([&mmap, &before, "60"]).output().unwrap();
        assert_eq!(output.status.code(), Some(3), "after {before} ms: {output:?}");
    }
    drop(turns);
}

/// Goal: soon after a program filters its system calls, its checks are removed, and the report says
/// why. Method: a program with checks that forbids a call which checks do not use.
#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn checks_are_taken_out_of_a_program_that_filters() {
    let _lanes = LANES.lock();
    require_live_checks();
    let folder = tempfile::tempdir().unwrap();
    let program = build_source("filtered.c", folder.path(), "filtered", &[]);
    let report = folder.path().join("report");
    let reboot = libc::SYS_reboot.to_string();
    let mut live = Value::Null;
    for before in ["400", "1000", "3000"] {
        let turns = BusyTurns::start();
        let mut command = elfen_run_live(&["--json-out", report.to_str().unwrap()], &program);
        let output = command.args([&reboot, before, "1500"]).output().unwrap();
        drop(turns);
        assert_eq!(output.status.code(), Some(3), "{output:?}");
        let report: Value = serde_json::from_slice(&fs::read(&report).unwrap()).unwrap();
        live = report["live"].clone();
        if live["first_touch_ns"].as_u64().unwrap_or(0) > 0 {
            break;
        }
    }
    assert_eq!(live["refused"], "its system calls are filtered (seccomp)", "{live}");
    assert_eq!(live["sites"]["on"], 0, "{live}");
}

#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn a_filter_by_prctl_is_survived() {
    assert_ends_as_alone("all-but-exit");
}

#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn a_filter_by_seccomp_is_survived() {
    assert_ends_as_alone("all-but-exit-by-seccomp");
}

#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn strict_mode_is_survived() {
    assert_ends_as_alone("strict");
}

#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn no_new_privileges_are_survived() {
    assert_ends_as_alone("no-new-privs");
}

#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn a_user_namespace_is_survived() {
    assert_ends_as_alone("user-namespace");
}

#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn a_new_root_is_survived() {
    assert_ends_as_alone("chroot");
}

/// Goal: a program that drops rights, early or late, ends as it does alone. Method: the steps of
/// sandboxes, next to requests. A filter that allows only exit forbids the system call of a check
/// that rings. `SANDBOX_RUNS` sets the number of runs, each early and late.
fn assert_ends_as_alone(what: &str) {
    let _lanes = LANES.lock();
    require_live_checks();
    let runs = std::env::var("SANDBOX_RUNS").map_or(4, |runs| runs.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let dynamic = build_source("filtered.c", folder.path(), "filtered", &[]);
    let fixed = build_source("filtered.c", folder.path(), "static", &["-static"]);
    for (run, program) in (0..runs).zip([&dynamic, &fixed].into_iter().cycle()) {
        for [before, after] in [[run * 3 % 40, 60], [300 + run * 37 % 500, 60]] {
            let arguments = [what.to_owned(), before.to_string(), after.to_string()];
            let alone = Command::new(program).args(&arguments).status().unwrap();
            assert_eq!(alone.code(), Some(3), "{arguments:?}");
            let turns = BusyTurns::start();
            let lent = elfen_run(&[], program).args(&arguments).output().unwrap();
            drop(turns);
            assert_eq!(lent.status, alone, "{arguments:?}: {lent:?}");
        }
    }
}
