//! Programs of Debian.

use std::ffi::OsString;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use super::assert_same;

fn text(folder: &Path) -> OsString {
    let mut text = String::new();
    let mut state = 1_u32;
    for line in 0..20_000 {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let word = ["alpha", "beta", "gamma", "delta"][state as usize >> 30];
        writeln!(text, "{word} {line} {state}").unwrap();
    }
    let path = folder.join("text");
    fs::write(&path, text).unwrap();
    path.into()
}

/// Commands as a shell would split them; TEXT stands for a file.
const COMMANDS: [&str; 6] = [
    "sort TEXT",
    "sed -e s/alpha/omega/g TEXT",
    "grep -c beta.*9 TEXT",
    "wc TEXT",
    "md5sum TEXT",
    "sh -c i=0;while|[|$i|-lt|500|];do|i=$((i+1));done;echo|$i|$(echo|child)",
];

#[test]
fn programs_of_the_base_system_behave_as_ever() {
    let folder = tempfile::tempdir().unwrap();
    run(folder.path(), &COMMANDS);
}

fn run(folder: &Path, commands: &[&str]) {
    let text = text(folder);
    for command in commands {
        let word = |word: &str| match word {
            "TEXT" => text.clone(),
            _ => word.replace('|', " ").into(),
        };
        let words: Vec<OsString> = command.split(' ').map(word).collect();
        assert_same(folder, &words);
    }
}
