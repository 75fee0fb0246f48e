//! Goal: `elfen-truth` writes all of its turns: numbered, each starting where the previous one
//! ended, and none shorter than requested. Method: run the command and read its file.

use std::fs;
use std::process::Command;

const TRUTH: &str = env!("CARGO_BIN_EXE_elfen-truth");

#[test]
fn stamps_are_a_whole_account() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("turns.csv");
    let lengths = ["-d", "50ms", "--shortest", "2us", "--longest", "20us"];
    let output = Command::new(TRUTH).args(lengths).arg(&file).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = fs::read_to_string(&file).unwrap();
    let mut rows = text.lines();
    assert_eq!(rows.next(), Some("turn,tag,start_ns,end_ns"));
    let (mut turns, mut last) = (0, None);
    for row in rows {
        turns += 1;
        let fields: Vec<&str> = row.split(',').collect();
        let [start, end] = [2, 3].map(|at: usize| fields[at].parse::<u64>().unwrap());
        let tag = if turns % 2 == 1 { "odd" } else { "even" };
        assert_eq!((fields[0], fields[1]), (turns.to_string().as_str(), tag));
        assert!(last.is_none_or(|last| last == start), "{row}");
        // The rate of the clock is measured twice, with an error of at most 1 %.
        assert!(end - start >= 1980, "{row}");
        last = Some(end);
    }
    assert!(turns >= 2, "{turns}");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{turns} turns\n"));
}

#[test]
fn what_cannot_be_is_refused() {
    for (words, status) in [
        (&["--shortest", "0ns", "x"][..], 2),
        (&["--shortest", "2us", "--longest", "1us", "x"], 2),
        (&["-d", "-1s", "x"], 2),
        (&[], 2),
        (&["-d", "1ms", "/nonexistent/turns.csv"], 1),
    ] {
        let output = Command::new(TRUTH).args(words).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), said.lines().count()), (Some(status), 1), "{said}");
    }
}
