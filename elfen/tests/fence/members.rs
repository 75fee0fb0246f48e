//! Members of group elfen: what elfend gives to users without privileges, whom its administrator
//! trusts, and what it does not.
//!
//! The group is one that the daemon alone sees, so nobody on the machine is in it but children of
//! the test's.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Output;

use elfen_rt::signal::account::Claim;

use super::needs;
use super::stage::{Fenced, NOBODY, require_fences};

/// Ids that only these tests use: of the group, of a member, and of one outside.
const GROUP: &str = "64900";
const MEMBER: &str = "64901";

/// An elfend for which there is a group of its name.
fn start() -> Fenced {
    let mut fenced = Fenced::start_by_tasks();
    let group = fenced.run_dir().join("group");
    let known = fs::read_to_string("/etc/group").unwrap();
    let others = known.lines().filter(|line| !line.starts_with("elfen:"));
    let mut lines: Vec<&str> = others.collect();
    let ours = format!("elfen:x:{GROUP}:");
    lines.push(&ours);
    fs::write(&group, lines.join("\n") + "\n").unwrap();
    fenced.end_daemon();
    let daemon = fenced.daemon_command();
    // Its own mounts, so that the machine's file stays what it is to everybody else.
    let script = format!("mount --bind '{}' /etc/group && exec \"$0\" \"$@\"", group.display());
    let mut command = fenced.command("unshare", &["--mount", "sh", "-c", &script]);
    command.arg(daemon.get_program()).args(daemon.get_args());
    let log = fs::File::options().append(true).open(fenced.log_file()).unwrap();
    fenced.daemon = command.stderr(log).spawn().unwrap();
    fenced.wait_for_socket();
    fenced.wait_until_it_runs();
    fenced
}

/// What a program ends with that a user starts, with these further groups.
fn run_as(fenced: &Fenced, user: &str, groups: &str, words: &[&str]) -> (Option<i32>, String) {
    let ids = ["--reuid", user, "--regid", user, groups];
    let mut command = fenced.command("setpriv", &ids);
    command.env("ELFEN_SOCKET", fenced.run_dir().join("elfend.sock"));
    said(&command.args(words).current_dir("/").output().unwrap())
}

fn as_member(fenced: &Fenced, words: &[&str]) -> (Option<i32>, String) {
    run_as(fenced, MEMBER, &format!("--groups={GROUP}"), words)
}

fn as_nobody(fenced: &Fenced, words: &[&str]) -> (Option<i32>, String) {
    run_as(fenced, NOBODY, "--clear-groups", words)
}

fn said(output: &Output) -> (Option<i32>, String) {
    let text = [&output.stdout[..], &output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&text).into_owned())
}

/// Goal: a member puts itself into the fence, asked or not, and changes nothing of what elfend was
/// told: its batches could ask the same. Method: each request, by the command.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn members_enter_and_change_nothing() {
    require_fences();
    let fenced = start();
    let elfen = fenced.copy(Path::new(env!("CARGO_BIN_EXE_elfen")));
    let where_am_i = ["--", "cat", "/proc/self/cgroup"];
    for options in [&["run", "--fence", "batch"][..], &["run"]] {
        let words = [&[elfen.as_str()], options, &where_am_i].concat();
        let (status, said) = as_member(&fenced, &words);
        assert_eq!(status, Some(0), "{said}");
        assert!(said.contains("level fence") && said.contains(fenced.fence.name()), "{said}");
    }
    let pid = fenced.daemon.id().to_string();
    let root_alone = [
        (&["pause"][..], "run it as root"),
        (&["resume"], "only root may do that"),
        (&["set", &pid, "--policy", "fixed-budget", "--budget", "3ms"], "or as root"),
    ];
    for (words, why) in root_alone {
        let (status, said) = as_member(&fenced, &[&[elfen.as_str()], words].concat());
        assert!(status == Some(1) && said.contains(why), "{words:?}: {status:?} {said}");
    }
    assert_eq!(fenced.fence().frozen, None);
}

/// Goal: a member without privileges lends lanes by guards of its own, going by elfend's task map,
/// and a stranger does not. Method: a run and what `doctor` says, of both; who else holds the
/// program is named.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn members_are_given_the_task_map() {
    require_fences();
    let mut fenced = start();
    let elfen = fenced.copy(Path::new(env!("CARGO_BIN_EXE_elfen")));
    let run = [elfen.as_str(), "run", "--lanes", "0:1", "--signal", "tasks"];
    let dry = [&run[..], &["--dry-run", "--", "true"]].concat();
    let (status, said) = as_member(&fenced, &dry);
    assert!(status == Some(0) && said.contains("signal tasks (elfend)"), "{status:?} {said}");
    let (status, said) = as_member(&fenced, &[&run[..], &["--", "sh", "-c", "exit 7"]].concat());
    assert_eq!(status, Some(7), "{said}");
    assert!(said.contains("borrowed") && !said.contains("is not counted"), "{said}");
    // What it was handed lets it claim no account itself.
    let socket = fenced.run_dir().join("elfend.sock");
    let map = elfen_rt::pages::request_task_map(socket.as_os_str().as_bytes()).unwrap();
    assert!(map.renew(0) && map.claim(1, 0, Claim::of_program(1), |_| true).is_none());
    let (status, said) = as_nobody(&fenced, &dry);
    assert!(status == Some(1) && said.contains("member of group elfen"), "{status:?} {said}");

    let doctor = [elfen.as_str(), "doctor", "--json"];
    let row = |said: &str| -> serde_json::Value {
        let report: serde_json::Value = serde_json::from_str(said).unwrap();
        let all = report["checks"].as_array().unwrap();
        all.iter().find(|row| row["name"] == "task-map-elfend").unwrap().clone()
    };
    let (_, member) = as_member(&fenced, &doctor);
    assert_eq!(row(&member)["status"], "yes", "{member}");
    let (_, stranger) = as_nobody(&fenced, &doctor);
    assert_eq!(row(&stranger)["status"], "no", "{stranger}");
    assert!(stranger.contains("only root and members of group elfen are given the task map"));

    let bench = fenced.elfen(&["lab", "bench", "signal", "--lanes", "0:1"]);
    let (status, told) = self::said(&bench);
    let holder = format!("{} (elfend)", fenced.daemon.id());
    assert!(status == Some(1) && told.contains(&holder), "{told}");

    fenced.end_daemon();
    let (_, alone) = as_member(&fenced, &doctor);
    assert!(alone.contains("no elfend answers"), "{alone}");
}

/// Goal: a C program of the group reads who runs, and a stranger's does not. Method: one that
/// includes `elfen.h` only.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_c_program_of_a_member_reads_who_runs() {
    require_fences();
    let mut fenced = start();
    let reader = fenced.copy(&who_runs(&fenced));
    let (status, lines) = as_member(&fenced, &[&reader, "0"]);
    assert_eq!(status, Some(0), "{lines}");
    assert_eq!(lines.lines().count(), 10, "{lines}");
    assert!(lines.lines().all(|line| line.starts_with("cpu 0: ")), "{lines}");
    let (status, said) = as_nobody(&fenced, &[&reader]);
    let refused = format!("errno: found {:#x}", libc::EACCES);
    assert!(status == Some(1) && said.contains(&refused), "{said}");
    fenced.end_daemon();
    let (status, said) = as_member(&fenced, &[&reader]);
    assert!(status == Some(1) && said.contains("does elfend run?"), "{said}");
}

fn who_runs(fenced: &Fenced) -> PathBuf {
    let runtime = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("elfen-rt");
    let program = fenced.run_dir().join("built");
    fs::create_dir(&program).unwrap();
    let program = program.join("who-runs");
    let socket = fenced.run_dir().join("elfend.sock");
    let mut cc =
        fenced.command(needs::find("cc").unwrap().to_str().unwrap(), &["-Wall", "-Werror"]);
    cc.arg(format!("-DELFEN_SOCKET=\"{}\"", socket.display()));
    cc.arg("-I").arg(runtime.join("include")).arg(runtime.join("examples/who-runs.c"));
    let compiled = cc.arg("-o").arg(&program).output().unwrap();
    assert!(compiled.status.success(), "{}", said(&compiled).1);
    program
}
