//! Goal: processes in a fence stay on its lanes, below its guards. They are frozen when that cannot
//! be guaranteed, and the kill switch works whatever else is broken.
//!
//! Method: the real daemon with cgroups of the test, and the page of a service that the test
//! writes. The kernel reports what ran where. Most guarantees are also tested without the fence, to
//! show that the test can fail.

#[path = "../needs/mod.rs"]
mod needs;

mod accounts;
mod container;
mod container_checks;
mod elfend_unit;
mod hostile;
mod interference;
mod kubernetes;
mod members;
mod messages;
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
mod stops;
mod unit_fences;

use std::fs;
use std::process::{Command, Stdio};

use elfen_machine::cgroup::Rank;
use elfen_machine::fence::guarantees::Guarantee;
use elfen_machine::fence::status::Frozen;

use stage::{
    Fenced, NOBODY, comm, cpu_share, end, kill, ran_ns, require_fences, wait_until,
    wait_until_borrowing,
};

/// A script that never ends, and makes no system calls.
pub(crate) const SPIN: &str = "while :; do :; done";

/// Goal: a batch gets next to nothing of a lane that its guard holds. Method: the scheduler's
/// account of guard and batch; and of the same program in a cgroup outside of the fence.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_batch_gets_next_to_nothing_of_a_lane_that_its_guard_holds() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_running();
    let mut worker = fenced.service().claim(0, 0).unwrap();
    let mut batch = fenced.batch(&["nice", "-n", "-20"], NOBODY, SPIN);
    wait_until_borrowing(batch.id());
    worker.begin(1);
    let inside = fenced.held_share(batch.id());
    println!("a batch at nice -20 in the fence: {inside} per mille of the held lane");

    let own = fenced.heavy.child("beside");
    own.0.make().unwrap();
    let script = format!("{} exec nice -n -20 taskset -c 1 sh -c '{SPIN}'", own.enter_script());
    let mut rival = Command::new("sh").args(["-c", &script]).stdin(Stdio::null()).spawn().unwrap();
    wait_until("its start", || comm(rival.id()) == "sh" && ran_ns(rival.id()) > 10_000_000);
    // A new group may wait for its first time slice for seconds.
    let mut outside = 0;
    wait_until("a share of the lane", || {
        outside = cpu_share(rival.id(), fenced.guard().unwrap());
        outside >= 100
    });
    println!("the same in a cgroup of its own: {outside} per mille");
    worker.end();
    let before = ran_ns(batch.id());
    end(&mut rival);
    wait_until("borrowing again", || ran_ns(batch.id()) > before + 2_000_000);
    end(&mut batch);
    assert!(inside <= 20, "{inside}");
}

/// Goal: guards sleep while their fence is empty. Method: an empty fence next to a request.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn guards_sleep_while_the_fence_is_empty() {
    require_fences();
    let fenced = Fenced::start();
    let mut worker = fenced.service().claim(0, 0).unwrap();
    worker.begin(1);
    fenced.wait_until_running();
    assert_eq!(fenced.guard(), None);
    let mut batch = fenced.batch(&[], NOBODY, "exec sleep 600");
    wait_until("a guard", || fenced.guard().is_some());
    end(&mut batch);
    wait_until("the guard's sleep", || fenced.guard().is_none());
}

/// Goal: elfend repairs and counts changes that others make to the fence. Method: the test writes
/// the files of the fence.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn foreign_changes_of_a_fence_are_repaired_and_counted() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_running();
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
        let text = String::from_utf8(fenced.elfen(&["metrics", "--once"]).stdout).unwrap();
        assert!(text.lines().any(|has| has == line), "{line}: {text}");
    };
    prints("elfen_elfend_up 1");
    prints("elfen_fence_repaired_total{fence=\"batch\",guarantee=\"rank\"} 1");
    prints("elfen_fence_holds{fence=\"batch\",guarantee=\"place\"} 1");
    prints("elfen_fence_frozen{fence=\"batch\",why=\"paused\"} 0");
    assert!(fenced.elfen(&["pause"]).status.success());
    wait_until("the pause", || fenced.fence().frozen.is_some());
    prints("elfen_fence_frozen{fence=\"batch\",why=\"paused\"} 1");
    assert!(fenced.elfen(&["resume"]).status.success());
    let json = String::from_utf8(fenced.elfen(&["status", "--json"]).stdout).unwrap();
    let fence = r#""name":"batch""#;
    assert!(json.replace(": ", ":").contains(fence), "{json}");
}

/// Goal: a fence that outweighs its guards is frozen, with the reason. Method: a daemon in a cgroup
/// of little weight.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_fence_that_outweighs_its_guards_is_frozen() {
    require_fences();
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

/// Goal: a pause freezes running processes and those that enter later, also while the daemon is
/// stopped; `resume` thaws both. Method: batches before and after the pause.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn the_kill_switch_works_with_the_daemon_stopped() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_running();
    let file = fenced.run_dir().join("entered");
    let mut batch = fenced.batch(&[], NOBODY, SPIN);
    for stopped in [false, true] {
        wait_until_borrowing(batch.id());
        if stopped {
            kill(fenced.daemon.id(), libc::SIGSTOP);
        }
        let paused = fenced.elfen(&["pause", "--why", "a test"]);
        assert!(paused.status.success(), "{paused:?}");
        assert!(fenced.fence.0.freezer().is_frozen().unwrap());
        // The scheduler updates a task's run time when the next task gets the CPU.
        std::thread::sleep(std::time::Duration::from_millis(100));
        let frozen_at_ns = ran_ns(batch.id());
        let script = format!("{} echo >\"$0\"", fenced.fence.enter_script());
        let mut late = Command::new("sh").arg("-c").arg(script).arg(&file).spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(300));
        assert_eq!(ran_ns(batch.id()), frozen_at_ns, "a frozen batch does not run");
        assert!(!file.exists(), "a process that enters during the pause does not run");
        if stopped {
            kill(fenced.daemon.id(), libc::SIGCONT);
        }
        wait_until("the reason", || fenced.status().paused.as_deref() == Some("a test"));
        let resumed = fenced.elfen(&["resume"]);
        assert!(resumed.status.success(), "{resumed:?}");
        late.wait().unwrap();
        assert!(file.exists());
        fs::remove_file(&file).unwrap();
    }
    // A program that `elfen run` starts during a pause waits in the fence.
    assert!(fenced.elfen(&["pause"]).status.success());
    let words = ["run", "--fence", "batch", "--user", NOBODY, "--", "true"];
    let mut late = fenced.command(env!("CARGO_BIN_EXE_elfen"), &words);
    let mut late = late.stderr(Stdio::null()).spawn().unwrap();
    wait_until("its entering", || fenced.fence.0.processes().unwrap().contains(&late.id()));
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert_eq!(late.try_wait().unwrap(), None, "it does not run");
    assert!(fenced.elfen(&["resume"]).status.success());
    assert!(late.wait().unwrap().success());
    // Pause and resume before the daemon has seen the pause.
    assert!(fenced.elfen(&["pause"]).status.success());
    assert!(fenced.elfen(&["resume"]).status.success());
    assert!(!fenced.fence.0.freezer().is_requested().unwrap());
    end(&mut batch);
}
