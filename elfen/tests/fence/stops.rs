//! How soon a fence stops: by the kill switch, and when its guards die. The tests print the times,
//! and assert only that the fence is frozen.
//!
//! `FENCE_ROUNDS=200 cargo test -p elfen --test fence stops -- --nocapture` prints them.

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use elfen_rt::clock::monotonic_ns;

use super::stage::{Fenced, NOBODY, comm, kill, require_fences, wait_until};

const PROGRAM: &str = "stamps";

/// The number of rounds of a measurement: `FENCE_ROUNDS`, or this default.
pub(crate) fn rounds(default: usize) -> usize {
    std::env::var("FENCE_ROUNDS").map_or(default, |rounds| rounds.parse().unwrap())
}

/// A batch that writes the time in each round of its loop.
struct Stamps {
    child: Child,
    file: PathBuf,
}

impl Stamps {
    fn start(fenced: &Fenced) -> Self {
        let (program, file) = (fenced.run_dir().join(PROGRAM), fenced.run_dir().join("last"));
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fence/stamps.c");
        let compiled = Command::new("cc").arg("-O2").arg(source).arg("-o").arg(&program).status();
        assert!(compiled.unwrap().success());
        fs::write(&file, [0; 4096]).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).unwrap();
        let words = ["run", "--fence", "batch", "--user", NOBODY, "--"];
        let mut command = fenced.command(env!("CARGO_BIN_EXE_elfen"), &words);
        command.arg(&program).arg(&file).current_dir("/");
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let stamps = Self { child, file };
        wait_until("the program", || comm(stamps.child.id()) == PROGRAM);
        stamps.wait_for_progress();
        stamps
    }

    fn last_ns(&self) -> u64 {
        let mut word = [0; 8];
        fs::File::open(&self.file).unwrap().read_exact_at(&mut word, 0).unwrap();
        u64::from_ne_bytes(word)
    }

    fn wait_for_progress(&self) {
        let now = monotonic_ns();
        wait_until("progress of the batch", || self.last_ns() > now);
    }

    /// Waits until the kernel reports the fence frozen. Returns the time of the batch's last round.
    fn wait_until_stopped(&self, fenced: &Fenced) -> u64 {
        wait_until("being frozen", || fenced.fence.0.freezer().is_frozen().unwrap());
        let last = self.last_ns();
        std::thread::sleep(Duration::from_millis(3));
        assert_eq!(self.last_ns(), last, "a frozen batch does not run");
        last
    }
}

impl Drop for Stamps {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

pub(crate) fn print_percentiles(what: &str, mut all: Vec<u64>) {
    all.sort_unstable();
    let at = |percent: usize| all[(all.len() - 1) * percent / 100] / 1_000;
    println!("{what}: p50 {} us, p99 {} us, n {}", at(50), at(99), all.len());
}

/// Goal: the batch does not run while the kernel reports its fence frozen, on a free lane and on a
/// held one. Method: the time that the batch writes, and the fence's freezer.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_fence_stops_by_its_freezer() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_running();
    let stamps = Stamps::start(&fenced);
    let mut worker = fenced.service().claim(0, 0).unwrap();
    let freezer = fenced.fence.0.freezer();
    for held in [false, true] {
        let (mut last, mut frozen) = (Vec::new(), Vec::new());
        for _ in 0..rounds(20) {
            stamps.wait_for_progress();
            if held {
                worker.begin(1);
            }
            let began = monotonic_ns();
            freezer.freeze().unwrap();
            let at = stamps.wait_until_stopped(&fenced);
            frozen.push(monotonic_ns() - began);
            last.push(at.saturating_sub(began));
            if held {
                worker.end();
            }
            freezer.thaw().unwrap();
        }
        let lane = if held { "a held lane" } else { "a free lane" };
        print_percentiles(&format!("from the freeze to the last round on {lane}"), last);
        print_percentiles(
            &format!("and until the kernel reports frozen, plus 3 ms, on {lane}"),
            frozen,
        );
    }
}

/// Goal: `elfen pause` returns once nothing of the fence runs, also while elfend is stopped.
/// Method: the time that the batch writes, and the time of the command.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_fence_stops_by_elfen_pause() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_running();
    let stamps = Stamps::start(&fenced);
    for stopped in [false, true] {
        let (mut last, mut took) = (Vec::new(), Vec::new());
        for _ in 0..rounds(5) {
            stamps.wait_for_progress();
            if stopped {
                kill(fenced.daemon.id(), libc::SIGSTOP);
            }
            let began = monotonic_ns();
            let paused = fenced.elfen(&["pause"]);
            let ended = monotonic_ns();
            assert!(paused.status.success(), "{paused:?}");
            took.push(ended - began);
            assert!(stamps.last_ns() <= ended);
            last.push(stamps.wait_until_stopped(&fenced).saturating_sub(began));
            kill(fenced.daemon.id(), libc::SIGCONT);
            let resumed = fenced.elfen(&["resume"]);
            assert!(resumed.status.success(), "{resumed:?}");
        }
        let elfend = if stopped { "elfend stopped" } else { "elfend running" };
        print_percentiles(&format!("elfen pause, {elfend}, until it ended"), took);
        print_percentiles(&format!("and from its start to the last round, {elfend}"), last);
    }
}

/// Goal: each time its guards are killed, the fence is frozen until there are new guards. Method:
/// SIGKILL, the fence's freezer, and the daemon's count of lost guard processes.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_fence_stops_when_its_guards_die() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_running();
    let stamps = Stamps::start(&fenced);
    let freezer = fenced.fence.0.freezer();
    let (mut frozen, mut back) = (Vec::new(), Vec::new());
    for round in 1..=rounds(3) {
        let keeper = fenced.status().guard_process.unwrap();
        let (began, since) = (monotonic_ns(), Instant::now());
        kill(keeper, libc::SIGKILL);
        while !freezer.is_requested().unwrap() {
            assert!(since.elapsed().as_secs() < 60, "{}", fenced.log());
        }
        frozen.push(monotonic_ns() - began);
        wait_until("new guards", || {
            let status = fenced.status();
            let lost = usize::try_from(status.guard_processes_lost).unwrap();
            lost == round && status.fences.iter().all(|fence| fence.frozen.is_none())
        });
        back.push(monotonic_ns() - began);
        stamps.wait_for_progress();
    }
    print_percentiles("from the death of the guards to the freeze", frozen);
    print_percentiles("and until the fence ran with new guards", back);
}

/// Goal: a batch outlives each restart of elfend, and never runs unguarded. Method: restarts with
/// the batch inside; the fence is frozen in between.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_fence_stops_at_each_restart_of_elfend() {
    require_fences();
    let mut fenced = Fenced::start();
    fenced.wait_until_running();
    let mut stamps = Stamps::start(&fenced);
    for _ in 0..20 {
        fenced.end_daemon();
        stamps.wait_until_stopped(&fenced);
        fenced.restart();
        fenced.wait_until_running();
        stamps.wait_for_progress();
        assert_eq!(stamps.child.try_wait().unwrap(), None);
    }
}

/// Goal: without systemd, a fence is frozen when daemon and guards are killed together. Method:
/// SIGKILL of both, in either order, at once and up to 50 ms apart, and of both while they are
/// stopped.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_fence_stops_when_daemon_and_guards_die() {
    require_fences();
    let mut fenced = Fenced::start();
    let freezer = fenced.fence.0.freezer();
    let mut frozen = Vec::new();
    for round in 0..rounds(6) {
        fenced.wait_until_running();
        let stamps = Stamps::start(&fenced);
        let (daemon, keeper) = (fenced.daemon.id(), fenced.status().guard_process.unwrap());
        let order = if round % 2 == 0 { [daemon, keeper] } else { [keeper, daemon] };
        if round % 3 == 2 {
            order.iter().for_each(|&process| kill(process, libc::SIGSTOP));
        }
        kill(order[0], libc::SIGKILL);
        std::thread::sleep(Duration::from_millis(round as u64 % 3 * 25));
        let began = monotonic_ns();
        kill(order[1], libc::SIGKILL);
        fenced.daemon.wait().unwrap();
        let last = stamps.wait_until_stopped(&fenced);
        frozen.push(last.saturating_sub(began));
        freezer.thaw().unwrap();
        drop(stamps);
        fenced.restart();
    }
    print_percentiles("from the death of both to the last round", frozen);
}
