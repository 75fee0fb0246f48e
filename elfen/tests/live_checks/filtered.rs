//! Tests of programs that drop rights while they run.

use std::process::Command;

use serde_json::Value;

use super::{BusyTurns, build_source, elfen_run, elfen_run_live, run_next_to_requests, take_lanes};

const RUNS: u32 = 20;

/// Goal: Elfen never makes a program call a system call that the program has forbidden. Method:
/// programs that make mmap fatal at times when checks are about to be written. Each ends in the
/// same way as without Elfen.
#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn a_program_that_forbids_mmap_survives() {
    let _lanes = take_lanes();
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

/// Goal: soon after a program filters its system calls, its checks are removed, and the report
/// gives the reason. Method: a program with checks that forbids a call which checks do not use.
#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn checks_are_taken_out_of_a_program_that_filters() {
    let _lanes = take_lanes();
    let folder = tempfile::tempdir().unwrap();
    let program = build_source("filtered.c", folder.path(), "filtered", &[]);
    let reboot = libc::SYS_reboot.to_string();
    let mut live = Value::Null;
    for before in ["400", "1000", "3000"] {
        let (output, mut report) = run_next_to_requests(&program, &[&reboot, before, "1500"]);
        assert_eq!(output.status.code(), Some(3), "{output:?}");
        live = report["live"].take();
        if live["first_touch_ns"].as_u64().unwrap_or(0) > 0 {
            break;
        }
    }
    assert_eq!(live["refused"], "its system calls are filtered (seccomp)", "{live}");
    assert_eq!(live["sites"]["on"], 0, "{live}");
}

/// Goal: a program that drops rights, early or late, ends in the same way as without Elfen. Method:
/// the steps of sandboxes, next to requests. A filter that allows only exit also forbids the system
/// call of a check that rings. `SANDBOX_RUNS` sets the number of runs, each early and late.
#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn programs_that_drop_rights_end_as_alone() {
    let _lanes = take_lanes();
    let runs = std::env::var("SANDBOX_RUNS").map_or(4, |runs| runs.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let dynamic = build_source("filtered.c", folder.path(), "filtered", &[]);
    let fixed = build_source("filtered.c", folder.path(), "static", &["-static"]);
    let steps = [
        "all-but-exit",
        "all-but-exit-by-seccomp",
        "strict",
        "no-new-privs",
        "user-namespace",
        "chroot",
    ];
    let programs = [&dynamic, &fixed].into_iter().cycle();
    for (step, (run, program)) in
        steps.iter().flat_map(|step| (0..runs).zip(programs.clone()).map(move |run| (step, run)))
    {
        for [before, after] in [[run * 3 % 40, 60], [300 + run * 37 % 500, 60]] {
            let arguments = [(*step).to_owned(), before.to_string(), after.to_string()];
            let alone = Command::new(program).args(&arguments).status().unwrap();
            assert_eq!(alone.code(), Some(3), "{arguments:?}");
            let turns = BusyTurns::start();
            let lent = elfen_run(&[], program).args(&arguments).output().unwrap();
            drop(turns);
            assert_eq!(lent.status, alone, "{arguments:?}: {lent:?}");
        }
    }
}
