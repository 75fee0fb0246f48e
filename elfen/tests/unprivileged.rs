//! Goal: a user who has nothing, no root, no group, no capability, is told on one screen what
//! works, what doesn't, and one next step. Method: the real command as an unprivileged user, on the
//! machine at hand.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const NOBODY: u32 = 65_534;
const COLUMNS: usize = 80;
const LINES: usize = 24;

fn is_root() -> bool {
    // SAFETY: takes nothing.
    unsafe { libc::geteuid() == 0 }
}

/// A copy that every user can run, wherever this checkout lies.
fn copy(folder: &Path) -> PathBuf {
    let copy = folder.join("elfen");
    fs::copy(env!("CARGO_BIN_EXE_elfen"), &copy).unwrap();
    for path in [folder, &copy] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    copy
}

/// Root becomes nobody, without its groups; others have nothing to give up.
fn run_as_nobody(elfen: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(elfen);
    command.env("ELFEN_CONFIG", "/dev/null").env_remove("ELFEN_LANES").args(words);
    if is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
    command.output().unwrap()
}

/// As a terminal shows it, which breaks long lines.
fn rows(text: &str) -> usize {
    text.lines().map(|line| line.chars().count().div_ceil(COLUMNS).max(1)).sum()
}

fn skipped(why: &str) {
    let mut terminal = std::io::stderr();
    writeln!(terminal, "skipped: run without a signal: {why}").unwrap();
}

#[test]
fn a_run_without_anything_is_one_screen() {
    if fs::read_to_string("/sys/devices/system/cpu/online").unwrap().trim() == "0" {
        return skipped("a pair by hand takes two CPUs");
    }
    let folder = tempfile::tempdir().unwrap();
    let elfen = copy(folder.path());
    for lanes in [&[][..], &["--lanes", "0:1"]] {
        let words = [&["run"], lanes, &["--", "echo", "started"]].concat();
        let output = run_as_nobody(&elfen, &words);
        let said = String::from_utf8(output.stderr).expect("UTF-8");
        if output.status.success() && !is_root() {
            return skipped("this user may see who runs");
        }
        assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(3), &b""[..]), "{said}");
        assert!(rows(&said) <= LINES, "{said}");
        let (above, screen) = said.split_once("\n\n").expect("a line, and a screen");
        let line = above.lines().last().expect("a line");
        assert!(line.starts_with("elfen: run: ") && line.contains("no signal"), "{said}");
        assert!(screen.lines().all(|line| line.chars().count() <= COLUMNS), "{said}");
        for row in ["no   signal     ", "yes  nap        ", "yes  injection  "] {
            assert!(screen.contains(row), "{row}: {said}");
        }
        assert_eq!(screen.matches("\nnext: ").count(), 1, "{said}");
        assert!(
            screen.contains("--lanes") || !lanes.is_empty() || !line.contains("lanes"),
            "{said}"
        );
    }
}
