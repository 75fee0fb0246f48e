//! Programs with checks in a container, which has namespaces of its own and no privilege: what
//! elfend hands them comes over its socket.
//!
//! `FENCE_ROUNDS=200 cargo test -p elfen --test fence container_checks -- --nocapture` for figures.

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
use super::pages::{Checked, PROGRAM, handed, is_checked, naps, stands_by_itself};
use super::stage::{Fenced, NOBODY, borrows, wait_until};
use super::stops::rounds;

/// What runs a container that has the program with checks, and elfend's socket.
fn engine(stage: &Stage, checked: &Checked) -> Command {
    let fenced = &stage.fenced;
    let mut command = podman(stage.folder.path(), &fenced.fence);
    let volume = |from: &Path, to: &str| format!("{}:{to}", from.display());
    command.args(["-v", "/usr:/usr:ro", "-v", &volume(&fenced.run_dir(), "/run/elfen:ro")]);
    command.args(["-v", &volume(checked.folder.path(), "/checked:rw"), "--user", NOBODY]);
    command.args(["-e", "LD_PRELOAD=/checked/libelfen_preload.so"]);
    command.args(["-e", "ELFEN_SOCKET=/run/elfen/elfend.sock", "--rootfs"]).arg(&stage.image);
    command
}

/// Such a container, once it runs the program by these words.
fn contained(stage: &Stage, checked: &Checked, words: &[&str]) -> Contained {
    let mut command = engine(stage, checked);
    Contained::start(command.args(words), &stage.fenced.fence, PROGRAM)
}

const CHECKS: [&str; 2] = ["/checked/checked", "/checked/last"];

/// Goal: it naps by itself, by the task map. Method: podman with runc, a hog on the request lane,
/// and guards that stand still.
#[test]
#[ignore = "needs root, two idle CPUs, cgroups, podman and runc"]
fn contained_programs_are_given_their_pages() {
    let stage = Stage::of(&PODMAN, Fenced::start_by_tasks);
    let (checked, fenced) = (Checked::build(), &stage.fenced);
    let pages = handed(fenced);
    let container = contained(&stage, &checked, &CHECKS);
    borrows(container.process);
    wait_until("its pages", || is_checked(&pages));
    let reactions = reactions(fenced, &checked);
    println!("from the switch to a request to the last turn of a contained batch: {reactions}");
    let hog = Spinner::on_cpu("0");
    wait_until("a nap", || naps(&pages));
    stands_by_itself(fenced, container.process, &checked);
    drop(hog);
}

/// How long the program went on beside requests of a millisecond, each on a lane that had been idle
/// until it went on; the kernel says when the request came. Below 0: its last turn took the time
/// before that, and saw the lane after.
fn reactions(fenced: &Fenced, checked: &Checked) -> String {
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
            let came = tasks.slot(0).unwrap().snapshot().and_then(|switch| switch.busy_since_ns);
            let began = monotonic_ns();
            while monotonic_ns() < began + 1_000_000 {}
            // Else somebody else was on it.
            if let Some(came) = came.filter(|came| *came > idle) {
                all.push(checked.last_ns().cast_signed() - came.cast_signed());
            }
            all.len() == rounds(20)
        });
        all
    };
    let mut all = std::thread::scope(|scope| scope.spawn(requests).join().unwrap());
    all.sort_unstable();
    let at = |share: usize| all[(all.len() - 1) * share / 100];
    format!("p50 {} ns, p99 {} ns, n {}", at(50), at(99), all.len())
}

/// Goal: what a container is handed it cannot spoil: neither cut nor lengthen a page, nor write its
/// own budget. Method: a program that asks as the library does, and tries.
#[test]
#[ignore = "needs root, two idle CPUs, cgroups, podman and runc"]
fn contained_programs_do_not_spoil_their_pages() {
    let stage = Stage::of(&PODMAN, Fenced::start_by_tasks);
    let checked = Checked::build();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fence/cuts.c");
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-Wall", "-Werror"]).arg(source);
    assert!(cc.arg("-o").arg(checked.folder.path().join("cuts")).status().unwrap().success());
    let mut command = engine(&stage, &checked);
    let output = command.args(["/checked/cuts", "/run/elfen/elfend.sock"]).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let why = String::from_utf8_lossy(&output.stderr);
    let refused = libc::EPERM;
    let tried = format!("cut {refused}, lengthen {refused}, seal {refused}");
    // The lanes' page, in which a check counts, and that of settings.
    let pages = [format!("write 0, {tried}"), format!("write {refused}, {tried}")];
    assert_eq!(said.lines().collect::<Vec<_>>(), pages, "{why}");
}

/// Goal: a container outlives as many daemons as there are upgrades; each freezes it, and hands
/// pages of its own to the programs that it starts. Method: daemons that end beside one that starts
/// a program again and again.
#[test]
#[ignore = "needs root, two idle CPUs, cgroups, podman and runc"]
fn contained_programs_are_given_pages_by_each_daemon() {
    let mut stage = Stage::of(&PODMAN, Fenced::start_by_tasks);
    let checked = Checked::build();
    let again = format!("while :; do busybox timeout 1 {} {}; done", CHECKS[0], CHECKS[1]);
    let words = ["/bin/sh", "-c", &again];
    let mut container = contained(&stage, &checked, &words);
    let fenced = &mut stage.fenced;
    for _ in 0..rounds(3) {
        checked.goes_on();
        fenced.end_daemon();
        let freezer = fenced.fence.0.freezer();
        wait_until("standing still", || freezer.is_frozen().unwrap());
        let stands = checked.last_ns();
        fenced.restart();
        let pages = handed(fenced);
        fenced.wait_until_it_runs();
        wait_until("pages of the new daemon", || is_checked(&pages));
        assert!(checked.last_ns() >= stands);
        assert!(container.goes_on());
    }
    checked.goes_on();
    let accounts = fenced.fence().accounts;
    assert_eq!(accounts.len(), 1, "{accounts:?}");
}
