//! What others do to a fence, and to its daemon, that makes no sense: it holds again, or says why
//! not.

use std::fs;

use elfen_machine::fence::status::{Answer, Request};

use super::SPIN;
use super::stage::{Fenced, NOBODY, borrows, kill, require_fences, settings, wait_until};

/// Goal: a fence whose cgroup was deleted, or has no CPUs, is a fence again, for who comes then.
/// Method: an empty one, and a hand that removes it and takes its CPUs.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_fence_that_was_deleted_is_made_anew() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_it_runs();
    let group = &fenced.fence.0;
    let holds = || {
        let on = group.effective_cpus().is_ok_and(|cpus| cpus.to_string() == "1");
        on && group.rank().is_ok_and(|rank| rank.idle)
    };
    assert!(holds());
    group.remove().unwrap();
    wait_until("another", || group.exists() && holds());
    fenced.wait_until_it_runs();
    for folder in group.folders() {
        let cpus = folder.join("cpuset.cpus");
        if cpus.exists() {
            fs::write(cpus, "\n").unwrap();
        }
    }
    wait_until("its lanes", holds);
    fenced.wait_until_it_runs();
    let mut batch = fenced.batch(&[], NOBODY, SPIN);
    borrows(batch.id());
    kill(batch.id(), libc::SIGKILL);
    batch.wait().unwrap();
}

/// Goal: a batch that the kernel has moved out of the fence, which has no CPUs any more, is back
/// there once it has. Method: a daemon that stands still while a hand does what the kernel does on
/// version 1 when a lane goes offline.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups of version 1"]
fn a_batch_that_hotplug_moves_comes_back() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_it_runs();
    let group = &fenced.fence.0;
    let mut folders = group.folders().into_iter();
    let cpuset = folders.find(|folder| folder.join("cpuset.effective_cpus").exists());
    let cpuset = cpuset.expect("needs cpusets of version 1: version 2 leaves the batch in place");
    let mut batch = fenced.batch(&[], NOBODY, SPIN);
    borrows(batch.id());
    kill(fenced.daemon.id(), libc::SIGSTOP);
    fs::write(cpuset.parent().unwrap().join("cgroup.procs"), batch.id().to_string()).unwrap();
    fs::write(cpuset.join("cpuset.cpus"), "\n").unwrap();
    assert!(group.effective_cpus().unwrap().is_empty());
    assert!(group.partly_inside().unwrap().contains(&batch.id()));
    kill(fenced.daemon.id(), libc::SIGCONT);
    wait_until("its lanes", || group.effective_cpus().unwrap().to_string() == "1");
    wait_until("being put back", || group.partly_inside().unwrap().is_empty());
    fenced.wait_until_it_runs();
    borrows(batch.id());
    kill(batch.id(), libc::SIGKILL);
    batch.wait().unwrap();
}

/// Goal: lanes of CPUs that are not there are no mistake: they may come. Method: settings that name
/// some beside the machine's own.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn lanes_that_are_absent_are_said() {
    require_fences();
    let mut fenced = Fenced::start();
    fenced.end_daemon();
    let usual = settings(fenced.heavy.name(), fenced.fence.name());
    let text = usual.replacen("lanes = \"0:1\"", "lanes = \"0:1,8000:8001\"", 1);
    fs::write(fenced.settings_file(), text).unwrap();
    let mut check = fenced.command(env!("CARGO_BIN_EXE_elfend"), &[]);
    let checked = fenced.says_in(&fenced.home, check.arg("--check"));
    assert!(checked.contains("CPUs 8000,8001 are offline"), "{checked}");
    fenced.restart();
    fenced.wait_until_it_runs();
    assert!(fenced.said().contains("CPUs 8000,8001 are offline"), "{}", fenced.said());
    let mut batch = fenced.batch(&[], NOBODY, SPIN);
    borrows(batch.id());
    kill(batch.id(), libc::SIGKILL);
    batch.wait().unwrap();
}

/// Goal: a process of another pid namespace goes into the fence as any other. Method: one that
/// knows itself by another id.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn who_has_another_id_enters() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_it_runs();
    let elfen = env!("CARGO_BIN_EXE_elfen");
    let words = ["run", "--fence", "batch", "--user", NOBODY, "--", "cat", "/proc/self/cgroup"];
    let mut unshare = fenced.command("unshare", &["--pid", "--fork", elfen]);
    let output = unshare.args(words).current_dir("/").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let why = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains(fenced.fence.name()), "{said} {why}");
}

/// Goal: a process that has no id where elfend is, gets nothing, and is told why. Method: a daemon
/// in a pid namespace of its own, which is asked from outside.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn who_has_no_id_gets_nothing() {
    require_fences();
    let mut fenced = Fenced::start();
    fenced.end_daemon();
    let daemon = fenced.daemon_command();
    let mut inside =
        fenced.command("unshare", &["--pid", "--fork", "--kill-child", "--mount-proc"]);
    inside.arg(daemon.get_program()).args(daemon.get_args());
    let log = fs::File::options().append(true).open(fenced.log_file()).unwrap();
    fenced.daemon = inside.stderr(log).spawn().unwrap();
    fenced.wait_for_socket();
    let requests = [Request::Status, Request::Resume, Request::Pages, Request::Tasks];
    let enter = Request::Enter { fence: "batch".to_owned() };
    let answers: Vec<Option<Answer>> =
        requests.iter().chain([&enter]).map(|request| fenced.ask(request)).collect();
    let output = fenced.elfen(&["run", "--fence", "batch", "--user", NOBODY, "--", "true"]);
    let inside = fenced.fence.0.processes().unwrap();
    // `unshare` takes no other signal, and has its child killed.
    fenced.daemon.kill().unwrap();
    for answer in answers {
        let Some(Answer::Refused { why, .. }) = &answer else { panic!("{answer:?}") };
        assert!(why.contains("it has no process id here"), "{why}");
    }
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("no process id"), "{said}");
    assert!(inside.is_empty(), "{inside:?}");
}

/// Goal: who asks for a fence after the daemon's end is told so. Method: a daemon that was
/// stopped, and a file in the place of its socket.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn without_a_daemon_nothing_hangs() {
    require_fences();
    let mut fenced = Fenced::start();
    fenced.wait_until_it_runs();
    fenced.end_daemon();
    for is_file in [false, true] {
        if is_file {
            fs::write(fenced.run_dir().join("elfend.sock"), "no socket").unwrap();
        }
        let output = fenced.elfen(&["run", "--fence", "batch", "--user", NOBODY, "--", "true"]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && said.contains("does not answer"), "{said}");
        assert_eq!(fenced.elfen(&["status", "--healthy"]).status.code(), Some(1));
        assert!(fenced.elfen(&["status"]).status.success());
    }
}
