//! Goal: for a user without root, group or capabilities, `elfen run` prints one screen with what
//! works, what does not, and one next step. Two capabilities are enough to record a service.
//! Method: the command as an unprivileged user, on this machine.

mod needs;
mod process;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use process::KilledOnDrop;

const ELFEN: &str = env!("CARGO_BIN_EXE_elfen");
const NOBODY: u32 = 65_534;
const COLUMNS: usize = 80;
const LINES: usize = 24;

fn is_root() -> bool {
    // SAFETY: geteuid takes no arguments.
    unsafe { libc::geteuid() == 0 }
}

/// Copies a program into a folder where every user can run it.
fn copy(program: &Path, folder: &Path) -> PathBuf {
    let copy = folder.join(program.file_name().expect("a program"));
    fs::copy(program, &copy).unwrap();
    for path in [folder, &copy] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    copy
}

/// Runs `elfen` as user `nobody` if this user is root, and otherwise as this user.
fn run_as_nobody(elfen: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(elfen);
    command.env("ELFEN_CONFIG", "/dev/null").env_remove("ELFEN_LANES").args(words);
    if is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
    command.output().unwrap()
}

/// The number of rows that a text takes on a terminal, which breaks long lines.
fn rows(text: &str) -> usize {
    text.lines().map(|line| line.chars().count().div_ceil(COLUMNS).max(1)).sum()
}

#[test]
fn a_run_without_privileges_fails_with_one_screen() {
    needs::two_cpus();
    let folder = tempfile::tempdir().unwrap();
    let elfen = copy(Path::new(ELFEN), folder.path());
    for lanes in [&[][..], &["--lanes", "0:1"]] {
        let words = [&["run"], lanes, &["--", "echo", "started"]].concat();
        let output = run_as_nobody(&elfen, &words);
        let printed = String::from_utf8(output.stderr).expect("UTF-8");
        assert_eq!(
            (output.status.code(), output.stdout.as_slice()),
            (Some(3), &b""[..]),
            "{printed}"
        );
        assert!(rows(&printed) <= LINES, "{printed}");
        let (above, screen) = printed.split_once("\n\n").expect("a line, and a screen");
        let line = above.lines().last().expect("a line");
        assert!(
            line.starts_with("elfen: run: ") && line.contains("no source of signals"),
            "{printed}"
        );
        assert!(screen.lines().all(|line| line.chars().count() <= COLUMNS), "{printed}");
        for row in ["no   source     ", "yes  nap        ", "yes  checks     "] {
            assert!(screen.contains(row), "{row}: {printed}");
        }
        assert_eq!(screen.matches("\nnext: ").count(), 1, "{printed}");
        assert!(
            screen.contains("--lanes") || !lanes.is_empty() || !line.contains("lanes"),
            "{printed}"
        );
    }
}

/// Goal: recording requires only CAP_BPF and CAP_PERFMON, and is refused in one line without them.
/// Method: a service of user `nobody`, recorded by the same user with both capabilities and with
/// none.
#[test]
#[ignore = "needs root and eBPF of Linux 6.3"]
fn two_capabilities_are_enough_to_record() {
    needs::root();
    let server = needs::built("elfen-hedge");
    let folder = tempfile::tempdir().unwrap();
    let [elfen, server] =
        [Path::new(ELFEN), server.as_path()].map(|program| copy(program, folder.path()));
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let recording = folder.path().join("nobody.trace");
    let mut server = Command::new(server);
    server.args(["answer", "server"]).uid(NOBODY).gid(NOBODY);
    let mut server = KilledOnDrop(
        server.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a server"),
    );
    let mut port = String::new();
    BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut port).unwrap();
    let port = port.trim().to_owned();
    let record = |capabilities: &str| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]);
        command.args(["--inh-caps", capabilities, "--ambient-caps", capabilities]).arg(&elfen);
        command.args(["tailor", "record", "-d", "1s", "--port", &port, "-o"]).arg(&recording);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("util-linux")
    };
    let refused = record("-all").wait_with_output().unwrap();
    let printed = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && printed.contains("CAP_BPF"), "{printed}");
    let mut recorder = record("-all,+bpf,+perfmon");
    let mut client = TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
    while recorder.try_wait().unwrap().is_none() {
        client.write_all(b"GET /length/50/mine HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let count = client.read(&mut [0; 4096]).unwrap();
        assert!(count > 0, "the service answers");
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    let recorded = recorder.wait_with_output().unwrap();
    let printed = String::from_utf8(recorded.stderr).unwrap();
    assert!(recorded.status.success(), "{printed}");
    let words = ["tailor", "report", recording.to_str().unwrap(), "--json"];
    let report = Command::new(&elfen).args(words).output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&report.stdout).expect("JSON");
    assert!(report["complete"].as_u64() > Some(50) && report["detail"] == "sched", "{report:#}");
    assert!(report["unknown_share"].as_f64().unwrap() < 0.05, "{report:#}");
}
