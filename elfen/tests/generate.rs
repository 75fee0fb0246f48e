//! Goal: man pages and completions list all commands and options. Method: they are written into a
//! folder, and compared with `--help`; bash loads its completions. `packaging/test` tests other
//! shells and `man`.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

fn elfen(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_elfen")).args(words).output().expect("elfen starts")
}

fn generate(what: &str, folder: &Path) {
    let output = elfen(&["generate", what, folder.to_str().unwrap()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let listed = String::from_utf8(output.stdout).unwrap();
    assert!(listed.lines().count() > 2 && listed.lines().all(|file| Path::new(file).is_file()));
}

/// The subcommands in the output of `--help`.
fn subcommands() -> Vec<String> {
    let help = String::from_utf8(elfen(&["--help"]).stdout).unwrap();
    let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let listed = listed.take_while(|line| !line.is_empty());
    let name = |line: &str| Some(line.strip_prefix("  ")?.split(' ').next()?.to_owned());
    listed.filter_map(name).filter(|name| !name.is_empty() && name != "help").collect()
}

#[test]
fn every_subcommand_has_a_page() {
    let folder = tempfile::tempdir().unwrap();
    generate("man", folder.path());
    let page = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
    let top = page("elfen.1");
    for name in subcommands() {
        assert!(page(&format!("elfen-{name}.1")).contains(".SH EXAMPLES"), "{name}");
        assert!(top.contains(&format!("elfen\\-{name}")), "{name}");
    }
    let sections = [".SH \"EXIT STATUS\"\n", ".SH ENVIRONMENT\n", "ELFEN_LANES"];
    sections.iter().for_each(|section| assert!(top.contains(section), "{section}"));
    assert!(page("elfen-tailor-record.1").contains("\\-\\-port"), "nested subcommands have pages");
    assert!(!top.contains("generate"), "hidden commands have none");
}

#[test]
fn bash_completes_subcommands_and_options() {
    let folder = tempfile::tempdir().unwrap();
    generate("completions", folder.path());
    let script = r#"
        source "$0"; complete -p elfen > /dev/null
        COMP_WORDS=($1 "$2"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
        _elfen elfen "$2" "${COMP_WORDS[COMP_CWORD - 1]}"; echo "${COMPREPLY[@]}""#;
    let complete = |before: &str, word: &str| {
        let file = folder.path().join("elfen.bash");
        let output =
            Command::new("bash").args(["-euc", script]).arg(file).args([before, word]).output();
        let output = output.expect("bash starts");
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    assert_eq!(complete("elfen", "met"), "metrics");
    assert_eq!(complete("elfen", "gener"), "");
    assert_eq!(complete("elfen run", "--poll-i"), "--poll-interval");
    assert!(complete("elfen run --policy", "").contains("refresh-budget"));
    for file in ["_elfen", "elfen.fish"] {
        let text = fs::read_to_string(folder.path().join(file)).unwrap();
        assert!(text.contains("poll-interval") && !text.contains("generate"), "{file}");
    }
}

#[test]
fn a_missing_folder_is_a_failure() {
    let output = elfen(&["generate", "man", "/nonexistent"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stderr.starts_with(b"elfen: writing into \"/nonexistent\": No such file"));
}
