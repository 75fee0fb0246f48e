//! Tests in which elfend's processes die, stop and restart.

use std::thread::sleep;
use std::time::{Duration, Instant};

use elfen_machine::fence::status::Frozen;

use super::SPIN;
use super::pages::Checked;
use super::process::PATIENCE;
use super::stage::{ELFEN, ELFEND, Fenced, NOBODY, kill, ran_ns, wait_until, wait_until_borrowing};

/// Goal: a batch without guards is frozen, and continues with new guards. Method: kill the guard
/// process several times.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn guards_that_are_killed_are_replaced() {
    let fenced = Fenced::start();
    let batch = fenced.batch(&[], NOBODY, SPIN);
    let freezer = fenced.fence.0.freezer();
    for round in 1..=3 {
        wait_until_borrowing(batch.id());
        let keeper = fenced.status().guard_process.unwrap();
        kill(keeper, libc::SIGKILL);
        // New guards thaw the fence, so this loop does not sleep between its polls.
        let since = Instant::now();
        while !freezer.is_requested().unwrap() {
            assert!(since.elapsed() < PATIENCE, "{}", fenced.log());
        }
        wait_until("new guards", || {
            let status = fenced.status();
            let runs = status.fences.iter().all(|fence| fence.frozen.is_none());
            status.guard_processes_lost == round
                && runs
                && status.guard_process.is_some_and(|new| new != keeper)
        });
    }
    assert_eq!(fenced.log().matches("no guards run on its lanes").count(), 3);
    let _worker = fenced.begin_request();
    wait_until("guards that hold", || {
        let before = fenced.guard().map(ran_ns);
        sleep(Duration::from_millis(50));
        before.is_some_and(|before| fenced.guard().is_some_and(|new| ran_ns(new) > before))
    });
}

/// Goal: elfend notices guards that hang. Their fence is frozen until they continue, or until
/// elfend has replaced them. Method: stop the guard process, and continue it or not.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn guards_that_hang_freeze_their_fence() {
    let fenced = Fenced::start();
    let batch = fenced.batch(&[], NOBODY, SPIN);
    wait_until_borrowing(batch.id());
    let first = fenced.status().guard_process.unwrap();
    let stop = |keeper| {
        kill(keeper, libc::SIGSTOP);
        wait_until("being frozen", || fenced.fence().frozen == Some(Frozen::Hung));
        assert!(fenced.fence.0.freezer().is_requested().unwrap());
    };
    stop(first);
    assert!(fenced.fence().why().unwrap().contains("has been stuck"));
    kill(first, libc::SIGCONT);
    fenced.wait_until_running();
    wait_until_borrowing(batch.id());
    // On a slow machine, elfend may have replaced the first process already.
    let status = fenced.status();
    let (second, lost) = (status.guard_process.unwrap(), status.guard_processes_lost);
    assert_eq!(second == first, lost == 0);
    stop(second);
    wait_until("a new process", || {
        let status = fenced.status();
        status.guard_processes_lost == lost + 1
            && status.guard_process.is_some_and(|new| new != second)
    });
    fenced.wait_until_running();
    wait_until_borrowing(batch.id());
}

/// Goal: a fence is frozen while its guard may not run on its lane, or while the guard thread makes
/// no progress. Method: a cpuset that takes the lane from elfend's cgroup, and a tracer that stops
/// only the thread.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn guards_that_cannot_run_freeze_their_fence() {
    let fenced = Fenced::start();
    let batch = fenced.batch(&[], NOBODY, SPIN);
    wait_until_borrowing(batch.id());
    let wait_until_unguarded = || {
        wait_until("the freeze", || fenced.fence().frozen == Some(Frozen::Unguarded));
        assert!(fenced.fence.0.freezer().is_requested().unwrap());
    };
    fenced.home.0.keep_to(&"0".parse().unwrap()).unwrap();
    wait_until_unguarded();
    let printed = fenced.log();
    assert!(printed.contains("CPU 1: its guard does not run there"), "{printed}");
    fenced.home.0.keep_to_parent().unwrap();
    fenced.wait_until_running();
    wait_until_borrowing(batch.id());

    let guard = fenced.guard().unwrap().cast_signed();
    let trace = |request| {
        let nothing = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: these ptrace requests pass no pointers.
        assert_eq!(unsafe { libc::ptrace(request, guard, nothing, nothing) }, 0);
    };
    trace(libc::PTRACE_SEIZE);
    trace(libc::PTRACE_INTERRUPT);
    // SAFETY: waits for a thread that this thread traces. A null status is not written.
    let stopped = unsafe { libc::waitpid(guard, std::ptr::null_mut(), libc::__WALL) };
    assert_eq!(stopped, guard);
    wait_until_unguarded();
    trace(libc::PTRACE_DETACH);
    fenced.wait_until_running();
    wait_until_borrowing(batch.id());
    assert_eq!(fenced.status().guard_processes_lost, 0, "{}", fenced.log());
}

/// Goal: a daemon that was stopped itself does not conclude that its guards hang. Method: stop the
/// daemon for longer than guards may hang.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_daemon_that_was_stopped_freezes_nothing() {
    let fenced = Fenced::start();
    kill(fenced.daemon.id(), libc::SIGSTOP);
    sleep(Duration::from_secs(4));
    kill(fenced.daemon.id(), libc::SIGCONT);
    assert_eq!(fenced.fence().frozen, None);
    assert_eq!(fenced.status().guard_processes_lost, 0);
    assert!(!fenced.log().contains("has been stuck"), "{}", fenced.log());
}

/// Goal: a killed daemon leaves its fence frozen, and the next daemon thaws it with the same batch.
/// Method: SIGKILL, and a new daemon; then a regular stop, and `--release`.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_batch_survives_the_daemon() {
    let mut fenced = Fenced::start();
    let mut batch = fenced.batch(&[], NOBODY, SPIN);
    wait_until_borrowing(batch.id());
    let freezer = fenced.fence.0.freezer();
    fenced.daemon.kill().unwrap();
    fenced.daemon.wait().unwrap();
    wait_until("the freeze by the guard process", || freezer.is_frozen().unwrap());
    fenced.restart();
    fenced.wait_until_running();
    wait_until_borrowing(batch.id());
    assert_eq!(batch.try_wait().unwrap(), None, "the batch has ended");

    // A regular stop also freezes the fence. Without a daemon, --release thaws it.
    fenced.end_daemon();
    wait_until("the freeze", || freezer.is_frozen().unwrap());
    fenced.ends(&[ELFEN, "resume"], 1, "no guards protect");
    assert!(freezer.is_frozen().unwrap());
    fenced.prints(&[ELFEND, "--release"]);
    wait_until_borrowing(batch.id());
    let group = &fenced.fence.0;
    assert!(!group.rank().unwrap().idle);
    assert_eq!(group.effective_cpus().unwrap(), group.parent().effective_cpus().unwrap());
}

/// Goal: a pause lasts after the daemon's end, and a new daemon does not thaw the fence. Method: a
/// pause without a daemon, and then a start.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_new_daemon_keeps_a_pause() {
    let mut fenced = Fenced::start();
    fenced.end_daemon();
    fenced.prints(&[ELFEN, "pause", "--why", "until Monday"]);
    fenced.prints(&[ELFEN, "pause", "--keep-why"]);
    fenced.restart();
    wait_until("the pause", || {
        fenced.fence().frozen == Some(Frozen::Paused("until Monday".to_owned()))
    });
    assert!(fenced.fence.0.freezer().is_requested().unwrap());
    fenced.ends(&[ELFEN, "status", "--healthy"], 1, "until Monday");
    fenced.prints(&[ELFEN, "resume"]);
    fenced.prints(&[ELFEN, "status", "--healthy"]);
}

/// Goal: the batch does not run while the kernel reports its fence as frozen, on a free lane and on
/// an occupied one. Without systemd, this also holds after daemon and guards were killed together.
/// Method: the time that the batch writes. SIGKILL in either order, at once and up to 50 ms apart,
/// and while both are stopped.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_fence_stops_by_its_freezer_and_by_the_death_of_both() {
    let program = Checked::build();
    let mut fenced = Fenced::start();
    let freezer = fenced.fence.0.freezer();
    let mut batch = program.start_without_checks(&fenced);
    for round in 0..20 {
        program.wait_for_progress();
        let _worker = (round % 2 == 0).then(|| fenced.begin_request());
        freezer.freeze().unwrap();
        program.wait_until_stopped(&fenced);
        freezer.thaw().unwrap();
    }
    for round in 0..6 {
        fenced.wait_until_running();
        program.wait_for_progress();
        let (daemon, keeper) = (fenced.daemon.id(), fenced.status().guard_process.unwrap());
        let order = if round % 2 == 0 { [daemon, keeper] } else { [keeper, daemon] };
        if round % 3 == 2 {
            order.iter().for_each(|&process| kill(process, libc::SIGSTOP));
        }
        kill(order[0], libc::SIGKILL);
        sleep(Duration::from_millis(round % 3 * 25));
        kill(order[1], libc::SIGKILL);
        fenced.daemon.wait().unwrap();
        program.wait_until_stopped(&fenced);
        assert_eq!(batch.try_wait().unwrap(), None, "the batch has ended");
        fenced.restart();
    }
}
