//! How soon a fence stands still: by the kill switch, and when its guards die. What it took is
//! printed; that it stands is what holds.
//!
//! `FENCE_ROUNDS=200 cargo test -p elfen --test fence stops -- --nocapture` for figures.

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use elfen_rt::clock::monotonic_ns;

use super::stage::{Fenced, NOBODY, comm, kill, require_fences, wait_until};

const PROGRAM: &str = "stamps";

pub(crate) fn rounds(usual: usize) -> usize {
    std::env::var("FENCE_ROUNDS").map_or(usual, |rounds| rounds.parse().unwrap())
}

/// A batch that writes down the time at each of its turns.
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
        stamps.go_on();
        stamps
    }

    fn last_ns(&self) -> u64 {
        let mut word = [0; 8];
        fs::File::open(&self.file).unwrap().read_exact_at(&mut word, 0).unwrap();
        u64::from_ne_bytes(word)
    }

    fn go_on(&self) {
        let now = monotonic_ns();
        wait_until("the batch goes on", || self.last_ns() > now);
    }

    /// Its last turn, of a fence that the kernel calls frozen.
    fn stands(&self, fenced: &Fenced) -> u64 {
        wait_until("being frozen", || fenced.fence.0.freezer().is_frozen().unwrap());
        let last = self.last_ns();
        std::thread::sleep(Duration::from_millis(3));
        assert_eq!(self.last_ns(), last, "it stands");
        last
    }
}

impl Drop for Stamps {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

pub(crate) fn say(what: &str, mut all: Vec<u64>) {
    all.sort_unstable();
    let at = |share: usize| all[(all.len() - 1) * share / 100] / 1_000;
    println!("{what}: p50 {} us, p99 {} us, n {}", at(50), at(99), all.len());
}

/// Goal: the batch stands still when the kernel says so, on a lane that is free and on one that a
/// guard holds. Method: the time that it writes down itself, and the fence's freezer.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn stops_by_the_freezer() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_it_runs();
    let stamps = Stamps::start(&fenced);
    let mut worker = fenced.service().claim(0, 0).unwrap();
    let freezer = fenced.fence.0.freezer();
    for held in [false, true] {
        let (mut last, mut frozen) = (Vec::new(), Vec::new());
        for _ in 0..rounds(20) {
            stamps.go_on();
            if held {
                worker.begin(1);
            }
            let began = monotonic_ns();
            freezer.freeze().unwrap();
            let at = stamps.stands(&fenced);
            frozen.push(monotonic_ns() - began);
            last.push(at.saturating_sub(began));
            if held {
                worker.end();
            }
            freezer.thaw().unwrap();
        }
        let lane = if held { "a held lane" } else { "a free lane" };
        say(&format!("from the freeze to the last turn on {lane}"), last);
        say(&format!("and until the kernel says frozen, and 3 ms, on {lane}"), frozen);
    }
}

/// Goal: `elfen pause` ends when nothing runs any more, with elfend and while that stands still
/// itself. Method: the time that the batch writes down, and how long the command takes.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn stops_by_the_command() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_it_runs();
    let stamps = Stamps::start(&fenced);
    for stopped in [false, true] {
        let (mut last, mut took) = (Vec::new(), Vec::new());
        for _ in 0..rounds(5) {
            stamps.go_on();
            if stopped {
                kill(fenced.daemon.id(), libc::SIGSTOP);
            }
            let began = monotonic_ns();
            let paused = fenced.elfen(&["pause"]);
            let ended = monotonic_ns();
            assert!(paused.status.success(), "{paused:?}");
            took.push(ended - began);
            assert!(stamps.last_ns() <= ended);
            last.push(stamps.stands(&fenced).saturating_sub(began));
            kill(fenced.daemon.id(), libc::SIGCONT);
            let resumed = fenced.elfen(&["resume"]);
            assert!(resumed.status.success(), "{resumed:?}");
        }
        let elfend = if stopped { "elfend stopped" } else { "elfend running" };
        say(&format!("elfen pause, {elfend}, until it ended"), took);
        say(&format!("and from its start to the last turn, {elfend}"), last);
    }
}

/// Goal: when guards are killed, the batch stands still until there are others, each time. Method:
/// SIGKILL, the fence's freezer, and the daemon's count of keepers.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn stops_when_guards_die() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_it_runs();
    let stamps = Stamps::start(&fenced);
    let freezer = fenced.fence.0.freezer();
    let (mut frozen, mut back) = (Vec::new(), Vec::new());
    for round in 1..=rounds(3) {
        let keeper = fenced.status().keeper.unwrap();
        let (began, since) = (monotonic_ns(), Instant::now());
        kill(keeper, libc::SIGKILL);
        while !freezer.is_requested().unwrap() {
            assert!(since.elapsed().as_secs() < 60, "{}", fenced.said());
        }
        frozen.push(monotonic_ns() - began);
        wait_until("other guards", || {
            let status = fenced.status();
            let lost = usize::try_from(status.keepers_lost).unwrap();
            lost == round && status.fences.iter().all(|fence| fence.frozen.is_none())
        });
        back.push(monotonic_ns() - began);
        stamps.go_on();
    }
    say("from the death of the guards to the freeze", frozen);
    say("and until the fence ran beside others", back);
}

/// Goal: a batch outlives as many daemons as there are upgrades, and none of them lets it run
/// unguarded. Method: daemons that end, with the batch inside; the fence is frozen in between.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn stops_for_each_other_daemon() {
    require_fences();
    let mut fenced = Fenced::start();
    fenced.wait_until_it_runs();
    let mut stamps = Stamps::start(&fenced);
    for _ in 0..20 {
        fenced.end_daemon();
        stamps.stands(&fenced);
        fenced.restart();
        fenced.wait_until_it_runs();
        stamps.go_on();
        assert_eq!(stamps.child.try_wait().unwrap(), None);
    }
}

/// Goal: nothing of a batch runs when daemon and guards are killed together, where no systemd looks
/// after them. Method: SIGKILL of both, in either order, at once and up to 50 ms apart, and of both
/// while they are stopped.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn stops_when_all_of_elfend_dies() {
    require_fences();
    let mut fenced = Fenced::start();
    let freezer = fenced.fence.0.freezer();
    let mut frozen = Vec::new();
    for round in 0..rounds(6) {
        fenced.wait_until_it_runs();
        let stamps = Stamps::start(&fenced);
        let (daemon, keeper) = (fenced.daemon.id(), fenced.status().keeper.unwrap());
        let order = if round % 2 == 0 { [daemon, keeper] } else { [keeper, daemon] };
        if round % 3 == 2 {
            order.iter().for_each(|&process| kill(process, libc::SIGSTOP));
        }
        kill(order[0], libc::SIGKILL);
        std::thread::sleep(Duration::from_millis(round as u64 % 3 * 25));
        let began = monotonic_ns();
        kill(order[1], libc::SIGKILL);
        fenced.daemon.wait().unwrap();
        let last = stamps.stands(&fenced);
        frozen.push(last.saturating_sub(began));
        freezer.thaw().unwrap();
        drop(stamps);
        fenced.restart();
    }
    say("from the death of both to the last turn", frozen);
}
