//! Tests of programs with checks in a container, with separate namespaces and without privileges.
//! elfend passes them their pages over its socket.

use std::path::Path;
use std::process::Command;

use super::accounts::spin_on_cpu;
use super::container::{Contained, PODMAN, Stage, podman};
use super::pages::{
    Checked, PROGRAM, assert_naps_unguarded, handed_pages, has_fetched_pages, is_napping,
};
use super::stage::{Fenced, NOBODY, wait_until, wait_until_borrowing};

/// The command that runs a container with the checked program and elfend's socket.
fn engine_command(stage: &Stage, checked: &Checked) -> Command {
    let fenced = &stage.fenced;
    let mut command = podman(stage.folder.path(), &fenced.fence);
    let volume = |from: &Path, to: &str| format!("{}:{to}", from.display());
    command.args(["-v", "/usr:/usr:ro", "-v", &volume(&fenced.run_dir(), "/run/elfen:ro")]);
    command.args(["-v", &volume(checked.folder.path(), "/checked:rw"), "--user", NOBODY]);
    command.args(["-e", "LD_PRELOAD=/checked/libelfen_preload.so"]);
    command.args(["-e", "ELFEN_SOCKET=/run/elfen/elfend.sock", "--rootfs"]).arg(&stage.image);
    command
}

/// Starts a container with these arguments, and waits for its program.
fn start_contained(stage: &Stage, checked: &Checked, words: &[&str]) -> Contained {
    let mut command = engine_command(stage, checked);
    Contained::start(command.args(words), &stage.fenced.fence, PROGRAM)
}

const CHECKS: [&str; 2] = ["/checked/checked", "/checked/last"];

/// Goal: a contained program receives its pages, and naps in its checks by the task map. Method:
/// podman with runc, a spinning program on the request lane, and stopped guards.
#[test]
#[ignore = "needs root, two idle CPUs, cgroups, podman and runc"]
fn contained_programs_receive_their_pages() {
    let stage = Stage::of(&PODMAN, Fenced::start_by_tasks);
    let (checked, fenced) = (Checked::build(), &stage.fenced);
    let pages = handed_pages(fenced);
    let container = start_contained(&stage, &checked, &CHECKS);
    wait_until_borrowing(container.process);
    wait_until("its pages", || has_fetched_pages(&pages));
    let hog = spin_on_cpu("0");
    wait_until("a nap", || is_napping(&pages));
    assert_naps_unguarded(fenced, container.process, &checked);
    drop(hog);
}

/// Goal: a container can neither truncate nor extend its pages, nor write its budget. Method: a
/// program that requests pages as the library does, and tries each of these.
#[test]
#[ignore = "needs root, two idle CPUs, cgroups, podman and runc"]
fn contained_programs_cannot_damage_their_pages() {
    let stage = Stage::of(&PODMAN, Fenced::start_by_tasks);
    let checked = Checked::build();
    checked.compile("cuts.c", "cuts");
    let mut command = engine_command(&stage, &checked);
    let output = command.args(["/checked/cuts", "/run/elfen/elfend.sock"]).output().unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    let why = String::from_utf8_lossy(&output.stderr);
    let refused = libc::EPERM;
    let tried = format!("cut {refused}, lengthen {refused}, seal {refused}");
    // The page of the lanes, to which checks write their counts, and the page of settings.
    let pages = [format!("write 0, {tried}"), format!("write {refused}, {tried}")];
    assert_eq!(printed.lines().collect::<Vec<_>>(), pages, "{why}");
}

/// Goal: a container survives each restart of elfend. It is frozen meanwhile, and programs that it
/// starts later receive pages of the new daemon. Method: restarts, while a container keeps starting
/// a program.
#[test]
#[ignore = "needs root, two idle CPUs, cgroups, podman and runc"]
fn contained_programs_receive_pages_of_each_daemon() {
    let mut stage = Stage::of(&PODMAN, Fenced::start_by_tasks);
    let checked = Checked::build();
    let again = format!("while :; do busybox timeout 1 {} {}; done", CHECKS[0], CHECKS[1]);
    let words = ["/bin/sh", "-c", &again];
    let mut container = start_contained(&stage, &checked, &words);
    let fenced = &mut stage.fenced;
    for _ in 0..3 {
        checked.wait_for_progress();
        fenced.end_daemon();
        let freezer = fenced.fence.0.freezer();
        wait_until("the freeze", || freezer.is_frozen().unwrap());
        let frozen_at = checked.last_ns();
        fenced.restart();
        let pages = handed_pages(fenced);
        fenced.wait_until_running();
        wait_until("pages of the new daemon", || has_fetched_pages(&pages));
        assert!(checked.last_ns() >= frozen_at);
        assert!(container.is_running());
    }
    checked.wait_for_progress();
    let accounts = fenced.fence().accounts;
    assert_eq!(accounts.len(), 1, "{accounts:?}");
}
