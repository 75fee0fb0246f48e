//! What a program in a fence gains by writing into what elfend hands it: nothing.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use elfen_rt::service::Worker;

use super::SPIN;
use super::stage::{Fenced, NOBODY, comm, kill, require_fences, share, wait_until};

const PROGRAM: &str = "scribble";
/// What a batch may have of a lane beside a request that lasts, per mille. The scheduler gives a
/// task at SCHED_IDLE up to 4, and critical sections have 2.
const MOST: u64 = 10;

fn program(folder: &Path) -> PathBuf {
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let file = folder.join(PROGRAM);
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-Wall", "-Werror", "-I"]).arg(here.join("../elfen-rt/include"));
    cc.arg(here.join("tests/fence/scribble.c")).arg("-o").arg(&file);
    assert!(cc.status().unwrap().success());
    file
}

/// Starts it in the fence, and waits until it writes. Returns how many pages it can write.
fn scribbles(fenced: &Fenced, program: &Path, what: &str) -> (Child, usize) {
    let words = ["run", "--fence", "batch", "--user", NOBODY, "--"];
    let mut command = fenced.command(env!("CARGO_BIN_EXE_elfen"), &words);
    command.arg(program).arg(fenced.run_dir().join("elfend.sock")).arg(what).current_dir("/");
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let before: Vec<String> = lines.take_while(|line| line != "ready").collect();
    assert_eq!(comm(child.id()), PROGRAM, "it was handed no pages");
    (child, before.len())
}

/// The median of three.
fn of_the_held_lane(fenced: &Fenced, process: u32) -> u64 {
    wait_until("a guard", || fenced.guard().is_some());
    let mut shares = [0; 3].map(|_: u64| share(process, fenced.guard().unwrap()));
    shares.sort_unstable();
    shares[1]
}

fn end(mut child: Child) {
    kill(child.id(), libc::SIGKILL);
    child.wait().unwrap();
}

fn begins(fenced: &Fenced) -> Worker<'_> {
    let mut worker = fenced.service().claim(0, 0).unwrap();
    worker.begin(1);
    worker
}

/// Goal: whatever a process in a fence writes into what it was handed, it gets no more of its lane
/// beside a request, and neither does an honest batch after it. Method: a program that overwrites
/// one word all the time, or all words by chance, next to a request that does not end; then one
/// that only spins.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_batch_gains_nothing_by_what_it_writes() {
    require_fences();
    let folder = tempfile::tempdir().unwrap();
    let program = program(folder.path());
    let fenced = Fenced::start();
    fenced.wait_until_it_runs();
    let mut shares = Vec::new();
    for what in ["hotplug", "critical", "policy", "ipc", "junk"] {
        let (child, writable) = scribbles(&fenced, &program, what);
        assert_eq!(writable, 1, "the page of hints, and nothing else");
        let worker = begins(&fenced);
        shares.push((what, of_the_held_lane(&fenced, child.id())));
        drop(worker);
        end(child);
    }
    let honest = fenced.batch(&[], NOBODY, SPIN);
    let worker = begins(&fenced);
    shares.push(("afterwards", of_the_held_lane(&fenced, honest.id())));
    drop(worker);
    end(honest);
    println!("per mille of the held lane: {shares:?}");
    assert!(shares.iter().all(|&(_, share)| share < MOST), "{shares:?}");
}
