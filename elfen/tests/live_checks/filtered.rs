//! Programs that give up rights while they run.

use std::fs;
use std::process::Command;

use serde_json::Value;

use super::{LANES, Turns, build_of, elfen, elfen_by_default, require_live_checks};

const RUNS: u32 = 20;

/// Goal: no program is made to make a call that it has forbidden itself. Method: programs for which
/// mmap is fatal, from moments on at which checks are about to be written; each ends as it does
/// alone.
#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn a_program_that_forbids_mmap_survives() {
    let _lanes = LANES.lock();
    require_live_checks();
    let folder = tempfile::tempdir().unwrap();
    let program = build_of("filtered.c", folder.path(), "filtered", &[]);
    let turns = Turns::start();
    for run in 0..RUNS {
        let before = (run * 3 % 40).to_string();
        let mmap = libc::SYS_mmap.to_string();
        let output = elfen(&[], &program).args([&mmap, &before, "60"]).output().unwrap();
        assert_eq!(output.status.code(), Some(3), "after {before} ms: {output:?}");
    }
    drop(turns);
}

/// Goal: a program that filters its calls has no checks soon afterwards, and the report says why.
/// Method: one that has had checks before; the call that it forbids is none of ours.
#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn checks_are_taken_out_of_a_program_that_filters() {
    let _lanes = LANES.lock();
    require_live_checks();
    let folder = tempfile::tempdir().unwrap();
    let program = build_of("filtered.c", folder.path(), "filtered", &[]);
    let report = folder.path().join("report");
    let reboot = libc::SYS_reboot.to_string();
    let mut live = Value::Null;
    for before in ["400", "1000", "3000"] {
        let turns = Turns::start();
        let mut command = elfen(&["--report", report.to_str().unwrap()], &program);
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
    assert_eq!(live["places"]["on"], 0, "{live}");
}

#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn a_filter_by_prctl_is_survived() {
    ends_as_alone("all-but-exit");
}

#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn a_filter_by_seccomp_is_survived() {
    ends_as_alone("all-but-exit-by-seccomp");
}

#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn strict_mode_is_survived() {
    ends_as_alone("strict");
}

#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn no_new_privileges_are_survived() {
    ends_as_alone("no-new-privs");
}

#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn a_user_namespace_is_survived() {
    ends_as_alone("user-namespace");
}

#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn a_new_root_is_survived() {
    ends_as_alone("chroot");
}

/// Goal: a program that gives up rights, early or late, ends as it does alone. Method: what
/// sandboxes do, beside requests; a filter that allows nothing but the end leaves no call to a
/// check that rings. `SANDBOX_RUNS` says how often, each early and late.
fn ends_as_alone(what: &str) {
    let _lanes = LANES.lock();
    require_live_checks();
    let runs = std::env::var("SANDBOX_RUNS").map_or(4, |runs| runs.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let dynamic = build_of("filtered.c", folder.path(), "filtered", &[]);
    let fixed = build_of("filtered.c", folder.path(), "static", &["-static"]);
    for (run, program) in (0..runs).zip([&dynamic, &fixed].into_iter().cycle()) {
        for [before, after] in [[run * 3 % 40, 60], [300 + run * 37 % 500, 60]] {
            let arguments = [what.to_owned(), before.to_string(), after.to_string()];
            let alone = Command::new(program).args(&arguments).status().unwrap();
            assert_eq!(alone.code(), Some(3), "{arguments:?}");
            let turns = Turns::start();
            let beside = elfen_by_default(program).args(&arguments).output().unwrap();
            drop(turns);
            assert_eq!(beside.status, alone, "{arguments:?}: {beside:?}");
        }
    }
}
