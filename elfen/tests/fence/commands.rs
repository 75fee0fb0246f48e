//! Tests of commands in unusual situations: a wrong folder, no daemon, a daemon that hangs, and
//! variables and options of other runs.

use std::fs;

use super::SPIN;
use super::stage::{
    AS_NOBODY, ELFEN, ELFEND, Fenced, NOBODY, kill, run, wait_until, wait_until_borrowing,
};

/// Goal: an error about a wrong folder or file names the path or the option that selects another.
/// Method: each command, as root.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn errors_name_a_wrong_folder() {
    let fenced = Fenced::start();
    let file = fenced.run_dir().join("file");
    fs::write(&file, "").unwrap();
    let file = file.to_str().unwrap();
    let none = fenced.run_dir().join("none");
    let none = none.to_str().unwrap();
    let at_home = format!("{} exec {ELFEND} --run-dir {file}", fenced.home.enter_script());
    let cases = [
        (&[ELFEND, "--settings", none][..], 2, "write it, or name another with --settings"),
        (&[ELFEND, "check", none], 2, "write it, or name another with --settings"),
        (&["sh", "-c", &at_home], 1, "name another folder with --run-dir"),
        (&[ELFEN, "pause", "--run-dir", file], 1, "with --run-dir"),
        (&[ELFEN, "resume", "--run-dir", file], 1, "with --run-dir"),
        (&[ELFEN, "status", "--run-dir", file], 1, file),
        (&[ELFEND, "--freeze", "--run-dir", none], 0, "no fence of"),
        (&[ELFEND, "--release", "--run-dir", none], 0, "no fence of"),
        (&[ELFEN, "status", "--healthy", "--run-dir", none], 1, "no elfend answers"),
    ];
    for (words, status, why) in cases {
        fenced.ends(words, status, why);
    }
}

const RUN_TRUE: [&str; 8] = [ELFEN, "run", "--fence", "batch", "--user", NOBODY, "--", "true"];

/// Goal: without a daemon, commands fail at once with the reason. `elfen status` lists fences that
/// elfend has left behind, whether they are frozen, and what to do. Method: a daemon that has
/// ended, a file in the place of its socket, and a fence that the test thaws.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_fence_without_a_daemon_is_listed() {
    let mut fenced = Fenced::start();
    fenced.end_daemon();
    for is_file in [false, true] {
        if is_file {
            fs::write(fenced.socket(), "no socket").unwrap();
        }
        fenced.ends(&RUN_TRUE, 1, "does not answer");
        fenced.ends(&[ELFEN, "status", "--healthy"], 1, "");
        fenced.ends(&[ELFEN, "status"], 0, "fence batch: frozen");
    }
    fs::remove_file(fenced.socket()).unwrap();
    fenced.ends(&[ELFEN, "resume"], 1, "no guards protect batch: no elfend answers");
    // The watchdog may freeze the fence once more.
    wait_until("running unguarded", || {
        fenced.fence.0.freezer().thaw().unwrap();
        fenced.prints(&[ELFEN, "status"]).contains("runs, and no elfend guards it")
    });
    let printed = fenced.prints(&[ELFEN, "status", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&printed).unwrap();
    assert_eq!(json["left"][0]["frozen"], false, "{printed}");
    fenced.prints(&[ELFEND, "--freeze"]);
    assert!(fenced.fence.0.freezer().is_requested().unwrap());
    fenced.ends(&[ELFEND, "--release"], 0, "ordinary cgroup");
    let printed = fenced.prints(&[ELFEN, "status"]);
    assert!(!printed.contains("fence"), "{printed}");
}

/// Goal: commands give up on a daemon that does not answer, and report that. Method: a stopped
/// daemon.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn commands_give_up_on_a_daemon_that_hangs() {
    let fenced = Fenced::start();
    kill(fenced.daemon.id(), libc::SIGSTOP);
    let (status, printed) = fenced.run(&[ELFEN, "status"]);
    assert!(status == Some(1) && printed.contains("it has not answered within 5 s"), "{printed}");
    assert!(printed.contains("fence batch: runs; elfend does not answer"), "{printed}");
    fenced.ends(&RUN_TRUE, 1, "it has not answered within 5 s");
    fenced.prints(&[ELFEN, "pause"]);
    fenced.ends(
        &[ELFEN, "status"],
        1,
        "fence batch: frozen; elfend does not answer, so the reason is unknown",
    );
}

/// Goal: a run without `--lanes` uses elfend's fence if its user may enter it, and is refused
/// otherwise. A run inside a fence stays there. With `--fence none` or `--lanes`, a run has guards
/// of its own. With a fence, variables of guards are ignored and options of guards are refused.
/// Method: the first lines of dry runs of users and of root.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_run_uses_the_fence_of_elfend_by_default() {
    let fenced = Fenced::start();
    let elfen = fenced.copy(ELFEN);
    let elfen = elfen.as_str();
    let in_fence = "fence batch on CPUs 1, level fence";
    let own = "level affinity";
    let plain = ["env", ELFEN];
    let by_variable = ["env", "ELFEN_LANES=0:1", "ELFEN_POLL_INTERVAL=1ms", ELFEN];
    let by_sudo = ["env", "SUDO_UID=65534", ELFEN];
    let user = ["--user", NOBODY];
    let cases: [(&[&str], &[&str], i32, &str); 8] = [
        (&plain, &user, 0, in_fence),
        (&by_sudo, &[], 0, in_fence),
        (&plain, &["--user", NOBODY, "--lanes", "0:1"], 0, own),
        (&by_variable, &["--user", NOBODY, "--fence", "batch"], 0, "level fence"),
        (&by_variable, &["--user", NOBODY, "--fence", "none"], 0, own),
        (&plain, &["--user", NOBODY, "--fence", "none", "--lanes", "0:1"], 0, own),
        (
            &by_variable,
            &["--user", NOBODY, "--fence", "batch", "--poll-interval", "1ms"],
            2,
            "'--fence' cannot be used with '--poll-interval'",
        ),
        (
            &by_variable,
            &["--user", NOBODY, "--fence", "batch", "--timer-slack", "1ms"],
            2,
            "'--fence' cannot be used with '--timer-slack'",
        ),
    ];
    for (by, options, status, why) in cases {
        let words = [by, &["run", "--dry-run"], options, &["--", "true"]].concat();
        fenced.ends(&words, status, why);
    }
    // Without lanes, a run outside of the fences would take all lanes.
    let nobody = [&["setpriv"], &AS_NOBODY[..], &[elfen, "run"]].concat();
    let refused: [(&[&str], &[&str], &str); 3] = [
        (&[ELFEN, "run"], &[], "a program that runs as root can leave its fence"),
        (&[ELFEN, "run", "--user", NOBODY], &["--poll-interval", "1ms"], "guards of its own"),
        (&nobody, &[], "its fences are for root and group elfen; join that group; or name lanes"),
    ];
    for (by, options, why) in refused {
        fenced.ends(&[by, options, &["--", "true"]].concat(), 2, why);
    }
    let script = format!(
        "{elfen} run -- sh -c 'echo it runs; grep {} /proc/self/cgroup'",
        fenced.fence.name()
    );
    let inside = fenced.prints(&[elfen, "run", "--user", NOBODY, "--", "sh", "-c", &script]);
    assert_eq!(inside.matches(in_fence).count(), 2, "{inside}");
    assert!(inside.contains("it runs") && inside.contains(fenced.fence.name()), "{inside}");
}

/// Goal: without a fence, root's program runs as the user that called `sudo`. Method: the user id
/// of the program, and the id of a user that does not exist.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_program_runs_as_the_user_that_called_sudo() {
    let fenced = Fenced::start();
    let own = [ELFEN, "run", "--lanes", "0:1", "--", "id", "-u"];
    let mut sudo = fenced.command(&own);
    let by_sudo = sudo.env("SUDO_UID", NOBODY).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&by_sudo.stdout), format!("{NOBODY}\n"), "{by_sudo:?}");
    let (status, printed) = run(sudo.env("SUDO_UID", "987654321"));
    assert!(status == Some(2) && printed.contains("or --user root"), "{printed}");
}

/// Goal: Ctrl-C ends the program, and does not change its fence. Method: a program with the default
/// action for SIGINT, even if the shell of this test ignores the signal.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn ctrl_c_ends_the_program_in_the_fence() {
    use std::os::unix::process::ExitStatusExt;
    let fenced = Fenced::start();
    let mut batch = fenced.batch(&["env", "--default-signal=INT"], NOBODY, SPIN);
    wait_until_borrowing(batch.id());
    kill(batch.id(), libc::SIGINT);
    assert_eq!(batch.wait().unwrap().signal(), Some(libc::SIGINT));
    wait_until("an empty fence", || fenced.fence().processes == 0);
    assert_eq!(fenced.fence().frozen, None);
}

/// Goal: a run at level `affinity` warns once if processes of its program no longer rank below the
/// guard, and counts them. Method: a program that puts two of its processes into another cgroup,
/// and a program that does not.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn processes_that_leave_the_rank_below_their_guard_are_reported() {
    let mut fenced = Fenced::start();
    fenced.end_daemon();
    let sibling = fenced.heavy.child("beside");
    sibling.0.make().unwrap();
    let report = fenced.run_dir().join("report");
    let report = report.to_str().unwrap();
    let run = [ELFEN, "run", "--lanes", "0:1", "--source", "service", "--service"];
    let by = [fenced.heavy.name(), "--json-out", report, "--", "sh", "-c"];
    let runs = |program: &str| {
        let printed = fenced.prints(&[&run[..], &by, &[program]].concat());
        let report: serde_json::Value =
            serde_json::from_str(&fs::read_to_string(report).unwrap()).unwrap();
        (printed.matches("has a cgroup of its own").count(), report["beside_guards"].clone())
    };
    assert_eq!(runs("sleep 3"), (0, 0.into()));
    let leaves = format!("sh -c '{} exec sleep 5' & ", sibling.enter_script());
    assert_eq!(runs(&format!("{leaves}{leaves}sleep 5; wait")), (1, 2.into()));
}
