//! What every subcommand has from the frame: help, usage errors, exit statuses, and outputs that
//! end early.

use std::fs::File;
use std::process::{Command, Output, Stdio};

fn elfen(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfen"));
    command.env_remove("ELFEN_LANES").env_remove("ELFEN_MACHINE").args(words);
    command
}

fn run(words: &[&str]) -> Output {
    elfen(words).output().expect("elfen starts")
}

fn stderr_of(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).expect("UTF-8")
}

/// Goal: help is on stdout with status 0, and without arguments it is shown with status 2. Method:
/// run it.
#[test]
fn help() {
    let bare = run(&[]);
    assert_eq!(bare.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&bare.stdout).contains("Usage: elfen <COMMAND>"));
    for words in [&["--help"][..], &["help"], &["lanes", "--help"]] {
        let output = run(words);
        assert_eq!(output.status.code(), Some(0), "{words:?}");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("Usage: elfen") && output.stderr.is_empty(), "{words:?}: {text}");
    }
    let lanes = run(&["lanes", "--help"]);
    assert!(String::from_utf8_lossy(&lanes.stdout).contains("\nExamples:\n  elfen lanes "));
}

/// Goal: a usage error is one line that names the help to read. Method: mistakes that clap finds.
#[test]
fn usage_errors() {
    let cases = [
        (&["lane"][..], "unrecognized subcommand 'lane'", "see `elfen --help`"),
        (
            &["lanes", "--jason"],
            "found; a similar argument exists: '--json'",
            "see `elfen lanes --help`",
        ),
        (&["lanes", "--lanes"], "a value is required for '--lanes <PAIRS>'", "--help`"),
        (&["lanes", "--json", "--record"], "cannot be used with", "see `elfen lanes --help`"),
        (&["metrics", "--listen", "80"], "invalid value '80'", "see `elfen metrics --help`"),
        (&["signals", "up", "--user"], "unexpected argument", "see `elfen signals up --help`"),
        (&["run", "--lane", "0:1", "--", "true"], "unexpected argument '--lane'", "is ./--lane"),
        (&["serve", "--lane", "0:1", "--", "true"], "unexpected argument '--lane'", "is ./--lane"),
        (&["lanes", "a\nb\u{1b}[31m"], "unexpected argument 'a", "see `elfen lanes --help`"),
    ];
    for (words, why, fix) in cases {
        let output = run(words);
        let stderr = stderr_of(&output);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{words:?}: {stderr}");
        assert!(stderr.starts_with("elfen: arguments: "), "{words:?}: {stderr}");
        assert!(stderr.contains(why) && stderr.trim_end().ends_with(fix), "{words:?}: {stderr}");
        assert!(!stderr.contains('\u{1b}') && output.stdout.is_empty(), "{words:?}: {stderr}");
    }
}

/// Goal: a reader that leaves early, as in `elfen lanes | head -1`, ends the command quietly.
/// Method: a pipe whose reading end is closed before the command starts.
#[test]
fn a_reader_that_left() {
    for words in [&["lanes"][..], &["lanes", "--json"], &["--help"]] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = elfen(words).stdout(writer).stderr(Stdio::piped()).output().unwrap();
        assert_eq!((output.status.code(), stderr_of(&output)), (Some(0), ""), "{words:?}");
    }
}

/// Goal: output that could not be written is a failure, and a full stderr no panic. Method:
/// /dev/full.
#[test]
fn a_full_disk() {
    let full = || File::create("/dev/full").expect("Linux has /dev/full");
    let output = elfen(&["lanes"]).stdout(full()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr_of(&output).starts_with("elfen: writing the output: No space left"));
    let refused = elfen(&["lanes", "--lanes", "0:0"]).stderr(full()).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
}
