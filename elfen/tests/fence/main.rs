//! Goal: what is in a fence stays on its lanes, below its guards, and stands still when that cannot
//! be promised; the kill switch stops it whatever else is broken. Method: the real daemon, with a
//! cgroup of the test's own, beside a service's page that the test writes; the kernel says what ran
//! where. Beside each promise stands the same without it, so that the test can fail.

#[path = "../needs/mod.rs"]
mod needs;

mod accounts;
mod container;
mod container_checks;
mod crowd;
mod elfend_unit;
mod hostile;
mod interference;
mod kubernetes;
mod members;
mod messages;
mod pages;
#[path = "../preload/mod.rs"]
mod preload;
mod refused;
mod requests;
mod restarts;
mod scribble;
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

use stage::{Fenced, NOBODY, borrows, comm, kill, ran_ns, require_fences, share, wait_until};

/// For ever, without a system call.
pub(crate) const SPIN: &str = "while :; do :; done";

/// Goal: a held lane is its guard's. Method: what guard and batch get of it, by the scheduler's
/// account; and what the same program gets in a cgroup of its own, outside of the fence.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_batch_gets_next_to_nothing_of_a_lane_that_its_guard_holds() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_it_runs();
    let mut worker = fenced.service().claim(0, 0).unwrap();
    let mut batch = fenced.batch(&["nice", "-n", "-20"], NOBODY, SPIN);
    borrows(batch.id());
    worker.begin(1);
    wait_until("a guard", || fenced.guard().is_some());
    let mut inside: [u64; 3] = [0; 3].map(|_| share(batch.id(), fenced.guard().unwrap()));
    inside.sort_unstable();
    let [_, inside, _] = inside;
    println!("a batch at nice -20 in the fence: {inside} per mille of the held lane");

    let own = fenced.heavy.child("beside");
    own.0.make().unwrap();
    let script = format!("{} exec nice -n -20 taskset -c 1 sh -c '{SPIN}'", own.enter_script());
    let mut beside = Command::new("sh").args(["-c", &script]).stdin(Stdio::null()).spawn().unwrap();
    wait_until("its start", || comm(beside.id()) == "sh" && ran_ns(beside.id()) > 10_000_000);
    // A group that has just begun waits for its first turn for up to seconds.
    let mut outside = 0;
    wait_until("a share of its own", || {
        outside = share(beside.id(), fenced.guard().unwrap());
        outside >= 100
    });
    println!("the same in a cgroup of its own: {outside} per mille");
    worker.end();
    let before = ran_ns(batch.id());
    kill(beside.id(), libc::SIGKILL);
    beside.wait().unwrap();
    wait_until("borrowing again", || ran_ns(batch.id()) > before + 2_000_000);
    kill(batch.id(), libc::SIGKILL);
    batch.wait().unwrap();
    assert!(inside <= 20, "{inside}");
}

/// Goal: guards rest where there is nobody to guard against. Method: an empty fence beside a
/// request.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn guards_rest_while_the_fence_is_empty() {
    require_fences();
    let fenced = Fenced::start();
    let mut worker = fenced.service().claim(0, 0).unwrap();
    worker.begin(1);
    fenced.wait_until_it_runs();
    assert_eq!(fenced.guard(), None);
    let mut batch = fenced.batch(&[], NOBODY, "exec sleep 600");
    wait_until("a guard", || fenced.guard().is_some());
    kill(batch.id(), libc::SIGKILL);
    batch.wait().unwrap();
    wait_until("rest", || fenced.guard().is_none());
}

/// Goal: what others set is set again, and counted. Method: a hand that writes the fence's files.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn what_others_change_is_repaired_and_counted() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_it_runs();
    let group = &fenced.fence.0;
    assert_eq!(fenced.fence().repaired, []);
    let times = |promise| {
        let repaired = fenced.fence().repaired;
        repaired.iter().find(|one| one.guarantee == promise).map_or(0, |one| one.times)
    };
    group.set_idle(false).unwrap();
    wait_until("an idle cgroup again", || group.rank().unwrap().idle);
    wait_until("counting it", || times(Guarantee::Rank) == 1);
    group.keep_to_parent().unwrap();
    wait_until("its lanes again", || group.effective_cpus().unwrap().to_string() == "1");
    wait_until("counting it", || times(Guarantee::Place) == 1);
    assert_eq!(fenced.fence().frozen, None);
    let says = |line: &str| {
        let text = String::from_utf8(fenced.elfen(&["metrics", "--once"]).stdout).unwrap();
        assert!(text.lines().any(|has| has == line), "{line}: {text}");
    };
    says("elfen_elfend_up 1");
    says("elfen_fence_repaired_total{fence=\"batch\",promise=\"rank\"} 1");
    says("elfen_fence_holds{fence=\"batch\",promise=\"place\"} 1");
    says("elfen_fence_frozen{fence=\"batch\",why=\"paused\"} 0");
    assert!(fenced.elfen(&["pause"]).status.success());
    wait_until("knowing it", || fenced.fence().frozen.is_some());
    says("elfen_fence_frozen{fence=\"batch\",why=\"paused\"} 1");
    assert!(fenced.elfen(&["resume"]).status.success());
    let json = String::from_utf8(fenced.elfen(&["status", "--json"]).stdout).unwrap();
    let fence = r#""name":"batch""#;
    assert!(json.replace(": ", ":").contains(fence), "{json}");
}

/// Goal: a guard that the fence outweighs guards nothing, and says so. Method: a daemon in a cgroup
/// of little weight.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_guard_of_little_weight_is_no_guard() {
    require_fences();
    let fenced = Fenced::start_with_weight(1);
    let light = &fenced.home;
    assert!(light.0.rank().unwrap().weight < 30);
    wait_until("finding it", || fenced.fence().frozen == Some(Frozen::Broken));
    let why = fenced.fence().why().unwrap();
    assert!(why.contains("has weight"), "{why}");
    assert!(fenced.fence.0.freezer().is_requested().unwrap());
    light.set_weight(100);
    assert_eq!(light.0.rank().unwrap(), Rank { idle: false, weight: 100 });
    fenced.wait_until_it_runs();
}

/// Goal: pausing stops what runs and what comes, whether the daemon runs or not; resuming lets both
/// go. Method: batches before and after, and a daemon that is stopped.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn the_kill_switch_works_with_the_daemon_stopped() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_it_runs();
    let file = fenced.run_dir().join("came");
    let mut batch = fenced.batch(&[], NOBODY, SPIN);
    for stopped in [false, true] {
        borrows(batch.id());
        if stopped {
            kill(fenced.daemon.id(), libc::SIGSTOP);
        }
        let paused = fenced.elfen(&["pause", "--why", "a test"]);
        assert!(paused.status.success(), "{paused:?}");
        assert!(fenced.fence.0.freezer().is_frozen().unwrap());
        // The scheduler writes down what a task ran when the next one has its CPU.
        std::thread::sleep(std::time::Duration::from_millis(100));
        let stands = ran_ns(batch.id());
        let script = format!("{} echo >\"$0\"", fenced.fence.enter_script());
        let mut late = Command::new("sh").arg("-c").arg(script).arg(&file).spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(300));
        assert_eq!(ran_ns(batch.id()), stands, "it stands");
        assert!(!file.exists(), "what comes later stands as well");
        if stopped {
            kill(fenced.daemon.id(), libc::SIGCONT);
        }
        wait_until("knowing why", || fenced.status().paused.as_deref() == Some("a test"));
        let resumed = fenced.elfen(&["resume"]);
        assert!(resumed.status.success(), "{resumed:?}");
        late.wait().unwrap();
        assert!(file.exists());
        fs::remove_file(&file).unwrap();
    }
    // A program that is to go into the fence then waits in it.
    assert!(fenced.elfen(&["pause"]).status.success());
    let words = ["run", "--fence", "batch", "--user", NOBODY, "--", "true"];
    let mut late = fenced.command(env!("CARGO_BIN_EXE_elfen"), &words);
    let mut late = late.stderr(Stdio::null()).spawn().unwrap();
    wait_until("its entering", || fenced.fence.0.processes().unwrap().contains(&late.id()));
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert_eq!(late.try_wait().unwrap(), None, "it does not run");
    assert!(fenced.elfen(&["resume"]).status.success());
    assert!(late.wait().unwrap().success());
    // Both before the daemon has seen either.
    assert!(fenced.elfen(&["pause"]).status.success());
    assert!(fenced.elfen(&["resume"]).status.success());
    assert!(!fenced.fence.0.freezer().is_requested().unwrap());
    kill(batch.id(), libc::SIGKILL);
    batch.wait().unwrap();
}
