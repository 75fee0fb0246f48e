//! Tests of group elfen, whose members are unprivileged users that the administrator trusts: what
//! elfend grants and refuses them.
//!
//! Only the daemon sees this group, so all members are children of the test.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use elfen_rt::signal::account::Claim;

use super::stage::{ELFEN, Fenced, NOBODY, run};

/// Ids that only these tests use: of the group, and of a member.
const GROUP: &str = "64900";
const MEMBER: &str = "64901";

/// An elfend on a machine with group elfen.
fn start_with_group() -> Fenced {
    let mut fenced = Fenced::start_by_tasks();
    let group = fenced.run_dir().join("group");
    let known = fs::read_to_string("/etc/group").unwrap();
    let others = known.lines().filter(|line| !line.starts_with("elfen:"));
    let mut lines: Vec<&str> = others.collect();
    let ours = format!("elfen:x:{GROUP}:");
    lines.push(&ours);
    fs::write(&group, lines.join("\n") + "\n").unwrap();
    fenced.end_daemon();
    // The file is replaced in a mount namespace, so that other processes see the machine's own
    // file.
    let script = format!("mount --bind '{}' /etc/group && exec \"$0\" \"$@\"", group.display());
    fenced.restart_by(&["unshare", "--mount", "sh", "-c", &script]);
    fenced.wait_until_running();
    fenced
}

/// Runs a program as a user with these groups. Returns its exit status and output.
fn run_as(fenced: &Fenced, user: &str, groups: &str, words: &[&str]) -> (Option<i32>, String) {
    let socket = format!("ELFEN_SOCKET={}", fenced.socket().display());
    let by = ["setpriv", "--reuid", user, "--regid", user, groups, "env", &socket];
    fenced.run(&[&by, words].concat())
}

fn run_as_member(fenced: &Fenced, words: &[&str]) -> (Option<i32>, String) {
    run_as(fenced, MEMBER, &format!("--groups={GROUP}"), words)
}

fn run_as_nobody(fenced: &Fenced, words: &[&str]) -> (Option<i32>, String) {
    run_as(fenced, NOBODY, "--clear-groups", words)
}

/// Goal: a member may enter the fence, with and without `--fence`. A member may not change elfend's
/// settings, because its batches could then change them, too. Method: each request, by the command.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn members_enter_and_change_nothing() {
    let fenced = start_with_group();
    let elfen = fenced.copy(ELFEN);
    let where_am_i = ["--", "cat", "/proc/self/cgroup"];
    for options in [&["run", "--fence", "batch"][..], &["run"]] {
        let words = [&[elfen.as_str()], options, &where_am_i].concat();
        let (status, printed) = run_as_member(&fenced, &words);
        assert_eq!(status, Some(0), "{printed}");
        assert!(
            printed.contains("level fence") && printed.contains(fenced.fence.name()),
            "{printed}"
        );
    }
    let pid = fenced.daemon.id().to_string();
    let root_alone = [
        (&["pause"][..], "run it as root"),
        (&["resume"], "only root may do that"),
        (&["set", &pid, "--policy", "fixed-budget", "--budget", "3ms"], "or as root"),
    ];
    for (words, why) in root_alone {
        let (status, printed) = run_as_member(&fenced, &[&[elfen.as_str()], words].concat());
        assert!(status == Some(1) && printed.contains(why), "{words:?}: {status:?} {printed}");
    }
    assert_eq!(fenced.fence().frozen, None);
}

/// Goal: unprivileged members can run their own guards with elfend's task map, and other users
/// cannot. Method: a run and the report of `doctor`, of both. An error names elfend as the owner of
/// the eBPF program.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn members_receive_the_task_map() {
    let mut fenced = start_with_group();
    let elfen = fenced.copy(ELFEN);
    let guarded = [elfen.as_str(), "run", "--lanes", "0:1", "--source", "tasks"];
    let dry = [&guarded[..], &["--dry-run", "--", "true"]].concat();
    let (status, printed) = run_as_member(&fenced, &dry);
    assert!(status == Some(0) && printed.contains("tasks (elfend)"), "{status:?} {printed}");
    let (status, printed) =
        run_as_member(&fenced, &[&guarded[..], &["--", "sh", "-c", "exit 7"]].concat());
    assert_eq!(status, Some(7), "{printed}");
    assert!(printed.contains("borrowed") && !printed.contains("is not counted"), "{printed}");
    // The map from elfend does not permit claims of accounts.
    let socket = fenced.socket();
    let map = elfen_rt::pages::request_task_map(socket.as_os_str().as_bytes()).unwrap();
    assert!(map.renew(0) && map.claim(1, 0, Claim::of_program(1), |_| true).is_none());
    let (status, printed) = run_as_nobody(&fenced, &dry);
    assert!(status == Some(1) && printed.contains("member of group elfen"), "{status:?} {printed}");

    let doctor = [elfen.as_str(), "doctor", "--json"];
    let row = |printed: &str| -> serde_json::Value {
        let report: serde_json::Value = serde_json::from_str(printed).unwrap();
        let all = report["checks"].as_array().unwrap();
        all.iter().find(|row| row["name"] == "task-map-elfend").unwrap().clone()
    };
    let (_, member) = run_as_member(&fenced, &doctor);
    assert_eq!(row(&member)["status"], "yes", "{member}");
    let (_, stranger) = run_as_nobody(&fenced, &doctor);
    assert_eq!(row(&stranger)["status"], "no", "{stranger}");
    assert!(stranger.contains("only root and members of group elfen get the task map"));

    let holder = format!("{} (elfend)", fenced.daemon.id());
    fenced.ends(&[ELFEN, "lab", "bench", "signal", "--lanes", "0:1"], 1, &holder);

    fenced.end_daemon();
    let (_, alone) = run_as_member(&fenced, &doctor);
    assert!(alone.contains("no elfend answers"), "{alone}");
}

/// Goal: a C program of a member can read the task map, and a program of another user cannot.
/// Method: a program that includes only `elfen.h`.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_c_program_of_a_member_reads_the_task_map() {
    let mut fenced = start_with_group();
    let reader = fenced.copy(&build_who_runs(&fenced));
    let (status, lines) = run_as_member(&fenced, &[&reader, "0"]);
    assert_eq!(status, Some(0), "{lines}");
    assert_eq!(lines.lines().count(), 10, "{lines}");
    assert!(lines.lines().all(|line| line.starts_with("cpu 0: ")), "{lines}");
    let (status, printed) = run_as_nobody(&fenced, &[&reader]);
    let refused = format!("errno: found {:#x}", libc::EACCES);
    assert!(status == Some(1) && printed.contains(&refused), "{printed}");
    fenced.end_daemon();
    let (status, printed) = run_as_member(&fenced, &[&reader]);
    assert!(status == Some(1) && printed.contains("does elfend run?"), "{printed}");
}

fn build_who_runs(fenced: &Fenced) -> String {
    let runtime = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("elfen-rt");
    let program = fenced.run_dir().join("built");
    fs::create_dir(&program).unwrap();
    let program = program.join("who-runs");
    let mut cc = fenced.command(&["cc", "-Wall", "-Werror"]);
    cc.arg(format!("-DELFEN_SOCKET=\"{}\"", fenced.socket().display()));
    cc.arg("-I").arg(runtime.join("include")).arg(runtime.join("examples/who-runs.c"));
    let (status, printed) = run(cc.arg("-o").arg(&program));
    assert_eq!(status, Some(0), "{printed}");
    program.to_str().unwrap().to_owned()
}
