//! Goal: `elfen shim` reports what it cannot do in one line and by its exit status. It prints a
//! summary even if the file cannot be written. Method: the command with invalid arguments and
//! files. Tests that need another machine or process are in the crate `elfen-shim`, in
//! `observed.rs` and in `share.rs`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::needs;
use crate::stage::{build, json, said, shim, text};

/// A program with an array of more elements than an observer can read at a time.
const TABLE: &str = "unsigned long table[16];\n\
    int main(void) { for (long i = 0; i < 3000000; i++) table[i % 16]++; return 0; }\n";

/// Checks that the command printed one line with this reason, and exited with this status.
fn refuses(output: &Output, status: i32, why: &str) {
    let said = said(output);
    assert_eq!(output.status.code(), Some(status), "{said}");
    let ours: Vec<&str> = said.lines().filter(|line| line.starts_with("elfen: ")).collect();
    assert!(ours.len() == 1 && said.contains(why), "{why}: {said}");
}

fn table(folder: &Path) -> String {
    build(folder, "table", TABLE, &[]).to_str().unwrap().to_owned()
}

#[test]
fn too_much_and_what_is_not_one_number_is_refused() {
    needs::two_cpus();
    let folder = tempfile::tempdir().unwrap();
    let program = table(folder.path());
    let nine: Vec<String> = (0..9).map(|index| format!("table+{}:u64", index * 8)).collect();
    let watched: Vec<&str> = nine.iter().flat_map(|name| ["--watch", name]).collect();
    let words = [&watched[..], &["--", &program]].concat();
    refuses(&shim(&words), 2, "at most 8 words are read at a time");
    let eight = [&watched[..16], &["--json", "--", &program]].concat();
    let output = shim(&eight);
    assert!(output.status.success(), "{output:?}");
    refuses(&shim(&["--watch", "table+4:u64", "--", &program]), 2, "not a multiple of 8");
    refuses(&shim(&["--rate", "table+0:u32", "--", &program]), 2, "has eight bytes");
    refuses(&shim(&["--watch", "table", "--", &program]), 2, "has 128 bytes and is not one number");
    refuses(&shim(&["--watch", "table+8", "--", &program]), 2, "as in table+8:u64");
    refuses(&shim(&["--watch", "tabel", "--", &program]), 2, "did you mean table?");
    let listed = text(shim(&["signals", &program, "--like", "tabl"]));
    let signals = listed.lines().skip(1).filter(|line| !line.starts_with("not "));
    assert!(
        listed.contains("table") && signals.clone().all(|line| line.contains("tabl")),
        "{listed}"
    );
    let twice: Vec<&str> = [["--watch", "table:u64"]; 9].concat();
    refuses(&shim(&[&twice[..], &["--", &program]].concat()), 2, "named twice");
    refuses(&shim(&["--share", "--watch", "table:u64", "--", &program]), 2, "-p");
    let counted = shim(&["--rate", "instructions/cycles", "--", &program]);
    let status = counted.status.code().unwrap();
    assert!(matches!(status, 2 | 3), "3 if this machine has no counters: {counted:?}");
    refuses(&counted, status, "--rate");
    // The same file, marked as a 32-bit program.
    let mut bytes = fs::read(&program).unwrap();
    bytes[4] = 1;
    let other = folder.path().join("other");
    fs::write(&other, bytes).unwrap();
    fs::set_permissions(&other, fs::Permissions::from_mode(0o755)).unwrap();
    let other = other.to_str().unwrap();
    refuses(&shim(&["--watch", "table:u64", "--", other]), 2, "not a 64-bit x86 program");
    let observers = ["--measure-cost", "--observer-cpu", "0,1", "--", &program];
    refuses(&shim(&observers), 2, "needs a single observer");
    refuses(
        &shim(&["--cpu", "0", "--observer-cpu", "0,1", "--", &program]),
        2,
        "cannot observe itself",
    );
    refuses(&shim(&["--share", "-p", "999999999"]), 1, "does not exist");
    // The shell executes the command in its own process, whose id it passes.
    let elfen = env!("CARGO_BIN_EXE_elfen");
    let itself = Command::new("sh").args(["-c", &format!("exec {elfen} shim -p $$")]).output();
    refuses(&itself.unwrap(), 2, "this command itself");
    // SAFETY: geteuid takes no arguments.
    if unsafe { libc::geteuid() } == 0 {
        // Another user may have no access to the folder of the build.
        let copy = folder.path().join("elfen");
        fs::copy(elfen, &copy).unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let (own, mut foreign) = (std::process::id().to_string(), Command::new(copy));
        foreign.args(["shim", "-p", &own]).current_dir("/").uid(65534).gid(65534);
        refuses(&foreign.output().unwrap(), 1, "this user may not read its memory");
    }
}

#[test]
fn files_that_are_not_recordings_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    fs::write(at("empty"), "").unwrap();
    fs::write(at("text"), "not a recording\n").unwrap();
    fs::write(at("version"), [&b"ELFNSHIM"[..], &9_u32.to_le_bytes()].concat()).unwrap();
    // A header that claims to be longer than any file.
    let long = [&b"ELFNSHIM"[..], &1_u32.to_le_bytes(), b"H", &[0xff; 8]].concat();
    fs::write(at("long"), long).unwrap();
    nix::unistd::mkfifo(at("fifo").as_str(), nix::sys::stat::Mode::S_IRWXU).unwrap();
    for (name, why) in [
        ("empty", "it is empty"),
        ("text", "is not a recording"),
        ("version", "of version 9"),
        ("long", "head is damaged"),
        ("fifo", "a device or a pipe"),
        (".", "a folder"),
        ("none", "No such file"),
    ] {
        for command in ["show", "export"] {
            refuses(&shim(&[command, &at(name)]), 1, why);
        }
    }
    let output = shim(&["export", &at("empty"), "--as", "svg"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}

/// Goal: the summary has the requested period, and null with `--period auto`.
#[test]
fn a_period_that_follows_the_cost_was_not_asked_for() {
    needs::two_cpus();
    let cases = [("auto", Value::Null), ("max", 0.into()), ("20us", 20_000.into())];
    for (period, asked) in cases {
        let output = shim(&["--json", "--period", period, "--", "true"]);
        let summary = json(&output);
        assert_eq!(summary["period_ns"]["asked"], asked, "{period}: {summary:#}");
    }
}

/// Goal: if the file cannot be written, the program is not started. A run that does not begin
/// leaves files unchanged.
#[test]
fn a_file_that_cannot_be_written_is_refused_before_anything_runs() {
    needs::two_cpus();
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let touch = format!("echo ran >{}", at("ran"));
    for bad in [at("none/run.shim"), at(".")] {
        refuses(&shim(&["-o", &bad, "--", "sh", "-c", &touch]), 1, "recording");
        assert!(!Path::new(&at("ran")).exists(), "{bad}");
    }
    fs::write(at("old.shim"), "as it was").unwrap();
    for name in ["old.shim", "new.shim"] {
        refuses(&shim(&["-o", &at(name), "--", &at("none")]), 1, "not found");
    }
    assert_eq!(fs::read_to_string(at("old.shim")).unwrap(), "as it was");
    assert!(!Path::new(&at("new.shim")).exists());
    let written = shim(&["-o", &at("old.shim"), "--", "true"]);
    assert!(written.status.success(), "{written:?}");
    assert!(shim(&["show", &at("old.shim")]).status.success());
}

/// Goal: if the disk is full, the summary is still printed.
#[test]
fn a_full_disk_leaves_the_summary() {
    needs::two_cpus();
    let folder = tempfile::tempdir().unwrap();
    let program = table(folder.path());
    let output = shim(&["--json", "--watch", "table:u64", "-o", "/dev/full", "--", &program]);
    refuses(&output, 1, "No space left");
    let summary = json(&output);
    assert!(summary["samples"].as_u64() > Some(0), "{summary:#}");
}

/// Goal: a run with `--live` on a terminal writes its recording, even to a new file. The command
/// consists of two processes then. Method: `script` provides a terminal.
#[test]
#[ignore = "needs script(1)"]
fn a_recording_that_is_shown_is_written() {
    needs::two_cpus();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.shim");
    let file = file.to_str().unwrap();
    let words = format!("{} shim --live -o {file} -- sleep 0.2", env!("CARGO_BIN_EXE_elfen"));
    let mut terminal = Command::new("script");
    terminal.args(["-qec", &words, "/dev/null"]).stdin(Stdio::null()).stdout(Stdio::null());
    let status = terminal.status().expect("needs script(1), which gives it a terminal");
    assert!(status.success() && shim(&["show", file]).status.success());
}
