//! Goal: processes in a fence stay on its lanes and rank below its guards. They are frozen if that
//! cannot be guaranteed, and `elfen pause` works even if other parts are broken.
//!
//! Method: the real daemon with cgroups of the test, and a service page that the test writes. The
//! kernel reports what ran where. Most guarantees are also tested without the fence, to show that
//! the test can fail.

mod accounts;
mod commands;
mod container;
mod container_checks;
mod elfend_unit;
mod hostile;
mod interference;
mod kubernetes;
mod members;
#[path = "../needs/mod.rs"]
mod needs;
mod pages;
#[path = "../preload/mod.rs"]
mod preload;
#[path = "../process/mod.rs"]
mod process;
mod refused;
mod requests;
mod restarts;
mod settings;
mod slurm;
mod stage;
mod unit_fences;

use std::fs;
use std::process::Stdio;

use elfen_machine::cgroup::Rank;
use elfen_machine::fence::guarantees::Guarantee;
use elfen_machine::fence::status::Frozen;

use stage::{
    ELFEN, Fenced, KilledOnDrop, NOBODY, comm, cpu_share, kill, ran_ns, wait_until,
    wait_until_borrowing,
};

/// A script that never ends and makes no system calls.
pub(crate) const SPIN: &str = "while :; do :; done";

/// Goal: a batch gets almost nothing of a lane that its guard occupies. Method: the scheduler's
/// account of guard and batch, and of the same program in a cgroup outside of the fence.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_batch_gets_next_to_nothing_of_a_lane_that_its_guard_holds() {
    let fenced = Fenced::start();
    let batch = fenced.batch(&["nice", "-n", "-20"], NOBODY, SPIN);
    wait_until_borrowing(batch.id());
    let worker = fenced.begin_request();
    let inside = fenced.held_share(batch.id());
    println!("a batch at nice -20 in the fence: {inside} per mille of the held lane");

    let own = fenced.heavy.child("beside");
    own.0.make().unwrap();
    let rival = own.start(&["nice", "-n", "-20", "taskset", "-c", "1", "sh", "-c", SPIN]);
    wait_until("its start", || comm(rival.id()) == "sh" && ran_ns(rival.id()) > 10_000_000);
    // A new cgroup may wait for its first time slice for seconds.
    let mut outside = 0;
    wait_until("a share of the lane", || {
        outside = cpu_share(rival.id(), fenced.guard().unwrap());
        outside >= 100
    });
    println!("the same in a cgroup of its own: {outside} per mille");
    drop(worker);
    drop(rival);
    wait_until_borrowing(batch.id());
    assert!(inside <= 20, "{inside}");
}

/// Goal: guards sleep while their fence is empty. Method: an empty fence next to a request.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn guards_sleep_while_the_fence_is_empty() {
    let fenced = Fenced::start();
    let _worker = fenced.begin_request();
    assert_eq!(fenced.guard(), None);
    let batch = fenced.batch(&[], NOBODY, "exec sleep 600");
    wait_until("a guard", || fenced.guard().is_some());
    drop(batch);
    wait_until("the guard's sleep", || fenced.guard().is_none());
}

/// Goal: elfend repairs and counts changes that other programs make to the fence. Method: the test
/// writes the fence's files.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn foreign_changes_of_a_fence_are_repaired_and_counted() {
    let fenced = Fenced::start();
    let group = &fenced.fence.0;
    assert_eq!(fenced.fence().repaired, []);
    let times = |guarantee| {
        let repaired = fenced.fence().repaired;
        repaired.iter().find(|repair| repair.guarantee == guarantee).map_or(0, |it| it.times)
    };
    group.set_idle(false).unwrap();
    wait_until("an idle cgroup again", || group.rank().unwrap().idle);
    wait_until("counting it", || times(Guarantee::Rank) == 1);
    group.keep_to_parent().unwrap();
    wait_until("its lanes again", || group.effective_cpus().unwrap().to_string() == "1");
    wait_until("counting it", || times(Guarantee::Place) == 1);
    assert_eq!(fenced.fence().frozen, None);
    let prints = |line: &str| {
        let text = fenced.prints(&[ELFEN, "metrics", "--once"]);
        assert!(text.lines().any(|has| has == line), "{line}: {text}");
    };
    prints("elfen_elfend_up 1");
    prints("elfen_fence_repaired_total{fence=\"batch\",guarantee=\"rank\"} 1");
    prints("elfen_fence_holds{fence=\"batch\",guarantee=\"place\"} 1");
    prints("elfen_fence_frozen{fence=\"batch\",why=\"paused\"} 0");
    fenced.prints(&[ELFEN, "pause"]);
    wait_until("the pause", || fenced.fence().frozen.is_some());
    prints("elfen_fence_frozen{fence=\"batch\",why=\"paused\"} 1");
    fenced.prints(&[ELFEN, "resume"]);
    let json = fenced.prints(&[ELFEN, "status", "--json"]);
    assert!(json.replace(": ", ":").contains(r#""name":"batch""#), "{json}");
}

/// Goal: a fence that outweighs its guards is frozen, with the reason. Method: a daemon in a cgroup
/// with little weight.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_fence_that_outweighs_its_guards_is_frozen() {
    let fenced = Fenced::start_with_weight(1);
    let light = &fenced.home;
    assert!(light.0.rank().unwrap().weight < 30);
    wait_until("the freeze", || fenced.fence().frozen == Some(Frozen::Broken));
    let why = fenced.fence().why().unwrap();
    assert!(why.contains("has weight"), "{why}");
    assert!(fenced.fence.0.freezer().is_requested().unwrap());
    light.set_weight(100);
    assert_eq!(light.0.rank().unwrap(), Rank { idle: false, weight: 100 });
    fenced.wait_until_running();
}

/// Goal: a pause freezes running processes and processes that enter later, even while the daemon is
/// stopped. `resume` thaws both. Method: batches before and after the pause.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn the_kill_switch_works_with_the_daemon_stopped() {
    let fenced = Fenced::start();
    let file = fenced.run_dir().join("entered");
    let batch = fenced.batch(&[], NOBODY, SPIN);
    for stopped in [false, true] {
        wait_until_borrowing(batch.id());
        if stopped {
            kill(fenced.daemon.id(), libc::SIGSTOP);
        }
        fenced.prints(&[ELFEN, "pause", "--why", "a test"]);
        assert!(fenced.fence.0.freezer().is_frozen().unwrap());
        // The scheduler updates a task's run time when the next task gets the CPU.
        std::thread::sleep(std::time::Duration::from_millis(100));
        let frozen_at_ns = ran_ns(batch.id());
        let mut late = fenced.fence.start(&["sh", "-c", "echo >\"$0\"", file.to_str().unwrap()]);
        std::thread::sleep(std::time::Duration::from_millis(300));
        assert_eq!(ran_ns(batch.id()), frozen_at_ns, "a frozen batch does not run");
        assert!(!file.exists(), "a process that enters during the pause does not run");
        if stopped {
            kill(fenced.daemon.id(), libc::SIGCONT);
        }
        wait_until("the reason", || fenced.status().paused.as_deref() == Some("a test"));
        fenced.prints(&[ELFEN, "resume"]);
        late.wait().unwrap();
        fs::remove_file(&file).unwrap();
    }
    // A program that `elfen run` starts during a pause waits in the fence.
    fenced.prints(&[ELFEN, "pause"]);
    let words = [ELFEN, "run", "--fence", "batch", "--user", NOBODY, "--", "true"];
    let late = fenced.command(&words).stderr(Stdio::null()).spawn().unwrap();
    let mut late = KilledOnDrop(late);
    wait_until("its entering", || fenced.fence.0.processes().unwrap().contains(&late.id()));
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert_eq!(late.try_wait().unwrap(), None, "it does not run");
    fenced.prints(&[ELFEN, "resume"]);
    assert!(late.wait().unwrap().success());
    // Pause and resume before the daemon has seen the pause.
    fenced.prints(&[ELFEN, "pause"]);
    fenced.prints(&[ELFEN, "resume"]);
    assert!(!fenced.fence.0.freezer().is_requested().unwrap());
}
