//! What commands print with a wrong folder, without a daemon, with a daemon that hangs, and with
//! variables for other runs.

use std::fs;

use super::SPIN;
use super::stage::{Fenced, NOBODY, kill, require_fences, run, wait_until, wait_until_borrowing};

/// Runs a command. Returns its exit status, and its output followed by its errors.
fn run_words(fenced: &Fenced, words: &[&str]) -> (Option<i32>, String) {
    run(&mut fenced.command(words[0], &words[1..]))
}

const ELFEN: &str = env!("CARGO_BIN_EXE_elfen");
const ELFEND: &str = env!("CARGO_BIN_EXE_elfend");

/// Goal: an error about a wrong folder or file names the path, or the option for another. Method:
/// each command, as root.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn errors_name_a_wrong_folder() {
    require_fences();
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
        let (found, printed) = run_words(&fenced, words);
        assert!(found == Some(status) && printed.contains(why), "{words:?}: {found:?} {printed}");
    }
}

/// Goal: `elfen status` lists fences that elfend has left behind: whether they are frozen, and what
/// to do. Method: a daemon that has ended, and a fence that the test thaws.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_fence_without_a_daemon_is_listed() {
    require_fences();
    let mut fenced = Fenced::start();
    fenced.wait_until_running();
    fenced.end_daemon();
    let (status, printed) = run_words(&fenced, &[ELFEN, "status"]);
    assert!(status == Some(0) && printed.contains("fence batch: frozen"), "{printed}");
    let (status, printed) = run_words(&fenced, &[ELFEN, "resume"]);
    assert!(
        status == Some(1) && printed.contains("no guards hold batch: no elfend answers"),
        "{printed}"
    );
    // The watchdog may freeze it once more.
    wait_until("running unguarded", || {
        fenced.fence.0.freezer().thaw().unwrap();
        run_words(&fenced, &[ELFEN, "status"]).1.contains("runs, and no elfend guards it")
    });
    let (_, printed) = run_words(&fenced, &[ELFEN, "status", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&printed).unwrap();
    assert_eq!(json["left"][0]["frozen"], false, "{printed}");
    let (status, _) = run_words(&fenced, &[ELFEND, "--freeze"]);
    assert_eq!(status, Some(0));
    assert!(fenced.fence.0.freezer().is_requested().unwrap());
    let (status, printed) = run_words(&fenced, &[ELFEND, "--release"]);
    assert!(status == Some(0) && printed.contains("ordinary cgroup"), "{printed}");
    let (_, printed) = run_words(&fenced, &[ELFEN, "status"]);
    assert!(!printed.contains("fence"), "{printed}");
}

/// Goal: commands give up on a daemon that does not answer, and say so. Method: a stopped daemon.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn commands_give_up_on_a_daemon_that_hangs() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_running();
    kill(fenced.daemon.id(), libc::SIGSTOP);
    let run = [ELFEN, "run", "--fence", "batch", "--user", NOBODY, "--", "true"];
    for words in [&[ELFEN, "status"][..], &run] {
        let (status, printed) = run_words(&fenced, words);
        let why = "it has not answered within 5 s";
        assert!(status == Some(1) && printed.contains(why), "{words:?}: {printed}");
    }
    let (_, printed) = run_words(&fenced, &[ELFEN, "status"]);
    assert!(printed.contains("fence batch: runs; elfend does not say"), "{printed}");
    let (status, printed) = run_words(&fenced, &[ELFEN, "pause"]);
    assert_eq!(status, Some(0), "{printed}");
    let (_, printed) = run_words(&fenced, &[ELFEN, "status"]);
    assert!(printed.contains("fence batch: frozen; elfend does not say why"), "{printed}");
}

/// Goal: with `--fence`, variables of guards are ignored and options of guards are refused; with
/// `--fence none`, both apply. Method: the variable of lanes, and the option.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn variables_of_guards_are_ignored_in_a_fence() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_running();
    let by_variable = ["env", "ELFEN_LANES=0:1", "ELFEN_POLL_INTERVAL=1ms", ELFEN];
    let dry = ["run", "--dry-run", "--user", NOBODY];
    let dry_run = |by: &[&str], more: &[&str]| {
        run_words(&fenced, &[by, &dry, more, &["--", "true"]].concat())
    };
    let (status, printed) = dry_run(&by_variable, &["--fence", "batch"]);
    assert!(status == Some(0) && printed.contains("level fence"), "{printed}");
    let (status, printed) = dry_run(&by_variable, &["--fence", "none"]);
    assert!(status == Some(0) && printed.contains("level affinity"), "{printed}");
    let (status, printed) = dry_run(&[ELFEN], &["--fence", "none", "--lanes", "0:1"]);
    assert!(status == Some(0) && printed.contains("level affinity"), "{printed}");
    for option in ["--poll-interval", "--timer-slack"] {
        let (status, printed) = dry_run(&by_variable, &["--fence", "batch", option, "1ms"]);
        let why = format!("'--fence' cannot be used with '{option}'");
        assert!(status == Some(2) && printed.contains(&why), "{printed}");
    }
}

/// Goal: Ctrl-C ends the program, and leaves its fence as it was. Method: a program with the
/// default action for SIGINT, also if the shell that runs this test ignores the signal.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn ctrl_c_ends_the_program_in_the_fence() {
    use std::os::unix::process::ExitStatusExt;
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_running();
    let mut batch = fenced.batch(&["env", "--default-signal=INT"], NOBODY, SPIN);
    wait_until_borrowing(batch.id());
    kill(batch.id(), libc::SIGINT);
    assert_eq!(batch.wait().unwrap().signal(), Some(libc::SIGINT));
    wait_until("an empty fence", || fenced.fence().processes == 0);
    assert_eq!(fenced.fence().frozen, None);
}

/// Goal: a run at level `affinity` warns once if processes of its program leave the rank below the
/// guard, and counts them. Method: a program that puts two of its processes into another cgroup,
/// and one that does not.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn processes_that_leave_the_rank_below_their_guard_are_reported() {
    require_fences();
    let mut fenced = Fenced::start();
    fenced.end_daemon();
    let sibling = fenced.heavy.child("beside");
    sibling.0.make().unwrap();
    let report = fenced.run_dir().join("report");
    let report = report.to_str().unwrap();
    let run = [ELFEN, "run", "--lanes", "0:1", "--source", "service", "--service"];
    let by = [fenced.heavy.name(), "--json-out", report, "--", "sh", "-c"];
    let runs = |program: &str| {
        let (status, printed) = run_words(&fenced, &[&run[..], &by, &[program]].concat());
        assert_eq!(status, Some(0), "{printed}");
        let report: serde_json::Value =
            serde_json::from_str(&fs::read_to_string(report).unwrap()).unwrap();
        (printed.matches("has a cgroup of its own").count(), report["beside_guards"].clone())
    };
    assert_eq!(runs("sleep 3"), (0, 0.into()));
    let leaves = format!("sh -c '{} exec sleep 5' & ", sibling.enter_script());
    assert_eq!(runs(&format!("{leaves}{leaves}sleep 5; wait")), (1, 2.into()));
}
