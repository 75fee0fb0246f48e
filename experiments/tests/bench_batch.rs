//! Goal: `elfen lab bench batch` measures a program as a batch, or reports in one line why it
//! cannot. Method: run the command on small shell scripts, with tracefs mounted only for this
//! command. Also run it with wrong arguments, and as a user without root's privileges.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

const NOBODY: u32 = 65_534;
const MOUNTED: &str = "mount -t tracefs nodev /sys/kernel/tracing; exec \"$@\"";
const BUFFERS: &str = "\"$@\"; status=$?; ls /sys/kernel/tracing/instances >&2; exit $status";

fn words<'a>(words: &[&'a str]) -> Vec<&'a str> {
    [&["bench", "batch"], words].concat()
}

fn plain(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfen-lab"));
    command.env_remove("ELFEN_LANES").args(words(arguments)).output().unwrap()
}

/// Two measurements on the same lanes would disturb each other.
static LANES: Mutex<()> = Mutex::new(());

/// Runs the command as root in a mount namespace of its own, with tracefs. Its stderr ends with the
/// names of the trace instances that are left.
#[track_caller]
fn traced(arguments: &[&str]) -> Output {
    // SAFETY: geteuid takes no arguments and cannot fail.
    assert_eq!(unsafe { libc::geteuid() }, 0, "needs root");
    let online = fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
    assert_ne!(online.trim(), "0", "needs two CPUs");
    let _alone = LANES.lock().unwrap_or_else(PoisonError::into_inner);
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", MOUNTED, "sh", "sh", "-c", BUFFERS, "sh"]);
    command.arg(env!("CARGO_BIN_EXE_elfen-lab")).args(words(&["--lanes", "0:1"])).args(arguments);
    command.output().unwrap()
}

fn fails(output: &Output, status: i32, with: &str) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{stderr}");
    let line = stderr.lines().last().unwrap_or_default();
    assert!(line.starts_with("elfen: ") && line.contains(with), "{stderr}");
    assert!(output.stdout.is_empty());
}

#[test]
fn wrong_arguments_are_told_in_one_line() {
    let help = "see `elfen lab bench batch --help`";
    fails(&plain(&[]), 2, "<PROGRAM>");
    fails(&plain(&["--turns", "1", "--", "true"]), 2, "invalid value '1' for '--turns");
    fails(&plain(&["--turns", "1us", "--", "true"]), 2, "a turn must last from 50us to 1s");
    fails(&plain(&["--checks", "magic", "--", "true"]), 2, help);
    fails(&plain(&["--duration", "0s", "--", "true"]), 2, "the duration must be from 1s to 60s");
    fails(&plain(&["--turn", "1ms", "--", "true"]), 2, "did you mean --turns?");
    fails(&plain(&["--", "no-such-program"]), 1, "no such program in any folder of PATH");
    fails(&plain(&["--poll-interval", "0us", "--", "true"]), 2, "the guard would never sleep");
}

#[test]
fn the_help_has_an_example_and_checks_is_that_of_run() {
    let output = plain(&["--help"]);
    let help = String::from_utf8(output.stdout).unwrap();
    assert!(help.contains("sudo elfen lab bench batch --lanes 0:1 -- xz"), "{help}");
    let refused = plain(&["--checks", "?", "--", "true"]);
    let ways = |text: &[u8]| {
        let text = String::from_utf8_lossy(text).into_owned();
        let (_, listed) = text.split_once("[possible values: ").expect("a list");
        let (listed, _) = listed.split_once(']').expect("its end");
        let mut ways: Vec<String> = listed.split(", ").map(str::to_owned).collect();
        ways.sort();
        ways
    };
    let elfen = Path::new(env!("CARGO_BIN_EXE_elfen-lab")).with_file_name("elfen");
    let mut run = Command::new(elfen);
    let run = run.args(["run", "--checks", "?", "--", "true"]).output().unwrap();
    assert_eq!(ways(&refused.stderr), ways(&run.stderr));
}

#[test]
fn users_who_may_not_trace_are_told_so() {
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("elfen");
    fs::copy(env!("CARGO_BIN_EXE_elfen-lab"), &copy).unwrap();
    for path in [folder.path(), &copy] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let mut command = Command::new(&copy);
    command.args(words(&["--lanes", "0:1", "--", "true"]));
    // SAFETY: geteuid takes no arguments and cannot fail.
    if unsafe { libc::geteuid() } == 0 {
        command.uid(NOBODY).gid(NOBODY);
    }
    fails(&command.output().unwrap(), 3, "the scheduler's trace");
}

#[test]
#[ignore = "needs root and eBPF"]
fn a_batch_is_measured_and_nothing_stays_behind() {
    let turns = ["--turns", "1ms", "-d", "1s", "--learn", "0ms", "--runs", "0", "--json"];
    let program = ["--", "sh", "-c", "while :; do :; done"];
    let output = traced(&[&turns[..], &program].concat());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !stderr.contains("elfen-bench-"), "{stderr}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = report["rows"].as_array().unwrap();
    let methods: Vec<&str> = rows.iter().map(|row| row["checks"].as_str().unwrap()).collect();
    assert_eq!(methods, ["guard", "auto"]);
    for (row, used) in rows.iter().zip(["guard", "live"]) {
        assert_eq!((&row["used"], &row["turn_ns"]), (&used.into(), &1_000_000.into()), "{row}");
        assert!(row["busy_ns"].is_u64() && row["overlapped_ns"].is_u64(), "{row}");
    }
    assert_eq!((&report["schema"], &report["benchmark"]), (&1.into(), &"batch".into()));
    assert!(report["alone_wall_ns"].is_null() && report["whole"].is_null());
}

/// Goal: a program whose output differs when it is a batch is reported as a failure. Method: a
/// script that prints the variable ELFEN_RUN, which is set only under `elfen run`.
#[test]
#[ignore = "needs root and eBPF"]
fn another_output_than_alone_is_a_failure() {
    let turns = ["--turns", "1ms", "-d", "1s", "--checks", "guard", "--runs", "1"];
    let program = ["--", "sh", "-c", "echo \"$ELFEN_RUN\""];
    let output = traced(&[&turns[..], &program].concat());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    let prefix = "elfen: comparing with runs without Elfen: --checks guard: ";
    assert!(stderr.contains(prefix) && stderr.contains("differs at byte 1"), "{stderr}");
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(stdout.contains("the program is too short"), "{stdout}");
    assert!(stdout.contains("different"), "{stdout}");
}
