//! Goal: `elfen profile` says what a program did, passes the program's status on, and refuses what
//! it cannot read. Method: the commands, with programs of the base system.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

fn elfen(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_elfen")).arg("profile").args(words).output().unwrap()
}

fn error(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn a_profile_is_recorded_and_reported() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.elfprof");
    let file = file.to_str().unwrap();
    let recorded = elfen(&["record", "-o", file, "--", "sh", "-c", "echo out; exit 3"]);
    assert_eq!(recorded.status.code(), Some(3));
    assert_eq!(recorded.stdout, b"out\n");
    assert!(error(&recorded).starts_with("elfen: profile by everything: "), "{}", error(&recorded));
    let text = elfen(&["report", file, "--top", "3"]).stdout;
    let text = String::from_utf8(text).unwrap();
    assert!(text.starts_with("sh -c echo out; exit 3: "), "{text}");
    assert!(text.contains("share %") && text.lines().count() == 6, "{text}");
    let json: serde_json::Value =
        serde_json::from_slice(&elfen(&["report", file, "--json"]).stdout).unwrap();
    assert_eq!((&json["by"], &json["programs"]), (&"everything".into(), &1.into()));
    let function = &json["functions"][0];
    assert!(function["instructions"].as_u64().unwrap() > 100, "{function}");
    let calls = elfen(&["report", file, "--sort", "call"]).stdout;
    assert!(String::from_utf8(calls).unwrap().contains("to\n"));
}

#[test]
fn without_a_file_the_hottest_functions_are_printed() {
    let recorded = elfen(&["record", "--", "true"]);
    assert!(recorded.stdout.is_empty());
    assert!(error(&recorded).contains("instructions of 1 program, all counted"));
    let quiet = elfen(&["record", "-q", "--", "true"]);
    assert_eq!((quiet.status.code(), error(&quiet)), (Some(0), String::new()));
}

#[test]
fn failures_have_a_reason_and_a_status() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text");
    fs::write(&text, "no profile").unwrap();
    let text = text.to_str().unwrap();
    let cases: [(&[&str], i32, &str); 6] = [
        (&["record", "--", "/no/such/program"], 127, "No such file or directory"),
        (&["record", "--", text], 126, "Permission denied"),
        (&["record"], 2, "PROGRAM"),
        (&["record", "-o", "/no/such/folder/f", "--", "true"], 1, "No such file or directory"),
        (&["report", text], 1, "it is not a profile of Elfen"),
        (&["record", "--by", "magic", "--", "true"], 2, "magic"),
    ];
    for (words, status, why) in cases {
        let output = elfen(words);
        assert_eq!(output.status.code(), Some(status), "{words:?}: {}", error(&output));
        assert!(error(&output).contains(why), "{words:?}: {}", error(&output));
    }
    let killed = elfen(&["record", "-q", "--", "sh", "-c", "kill -KILL $$"]);
    assert_eq!(killed.status.code(), Some(128 + 9));
}

/// Goal: SIGTERM to the command reaches the program, and what the program leaves behind goes on.
#[test]
fn signals_are_passed_on_and_children_live_on() {
    let folder = tempfile::tempdir().unwrap();
    let [up, done] = ["up", "done"].map(|name| folder.path().join(name));
    let script = format!(
        "trap 'exit 7' TERM; (sleep 1; echo late > {}) & echo up > {}; wait; wait",
        done.display(),
        up.display()
    );
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfen"));
    command.args(["profile", "record", "-q", "--", "sh", "-c", &script]).stderr(Stdio::null());
    let mut running = command.spawn().unwrap();
    wait_for(&up);
    let id = nix::unistd::Pid::from_raw(running.id().cast_signed());
    nix::sys::signal::kill(id, nix::sys::signal::Signal::SIGTERM).unwrap();
    assert_eq!(running.wait().unwrap().code(), Some(7));
    wait_for(&done);
}

fn wait_for(file: &Path) {
    let begun = Instant::now();
    while fs::read(file).map_or(true, |bytes| bytes.is_empty()) {
        assert!(begun.elapsed() < Duration::from_secs(60), "{} is not written", file.display());
        sleep(Duration::from_millis(10));
    }
}
