//! A crowd in a fence, as a program makes one that forks and forks, beside somebody who logs in.
//!
//! `FENCE_ROUNDS=200 cargo test -p elfen --test fence crowd -- --nocapture` for figures.

use std::process::{Child, Command, Stdio};

use elfen_rt::clock::monotonic_ns;

use super::SPIN;
use super::hostile::cpu_of;
use super::stage::{Fenced, NOBODY, kill, require_fences, wait_until};
use super::stops::{rounds, say};

const CROWD: usize = 600;

/// A shell that reads what login shells read, and answers: what is left of an ssh once it is
/// connected. The one that waits for it is in the test's own cgroup, beside everybody else.
fn logs_in() -> u64 {
    let began = monotonic_ns();
    let mut shell = Command::new("setpriv");
    shell.args(["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"]);
    shell.args(["sh", "-l", "-c", "echo here"]).current_dir("/").stdin(Stdio::null());
    let answer = shell.output().unwrap();
    assert!(answer.status.success() && answer.stdout == b"here\n", "{answer:?}");
    monotonic_ns() - began
}

fn crowd() -> String {
    format!("i=0; while [ $i -lt {CROWD} ]; do i=$((i+1)); ({SPIN}) & done; wait")
}

/// The crowd, at nice 19, without a fence around it; it ends with the test, also with one that
/// fails.
struct Unfenced(Child);

impl Unfenced {
    fn start() -> Self {
        use std::os::unix::process::CommandExt;
        let mut command = Command::new("nice");
        command.args(["-n", "19", "sh", "-c", &crowd()]).stdin(Stdio::null());
        Self(command.process_group(0).spawn().unwrap())
    }

    fn size(&self) -> usize {
        let task = format!("/proc/{0}/task/{0}/children", self.0.id());
        std::fs::read_to_string(task).unwrap_or_default().split_whitespace().count()
    }
}

impl Drop for Unfenced {
    fn drop(&mut self) {
        // SAFETY: takes numbers; the group is this child's, which nobody has reaped.
        unsafe { libc::killpg(i32::try_from(self.0.id()).unwrap(), libc::SIGKILL) };
        self.0.wait().ok();
    }
}

/// Goal: a crowd in the fence keeps nobody from logging in, on no lane but its own, and stops when
/// it is told to. Method: as many processes as a unit's TasksMax might allow, somebody who logs in,
/// and the same without a fence.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_crowd_keeps_nobody_out() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_it_runs();
    let logins = |of: usize| (0..rounds(of)).map(|_| logs_in()).collect();
    say("a login shell alone", logins(20));
    let mut batch = fenced.batch(&[], NOBODY, &crowd());
    let inside = || fenced.fence.0.processes().unwrap();
    wait_until("a crowd", || inside().len() > CROWD);
    say(&format!("beside {CROWD} processes in the fence"), logins(20));
    assert!(inside().into_iter().filter_map(cpu_of).all(|cpu| cpu == 1), "on its lane");
    let began = monotonic_ns();
    assert!(fenced.elfen(&["pause"]).status.success());
    say("elfen pause of them", vec![monotonic_ns() - began]);
    assert!(fenced.fence.0.freezer().is_frozen().unwrap());
    assert!(fenced.elfen(&["resume"]).status.success());
    inside().into_iter().for_each(|process| kill(process, libc::SIGKILL));
    wait_until("their end", || inside().is_empty());
    batch.wait().unwrap();

    let unfenced = Unfenced::start();
    wait_until("a crowd", || unfenced.size() == CROWD);
    say("beside the same at nice 19, without a fence", logins(5));
}
