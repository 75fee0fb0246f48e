//! Deaths of the daemon's processes, its stop and its start.

use elfen_machine::fence::status::Frozen;

use super::SPIN;
use super::stage::{Fenced, NOBODY, borrows, kill, ran_ns, require_fences, wait_until};

/// Goal: a batch without guards stands still, and goes on when there are new ones. Method: the
/// process that holds them is killed, again and again.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn guards_that_are_killed_are_replaced() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_it_runs();
    let mut batch = fenced.batch(&[], NOBODY, SPIN);
    for round in 1..=3 {
        borrows(batch.id());
        let keeper = fenced.status().keeper.unwrap();
        kill(keeper, libc::SIGKILL);
        wait_until("new guards", || {
            let status = fenced.status();
            let runs = status.fences.iter().all(|fence| fence.frozen.is_none());
            status.keepers_lost == round && runs && status.keeper.is_some_and(|new| new != keeper)
        });
    }
    assert_eq!(fenced.said().matches("no guards run on its lanes").count(), 3);
    let mut worker = fenced.service().claim(0, 0).unwrap();
    worker.begin(1);
    wait_until("guards that hold", || {
        let before = fenced.guard().map(ran_ns);
        std::thread::sleep(std::time::Duration::from_millis(50));
        before.is_some_and(|before| fenced.guard().is_some_and(|new| ran_ns(new) > before))
    });
    kill(batch.id(), libc::SIGKILL);
    batch.wait().unwrap();
}

/// Goal: guards that do not move are noticed: their fence stands still, and runs again when they
/// do, or when there are others. Method: the process that holds them is stopped, and either goes on
/// or not.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn guards_that_hang_are_noticed() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_it_runs();
    let mut batch = fenced.batch(&[], NOBODY, SPIN);
    borrows(batch.id());
    let first = fenced.status().keeper.unwrap();
    let stop = |keeper| {
        kill(keeper, libc::SIGSTOP);
        wait_until("being frozen", || fenced.fence().frozen == Some(Frozen::Hung));
        assert!(fenced.fence.0.freezer().is_requested().unwrap());
    };
    stop(first);
    assert!(fenced.fence().why().unwrap().contains("has not moved"));
    kill(first, libc::SIGCONT);
    fenced.wait_until_it_runs();
    borrows(batch.id());
    // A machine may have been so slow that the first was given up meanwhile.
    let status = fenced.status();
    let (second, lost) = (status.keeper.unwrap(), status.keepers_lost);
    assert_eq!(second == first, lost == 0);
    stop(second);
    wait_until("another", || {
        let status = fenced.status();
        status.keepers_lost == lost + 1 && status.keeper.is_some_and(|new| new != second)
    });
    fenced.wait_until_it_runs();
    borrows(batch.id());
    kill(batch.id(), libc::SIGKILL);
    batch.wait().unwrap();
}

/// Goal: a guard that may not stand on its lane, or whose thread does not get on, guards nothing:
/// its fence stands still until it does. Method: a cpuset that takes the lane from elfend's cgroup,
/// and a tracer that holds the thread alone.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn guards_that_do_not_stand_are_missed() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_it_runs();
    let mut batch = fenced.batch(&[], NOBODY, SPIN);
    borrows(batch.id());
    let is_missed = || {
        wait_until("missing it", || fenced.fence().frozen == Some(Frozen::Unguarded));
        assert!(fenced.fence.0.freezer().is_requested().unwrap());
    };
    fenced.home.0.keep_to(&"0".parse().unwrap()).unwrap();
    is_missed();
    let said = fenced.said();
    assert!(said.contains("CPU 1: its guard does not run there"), "{said}");
    fenced.home.0.keep_to_parent().unwrap();
    fenced.wait_until_it_runs();
    borrows(batch.id());

    let guard = fenced.guard().unwrap().cast_signed();
    let trace = |request| {
        let nothing = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: these requests take no memory.
        assert_eq!(unsafe { libc::ptrace(request, guard, nothing, nothing) }, 0);
    };
    trace(libc::PTRACE_SEIZE);
    trace(libc::PTRACE_INTERRUPT);
    // SAFETY: waits for a thread that this one traces, and writes nothing.
    let stopped = unsafe { libc::waitpid(guard, std::ptr::null_mut(), libc::__WALL) };
    assert_eq!(stopped, guard);
    is_missed();
    trace(libc::PTRACE_DETACH);
    fenced.wait_until_it_runs();
    borrows(batch.id());
    assert_eq!(fenced.status().keepers_lost, 0, "{}", fenced.said());
    kill(batch.id(), libc::SIGKILL);
    batch.wait().unwrap();
}

/// Goal: a daemon that was stopped itself blames nobody. Method: stopped for longer than its
/// patience.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_daemon_that_was_stopped_freezes_nothing() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_it_runs();
    kill(fenced.daemon.id(), libc::SIGSTOP);
    std::thread::sleep(std::time::Duration::from_secs(4));
    kill(fenced.daemon.id(), libc::SIGCONT);
    assert_eq!(fenced.fence().frozen, None);
    assert_eq!(fenced.status().keepers_lost, 0);
    assert!(!fenced.said().contains("has not moved"), "{}", fenced.said());
}

/// Goal: a daemon that is killed leaves a fence that stands still, and the next one finds its batch
/// where it was. Method: SIGKILL, and a new daemon.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_batch_survives_the_daemon() {
    require_fences();
    let mut fenced = Fenced::start();
    fenced.wait_until_it_runs();
    let mut batch = fenced.batch(&[], NOBODY, SPIN);
    borrows(batch.id());
    let freezer = fenced.fence.0.freezer();
    fenced.daemon.kill().unwrap();
    fenced.daemon.wait().unwrap();
    wait_until("being frozen by the keeper", || freezer.is_frozen().unwrap());
    let stands = ran_ns(batch.id());
    fenced.restart();
    fenced.wait_until_it_runs();
    wait_until("going on", || {
        assert_eq!(batch.try_wait().unwrap(), None, "the batch has ended");
        ran_ns(batch.id()) > stands + 2_000_000
    });

    // In order, it is the same; and what nobody holds any more can be let go.
    fenced.end_daemon();
    wait_until("standing still", || freezer.is_frozen().unwrap());
    let resumed = fenced.elfen(&["resume"]);
    let said = String::from_utf8_lossy(&resumed.stderr);
    assert!(resumed.status.code() == Some(1) && said.contains("no guards hold"), "{said}");
    assert!(freezer.is_frozen().unwrap());
    let released = fenced.command(env!("CARGO_BIN_EXE_elfend"), &["--release"]).output().unwrap();
    assert!(released.status.success(), "{released:?}");
    let stands = ran_ns(batch.id());
    wait_until("running unguarded", || ran_ns(batch.id()) > stands + 2_000_000);
    let group = &fenced.fence.0;
    assert!(!group.rank().unwrap().idle);
    assert_eq!(group.effective_cpus().unwrap(), group.parent().effective_cpus().unwrap());
    kill(batch.id(), libc::SIGKILL);
    batch.wait().unwrap();
}

/// Goal: a pause outlives the daemon, and a fence is not thawed by a start. Method: pause without a
/// daemon, and start one.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_new_daemon_keeps_a_pause() {
    require_fences();
    let mut fenced = Fenced::start();
    fenced.wait_until_it_runs();
    fenced.end_daemon();
    assert!(fenced.elfen(&["pause", "--why", "until Monday"]).status.success());
    assert!(fenced.elfen(&["pause", "--keep-why"]).status.success());
    fenced.restart();
    wait_until("finding it", || {
        fenced.fence().frozen == Some(Frozen::Paused("until Monday".to_owned()))
    });
    assert!(fenced.fence.0.freezer().is_requested().unwrap());
    let status = fenced.elfen(&["status", "--healthy"]);
    assert_eq!(status.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&status.stdout).contains("until Monday"));
    assert!(fenced.elfen(&["resume"]).status.success());
    assert!(fenced.elfen(&["status", "--healthy"]).status.success());
}
