//! Programs with checks in a container, with separate namespaces and without privileges. elfend
//! passes them their pages over its socket.
//!
//! `FENCE_ROUNDS=200 cargo test -p elfen --test fence container_checks -- --nocapture` prints
//! reaction times.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use elfen_rt::clock::monotonic_ns;
use elfen_rt::memory::Access;
use elfen_rt::pages;

use super::accounts::Spinner;
use super::container::{Contained, PODMAN, Stage, podman};
use super::pages::{
    Checked, PROGRAM, assert_naps_unguarded, handed_pages, has_fetched_pages, is_napping,
};
use super::stage::{Fenced, NOBODY, wait_until, wait_until_borrowing};
use super::stops::rounds;

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

/// Starts such a container with these words, and waits for the program.
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
    let reactions = measure_reactions(fenced, &checked);
    println!("from the switch to a request to the last turn of a contained batch: {reactions}");
    let hog = Spinner::on_cpu("0");
    wait_until("a nap", || is_napping(&pages));
    assert_naps_unguarded(fenced, container.process, &checked);
    drop(hog);
}

/// How long the program continues next to requests of one millisecond, each after the lane was
/// idle. The kernel reports when the request arrived. A result is negative if the program took the
/// time of its last round before the request arrived, and checked the lane afterwards.
fn measure_reactions(fenced: &Fenced, checked: &Checked) -> String {
    let socket = fenced.run_dir().join("elfend.sock");
    let tasks =
        pages::request_pages(socket.as_os_str().as_bytes(), Access::Read).unwrap().tasks.unwrap();
    let requests = || {
        let mut lane = nix::sched::CpuSet::new();
        lane.set(0).unwrap();
        nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &lane).unwrap();
        let mut all = Vec::new();
        wait_until("requests on a lane that idled", || {
            let idle = monotonic_ns();
            wait_until("borrowing", || checked.last_ns() > idle);
            sleep(Duration::from_millis(2));
            let busy_since = tasks.slot(0).unwrap().snapshot().and_then(|it| it.busy_since_ns);
            let began = monotonic_ns();
            while monotonic_ns() < began + 1_000_000 {}
            // Otherwise another process was on the lane before.
            if let Some(busy_since) = busy_since.filter(|since| *since > idle) {
                all.push(checked.last_ns().cast_signed() - busy_since.cast_signed());
            }
            all.len() == rounds(20)
        });
        all
    };
    let mut all = std::thread::scope(|scope| scope.spawn(requests).join().unwrap());
    all.sort_unstable();
    let at = |percent: usize| all[(all.len() - 1) * percent / 100];
    format!("p50 {} ns, p99 {} ns, n {}", at(50), at(99), all.len())
}

/// Goal: a container can neither truncate nor extend its pages, nor write its budget. Method: a
/// program that requests pages as the library does, and tries.
#[test]
#[ignore = "needs root, two idle CPUs, cgroups, podman and runc"]
fn contained_programs_cannot_damage_their_pages() {
    let stage = Stage::of(&PODMAN, Fenced::start_by_tasks);
    let checked = Checked::build();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fence/cuts.c");
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-Wall", "-Werror"]).arg(source);
    assert!(cc.arg("-o").arg(checked.folder.path().join("cuts")).status().unwrap().success());
    let mut command = engine_command(&stage, &checked);
    let output = command.args(["/checked/cuts", "/run/elfen/elfend.sock"]).output().unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    let why = String::from_utf8_lossy(&output.stderr);
    let refused = libc::EPERM;
    let tried = format!("cut {refused}, lengthen {refused}, seal {refused}");
    // The page of the lanes, in which checks count, and the page of settings.
    let pages = [format!("write 0, {tried}"), format!("write {refused}, {tried}")];
    assert_eq!(printed.lines().collect::<Vec<_>>(), pages, "{why}");
}

/// Goal: a container outlives each restart of elfend. It is frozen meanwhile, and programs that it
/// starts afterwards receive pages of the new daemon. Method: restarts, next to a container that
/// keeps starting a program.
#[test]
#[ignore = "needs root, two idle CPUs, cgroups, podman and runc"]
fn contained_programs_receive_pages_of_each_daemon() {
    let mut stage = Stage::of(&PODMAN, Fenced::start_by_tasks);
    let checked = Checked::build();
    let again = format!("while :; do busybox timeout 1 {} {}; done", CHECKS[0], CHECKS[1]);
    let words = ["/bin/sh", "-c", &again];
    let mut container = start_contained(&stage, &checked, &words);
    let fenced = &mut stage.fenced;
    for _ in 0..rounds(3) {
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
