//! What an operator is told who has the wrong folder, no daemon any more, one that hangs, or
//! variables for other runs.

use std::fs;

use super::SPIN;
use super::stage::{Fenced, NOBODY, borrows, kill, require_fences, wait_until};

/// What a command ends with, and all that it says.
fn told(fenced: &Fenced, words: &[&str]) -> (Option<i32>, String) {
    let output = fenced.command(words[0], &words[1..]).output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&said).into_owned())
}

const ELFEN: &str = env!("CARGO_BIN_EXE_elfen");
const ELFEND: &str = env!("CARGO_BIN_EXE_elfend");

/// Goal: a folder or file that is none is named, with the option that names another. Method: root,
/// of whom nothing is kept, and each command.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_wrong_folder_is_named() {
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
        (&[ELFEND, "--check", none], 2, "write it, or name another with --settings"),
        (&["sh", "-c", &at_home], 1, "name another folder with --run-dir"),
        (&[ELFEN, "pause", "--run-dir", file], 1, "with --run-dir"),
        (&[ELFEN, "resume", "--run-dir", file], 1, "with --run-dir"),
        (&[ELFEN, "status", "--run-dir", file], 1, file),
        (&[ELFEND, "--freeze", "--run-dir", none], 0, "no fence of"),
        (&[ELFEND, "--release", "--run-dir", none], 0, "no fence of"),
        (&[ELFEN, "status", "--healthy", "--run-dir", none], 1, "no elfend answers"),
    ];
    for (words, status, why) in cases {
        let (found, said) = told(&fenced, words);
        assert!(found == Some(status) && said.contains(why), "{words:?}: {found:?} {said}");
    }
}

/// Goal: a fence that elfend has left is no secret: whether it stands still, and what lets it go.
/// Method: a daemon that was stopped, and a hand that thaws.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_fence_that_is_left_is_listed() {
    require_fences();
    let mut fenced = Fenced::start();
    fenced.wait_until_it_runs();
    fenced.end_daemon();
    let (status, said) = told(&fenced, &[ELFEN, "status"]);
    assert!(status == Some(0) && said.contains("fence batch: frozen"), "{said}");
    let (status, said) = told(&fenced, &[ELFEN, "resume"]);
    assert!(
        status == Some(1) && said.contains("no guards hold batch: no elfend answers"),
        "{said}"
    );
    // The watchdog may come to freeze it as well.
    wait_until("running unguarded", || {
        fenced.fence.0.freezer().thaw().unwrap();
        told(&fenced, &[ELFEN, "status"]).1.contains("runs, and no elfend guards it")
    });
    let (_, said) = told(&fenced, &[ELFEN, "status", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!(json["left"][0]["frozen"], false, "{said}");
    let (status, _) = told(&fenced, &[ELFEND, "--freeze"]);
    assert_eq!(status, Some(0));
    assert!(fenced.fence.0.freezer().is_requested().unwrap());
    let (status, said) = told(&fenced, &[ELFEND, "--release"]);
    assert!(status == Some(0) && said.contains("ordinary cgroup"), "{said}");
    let (_, said) = told(&fenced, &[ELFEN, "status"]);
    assert!(!said.contains("fence"), "{said}");
}

/// Goal: a daemon that does not answer is given up, in words. Method: one that is stopped.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_daemon_that_hangs_is_given_up() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_it_runs();
    kill(fenced.daemon.id(), libc::SIGSTOP);
    let run = [ELFEN, "run", "--fence", "batch", "--user", NOBODY, "--", "true"];
    for words in [&[ELFEN, "status"][..], &run] {
        let (status, said) = told(&fenced, words);
        let why = "it has not answered within 5 s";
        assert!(status == Some(1) && said.contains(why), "{words:?}: {said}");
    }
    let (_, said) = told(&fenced, &[ELFEN, "status"]);
    assert!(said.contains("fence batch: runs; elfend does not say"), "{said}");
    let (status, said) = told(&fenced, &[ELFEN, "pause"]);
    assert_eq!(status, Some(0), "{said}");
    let (_, said) = told(&fenced, &[ELFEN, "status"]);
    assert!(said.contains("fence batch: frozen; elfend does not say why"), "{said}");
}

/// Goal: a fence that is named decides, whatever variables say of other runs; what is typed beside
/// it is refused, and fits a run that is to have guards of its own. Method: the variable of lanes,
/// and the option.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn variables_are_for_other_runs() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_it_runs();
    let by_variable = ["env", "ELFEN_LANES=0:1", "ELFEN_LOOK_EVERY=1ms", ELFEN];
    let dry = ["run", "--dry-run", "--user", NOBODY];
    let said =
        |by: &[&str], more: &[&str]| told(&fenced, &[by, &dry, more, &["--", "true"]].concat());
    let (status, by) = said(&by_variable, &["--fence", "batch"]);
    assert!(status == Some(0) && by.contains("level fence"), "{by}");
    let (status, by) = said(&by_variable, &["--fence", "none"]);
    assert!(status == Some(0) && by.contains("level affinity"), "{by}");
    let (status, by) = said(&[ELFEN], &["--fence", "none", "--lanes", "0:1"]);
    assert!(status == Some(0) && by.contains("level affinity"), "{by}");
    for option in ["--look-every", "--look-slack"] {
        let (status, by) = said(&by_variable, &["--fence", "batch", option, "1ms"]);
        let why = format!("'--fence' cannot be used with '{option}'");
        assert!(status == Some(2) && by.contains(&why), "{by}");
    }
}

/// Goal: Ctrl-C is the program's own, and leaves its fence as it was. Method: a program that ends
/// by it, also where whoever runs this test ignores it.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn ctrl_c_is_the_programs() {
    use std::os::unix::process::ExitStatusExt;
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_it_runs();
    let mut batch = fenced.batch(&["env", "--default-signal=INT"], NOBODY, SPIN);
    borrows(batch.id());
    kill(batch.id(), libc::SIGINT);
    assert_eq!(batch.wait().unwrap().signal(), Some(libc::SIGINT));
    wait_until("an empty fence", || fenced.fence().processes == 0);
    assert_eq!(fenced.fence().frozen, None);
}

/// Goal: a run at level `affinity` says, once, that its program took itself out from below its
/// guard, and counts who did. Method: a program that puts two of its processes into a cgroup beside
/// its own, and one that stays.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn who_leaves_the_rank_below_its_guard_is_named() {
    require_fences();
    let mut fenced = Fenced::start();
    fenced.end_daemon();
    let beside = fenced.heavy.child("beside");
    beside.0.make().unwrap();
    let report = fenced.run_dir().join("report");
    let report = report.to_str().unwrap();
    let run = [ELFEN, "run", "--lanes", "0:1", "--signal", "service", "--service"];
    let by = [fenced.heavy.name(), "--report", report, "--", "sh", "-c"];
    let runs = |program: &str| {
        let (status, said) = told(&fenced, &[&run[..], &by, &[program]].concat());
        assert_eq!(status, Some(0), "{said}");
        let report: serde_json::Value =
            serde_json::from_str(&fs::read_to_string(report).unwrap()).unwrap();
        (said.matches("has a cgroup of its own").count(), report["beside_guards"].clone())
    };
    assert_eq!(runs("sleep 3"), (0, 0.into()));
    let leaves = format!("sh -c '{} exec sleep 5' & ", beside.enter_script());
    assert_eq!(runs(&format!("{leaves}{leaves}sleep 5; wait")), (1, 2.into()));
}
