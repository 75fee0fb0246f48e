//! Tests of interference with a fence or its daemon from outside: elfend restores the fence, or
//! reports why it cannot.

use std::fs;

use elfen_machine::fence::status::{Answer, Request};

use super::SPIN;
use super::stage::{ELFEN, Fenced, NOBODY, kill, wait_until, wait_until_borrowing};

/// Goal: elfend restores a fence whose cgroup was deleted or lost its CPUs. Method: the test
/// removes an empty fence, and clears its cpuset. Then a batch runs in it.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_deleted_fence_is_restored() {
    let fenced = Fenced::start();
    let group = &fenced.fence.0;
    let holds = || {
        let on = group.effective_cpus().is_ok_and(|cpus| cpus.to_string() == "1");
        on && group.rank().is_ok_and(|rank| rank.idle)
    };
    assert!(holds());
    group.remove().unwrap();
    wait_until("a new cgroup", || group.exists() && holds());
    fenced.wait_until_running();
    for folder in group.folders() {
        let cpus = folder.join("cpuset.cpus");
        if cpus.exists() {
            fs::write(cpus, "\n").unwrap();
        }
    }
    wait_until("its lanes", holds);
    fenced.wait_until_running();
    let batch = fenced.batch(&[], NOBODY, SPIN);
    wait_until_borrowing(batch.id());
}

/// Goal: if the kernel moves a batch out of a fence without CPUs, the batch returns when the fence
/// has CPUs again. Method: while the daemon is stopped, the test makes the same changes as the
/// kernel when a lane goes offline under cgroups version 1.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups of version 1"]
fn a_batch_that_hotplug_moves_comes_back() {
    let fenced = Fenced::start();
    let group = &fenced.fence.0;
    let mut folders = group.folders().into_iter();
    let cpuset = folders.find(|folder| folder.join("cpuset.effective_cpus").exists());
    let cpuset = cpuset.expect("needs cpusets of version 1: version 2 leaves the batch in place");
    let batch = fenced.batch(&[], NOBODY, SPIN);
    wait_until_borrowing(batch.id());
    kill(fenced.daemon.id(), libc::SIGSTOP);
    fs::write(cpuset.parent().unwrap().join("cgroup.procs"), batch.id().to_string()).unwrap();
    fs::write(cpuset.join("cpuset.cpus"), "\n").unwrap();
    assert!(group.effective_cpus().unwrap().is_empty());
    assert!(group.partly_inside().unwrap().contains(&batch.id()));
    kill(fenced.daemon.id(), libc::SIGCONT);
    wait_until("its lanes", || group.effective_cpus().unwrap().to_string() == "1");
    wait_until("being put back", || group.partly_inside().unwrap().is_empty());
    fenced.wait_until_running();
    wait_until_borrowing(batch.id());
}

/// Goal: settings may name absent CPUs, because they may come online later; elfend lists them.
/// Method: settings with absent CPUs and the CPUs of this machine.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn absent_lanes_are_listed() {
    let mut fenced = Fenced::start();
    fenced.end_daemon();
    let text = fenced.settings().replacen("lanes = \"0:1\"", "lanes = \"0:1,8000:8001\"", 1);
    fs::write(fenced.settings_file(), text).unwrap();
    let checked = fenced.check();
    assert!(checked.contains("CPUs 8000,8001 are offline"), "{checked}");
    fenced.restart();
    fenced.wait_until_running();
    assert!(fenced.log().contains("CPUs 8000,8001 are offline"), "{}", fenced.log());
    let batch = fenced.batch(&[], NOBODY, SPIN);
    wait_until_borrowing(batch.id());
}

/// Goal: a process of an inner pid namespace enters the fence like any other. A process without an
/// id in elfend's pid namespace is refused, with the reason. Method: `elfen run` in a new pid
/// namespace, where its id differs. Then a daemon in a new pid namespace, and requests from
/// outside.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn processes_of_other_pid_namespaces_enter_if_elfend_sees_them() {
    let mut fenced = Fenced::start();
    let run =
        [ELFEN, "run", "--fence", "batch", "--user", NOBODY, "--", "cat", "/proc/self/cgroup"];
    let inner = [&["unshare", "--pid", "--fork"], &run[..]].concat();
    fenced.ends(&inner, 0, fenced.fence.name());

    fenced.end_daemon();
    fenced.restart_by(&["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    let enter = Request::Enter { fence: "batch".to_owned() };
    let requests = [Request::Status, Request::Resume, Request::Pages, Request::Tasks, enter];
    let answers = requests.map(|request| fenced.ask(&request));
    let (status, printed) = fenced.run(&run);
    let inside = fenced.fence.0.processes().unwrap();
    // `unshare` ignores other signals, and kills its child when it ends.
    fenced.daemon.kill().unwrap();
    for answer in answers {
        let Some(Answer::Refused { why, .. }) = &answer else { panic!("{answer:?}") };
        assert!(why.contains("it has no process id here"), "{why}");
    }
    assert!(status == Some(1) && printed.contains("no process id"), "{printed}");
    assert!(inside.is_empty(), "{inside:?}");
}
