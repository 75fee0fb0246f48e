//! Interference from outside with a fence or its daemon: the fence holds again, or elfend reports
//! why it does not.

use std::fs;

use elfen_machine::fence::status::{Answer, Request};

use super::SPIN;
use super::stage::{
    Fenced, NOBODY, end, kill, require_fences, settings, wait_until, wait_until_borrowing,
};

/// Goal: elfend restores a fence whose cgroup was deleted, or lost its CPUs. Method: the test
/// removes an empty fence, and clears its cpuset; then a batch runs in it.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_deleted_fence_is_restored() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_running();
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
    let mut batch = fenced.batch(&[], NOBODY, SPIN);
    wait_until_borrowing(batch.id());
    end(&mut batch);
}

/// Goal: a batch that the kernel moved out of a fence without CPUs returns once the fence has CPUs.
/// Method: while the daemon is stopped, the test does what the kernel does with cgroups version 1
/// when a lane goes offline.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups of version 1"]
fn a_batch_that_hotplug_moves_comes_back() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_running();
    let group = &fenced.fence.0;
    let mut folders = group.folders().into_iter();
    let cpuset = folders.find(|folder| folder.join("cpuset.effective_cpus").exists());
    let cpuset = cpuset.expect("needs cpusets of version 1: version 2 leaves the batch in place");
    let mut batch = fenced.batch(&[], NOBODY, SPIN);
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
    end(&mut batch);
}

/// Goal: settings may name CPUs that are absent, since they may come online later; elfend lists
/// them. Method: settings with absent CPUs and the CPUs of this machine.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn absent_lanes_are_listed() {
    require_fences();
    let mut fenced = Fenced::start();
    fenced.end_daemon();
    let usual = settings(fenced.heavy.name(), fenced.fence.name());
    let text = usual.replacen("lanes = \"0:1\"", "lanes = \"0:1,8000:8001\"", 1);
    fs::write(fenced.settings_file(), text).unwrap();
    let mut check = fenced.command(env!("CARGO_BIN_EXE_elfend"), &[]);
    let checked = fenced.output_in(&fenced.home, check.arg("check"));
    assert!(checked.contains("CPUs 8000,8001 are offline"), "{checked}");
    fenced.restart();
    fenced.wait_until_running();
    assert!(fenced.log().contains("CPUs 8000,8001 are offline"), "{}", fenced.log());
    let mut batch = fenced.batch(&[], NOBODY, SPIN);
    wait_until_borrowing(batch.id());
    end(&mut batch);
}

/// Goal: a process of an inner pid namespace enters the fence as any other. Method: `elfen run` in
/// a new pid namespace, where its id differs.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_process_of_an_inner_pid_namespace_enters() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_running();
    let elfen = env!("CARGO_BIN_EXE_elfen");
    let words = ["run", "--fence", "batch", "--user", NOBODY, "--", "cat", "/proc/self/cgroup"];
    let mut unshare = fenced.command("unshare", &["--pid", "--fork", elfen]);
    let output = unshare.args(words).current_dir("/").output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let why = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && printed.contains(fenced.fence.name()), "{printed} {why}");
}

/// Goal: a process without an id in the pid namespace of elfend is refused, with the reason.
/// Method: a daemon in a new pid namespace, and requests from outside.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_process_of_an_outer_pid_namespace_is_refused() {
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
    // `unshare` ignores other signals, and kills its child when it ends.
    fenced.daemon.kill().unwrap();
    for answer in answers {
        let Some(Answer::Refused { why, .. }) = &answer else { panic!("{answer:?}") };
        assert!(why.contains("it has no process id here"), "{why}");
    }
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && printed.contains("no process id"), "{printed}");
    assert!(inside.is_empty(), "{inside:?}");
}

/// Goal: without a daemon, commands fail at once with the reason. Method: a daemon that has ended,
/// and a file in the place of its socket.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn without_a_daemon_no_command_hangs() {
    require_fences();
    let mut fenced = Fenced::start();
    fenced.wait_until_running();
    fenced.end_daemon();
    for is_file in [false, true] {
        if is_file {
            fs::write(fenced.run_dir().join("elfend.sock"), "no socket").unwrap();
        }
        let output = fenced.elfen(&["run", "--fence", "batch", "--user", NOBODY, "--", "true"]);
        let printed = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.code() == Some(1) && printed.contains("does not answer"),
            "{printed}"
        );
        assert_eq!(fenced.elfen(&["status", "--healthy"]).status.code(), Some(1));
        assert!(fenced.elfen(&["status"]).status.success());
    }
}
