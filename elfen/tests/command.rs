//! Tests of what all subcommands share: help, usage errors, exit statuses, variables, closed
//! outputs, man pages and completions.

mod process;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use process::heed_sigint;

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

/// Goal: `--help` prints to stdout with status 0. Without arguments, the command prints its help
/// with status 2. Method: run both.
#[test]
fn help_is_on_stdout() {
    let bare = run(&[]);
    assert_eq!(bare.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&bare.stdout).contains("Usage: elfen COMMAND"));
    for words in [&["--help"][..], &["help"], &["lanes", "--help"]] {
        let output = run(words);
        assert_eq!(output.status.code(), Some(0), "{words:?}");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("Usage: elfen") && output.stderr.is_empty(), "{words:?}: {text}");
    }
    let lanes = run(&["lanes", "--help"]);
    assert!(String::from_utf8_lossy(&lanes.stdout).contains("\nExamples:\n  elfen lanes "));
}

/// Goal: a usage error is one line that names the help. Method: mistakes that clap finds.
#[test]
fn usage_errors_are_one_line() {
    let cases = [
        (
            &["lane"][..],
            "unknown command 'lane'; did you mean `elfen lanes`?",
            "see `elfen --help`",
        ),
        (&["stauts"], "did you mean `elfen status`?", "see `elfen --help`"),
        (&["colours"], "unknown command 'colours'; see", "see `elfen --help`"),
        (&["hedge", "--to"], "a separate program, elfen-hedge", "see `elfen-hedge --help`"),
        (
            &["lanes", "--jason"],
            "found; a similar argument exists: '--json'",
            "see `elfen lanes --help`",
        ),
        (&["lanes", "--lanes"], "a value is required for '--lanes <PAIRS>'", "--help`"),
        (&["lanes", "--json", "--dump-machine"], "cannot be used with", "see `elfen lanes --help`"),
        (&["metrics", "--listen", "80"], "invalid value '80'", "see `elfen metrics --help`"),
        (&["tailor", "watch", "--user"], "unexpected argument", "see `elfen tailor watch --help`"),
        (&["run", "--lane", "0:1", "true"], "did you mean --lanes?", "see `elfen run --help`"),
        (&["run", "-v", "true"], "unknown option '-v'; see", "see `elfen run --help`"),
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

/// Goal: `shim` observes all CPUs only if asked to. Method: no arguments, and no target.
#[test]
fn shim_without_a_target_observes_nothing() {
    let bare = run(&["shim"]);
    assert_eq!(bare.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&bare.stdout).contains("Usage: elfen shim"), "{bare:?}");
    let live = run(&["shim", "--live"]);
    assert_eq!(live.status.code(), Some(2));
    assert!(stderr_of(&live).contains("nothing to observe"), "{live:?}");
}

/// Goal: `status` prints a pause without elfend, and fails if it cannot read it. Method: a run
/// folder of its own, with a reason, and with a folder in place of the file.
#[test]
fn status_prints_a_pause() {
    let folder = tempfile::tempdir().unwrap();
    let words = ["status", "--run-dir", folder.path().to_str().unwrap()];
    let printed = || run(&words);
    assert!(!String::from_utf8_lossy(&printed().stdout).contains("PAUSED"));
    let file = folder.path().join("paused");
    fs::write(&file, "p99 of search\n").unwrap();
    let paused = printed();
    let text = String::from_utf8_lossy(&paused.stdout);
    assert!(text.contains("PAUSED: p99 of search; all fences are frozen"), "{paused:?}");
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    assert_eq!(printed().status.code(), Some(1));
}

/// Goal: a program that does not exist fails before anything starts. Method: a name and a path.
#[test]
fn a_missing_program_is_not_started() {
    for program in ["no-such-program", "/no/such/program"] {
        let output = run(&["run", "--lanes", "0:1", "--", program]);
        assert_eq!(output.status.code(), Some(127), "{output:?}");
        let stderr = stderr_of(&output);
        assert!(stderr.starts_with("elfen: program ") && stderr.lines().count() == 1, "{stderr}");
    }
}

/// Goal: if the reader of the output ends early, as in `elfen lanes | head -1`, the command
/// succeeds silently. Method: a pipe whose reading end is closed before the command starts.
#[test]
fn a_closed_pipe_is_no_failure() {
    for words in [&["lanes"][..], &["lanes", "--json"], &["--help"]] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = elfen(words).stdout(writer).stderr(Stdio::piped()).output().unwrap();
        assert_eq!((output.status.code(), stderr_of(&output)), (Some(0), ""), "{words:?}");
    }
}

/// Goal: an output that cannot be written is a failure, and a full stderr causes no panic. Method:
/// /dev/full.
#[test]
fn a_full_disk_is_a_failure() {
    let full = || File::create("/dev/full").expect("Linux has /dev/full");
    let output = elfen(&["lanes"]).stdout(full()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr_of(&output).starts_with("elfen: writing the output: No space left"));
    let refused = elfen(&["lanes", "--lanes", "0:0"]).stderr(full()).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
}

/// Goal: a benchmark that Ctrl-C ends has status 130. Method: a signal during a measurement.
#[test]
fn an_interrupted_benchmark_has_status_130() {
    // The signal arrives long before the benchmark has made this number of naps.
    let mut command = elfen(&["lab", "bench", "nap", "--runs", "10000"]);
    heed_sigint(&mut command);
    let benchmark = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let benchmark = benchmark.expect("elfen starts");
    std::thread::sleep(Duration::from_millis(200));
    let pid = i32::try_from(benchmark.id()).unwrap();
    // SAFETY: kill takes numbers. This test has not waited for its child yet, so no other process
    // has the id.
    unsafe { libc::kill(pid, libc::SIGINT) };
    let status = benchmark.wait_with_output().unwrap().status;
    let in_a_shell = status.code().or(status.signal().map(|signal| 128 + signal));
    assert_eq!(in_a_shell, Some(130), "{status}");
}

/// Goal: the table of exit statuses is complete. Method: compare the help with `Status`.
#[test]
fn help_lists_every_status() {
    let help = String::from_utf8(run(&["--help"]).stdout).expect("UTF-8");
    for status in ["0", "1", "2", "3", "126", "127", "130"] {
        assert!(help.lines().any(|line| line.starts_with(&format!("  {status:5}  "))), "{status}");
    }
}

/// Goal: an option takes precedence over its variable, and an error about a variable's value names
/// the variable. Method: the lanes of a recorded machine, and an invalid nap.
#[test]
fn variables_are_defaults_of_options() {
    let recorded = Path::new(env!("CARGO_TARGET_TMPDIR")).join("two-cpus");
    fs::write(&recorded, "/sys/devices/system/cpu/online: 0-1\naffinity: 0-1\n").unwrap();
    let lanes = |words: &[&str]| {
        let machine = ["lanes", "--json", "--machine", recorded.to_str().unwrap()];
        let words = [&machine[..], words].concat();
        let output = elfen(&words).env("ELFEN_LANES", "0:1").output().unwrap();
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    assert!(lanes(&[]).contains("\"0:1\"") && lanes(&["--lanes", "1:0"]).contains("\"1:0\""));
    let snooze = |words: &[&str]| {
        let output = elfen(words).env("ELFEN_NAP", "snooze").output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        stderr_of(&output).to_owned()
    };
    let untyped = snooze(&["run", "--", "true"]);
    assert!(untyped.starts_with("elfen: variable ELFEN_NAP: invalid value 'snooze'"), "{untyped}");
    let typed = snooze(&["run", "--nap", "doze", "--", "true"]);
    assert!(typed.starts_with("elfen: arguments: invalid value 'doze'"), "{typed}");
}

/// Goal: the help lists every variable that the sources read. Method: every name in the sources
/// that begins with ELFEN_.
#[test]
fn help_lists_every_variable() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let folders = [
        "elfen",
        "elfen-console",
        "elfen-fence",
        "elfen-machine",
        "elfen-run",
        "elfen-instrument",
        "elfen-rt",
        "elfen-shim",
        "elfen-tailor",
        "experiments",
        "kernel",
    ];
    let mut folders: Vec<PathBuf> = folders.map(|folder| root.join(folder).join("src")).into();
    let mut named = BTreeSet::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            let begins = text.match_indices("\"ELFEN_").map(|(at, _)| &text[at + 1..]);
            named.extend(begins.filter_map(|rest| Some(rest.split_once('"')?.0.to_owned())));
        }
    }
    let is_name = |name: &String| {
        name.len() > "ELFEN_".len() && name.bytes().all(|b| b.is_ascii_uppercase() || b == b'_')
    };
    let help = String::from_utf8(run(&["--help"]).stdout).expect("UTF-8");
    let is_listed = |name: &String| help.contains(&format!("  {name} "));
    let missing: Vec<&String> =
        named.iter().filter(|name| is_name(name) && !is_listed(name)).collect();
    assert!(named.contains("ELFEN_LANES") && missing.is_empty(), "{missing:?}");
    assert!(help.contains("\nExit status:\n  0 ") && help.contains("NO_COLOR"));
}

fn generate(what: &str, folder: &Path) {
    let output = run(&["generate", what, folder.to_str().unwrap()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let listed = String::from_utf8(output.stdout).unwrap();
    assert!(listed.lines().count() > 2 && listed.lines().all(|file| Path::new(file).is_file()));
}

/// The subcommands that `--help` lists.
fn subcommands() -> Vec<String> {
    let help = String::from_utf8(run(&["--help"]).stdout).unwrap();
    let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let listed = listed.take_while(|line| !line.is_empty());
    let name = |line: &str| Some(line.strip_prefix("  ")?.split(' ').next()?.to_owned());
    listed.filter_map(name).filter(|name| !name.is_empty() && name != "help").collect()
}

/// Goal: man pages list all commands and options. Method: write the pages into a folder, and
/// compare them with `--help`. `packaging/test` tests `man`.
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

/// Goal: shells complete all commands and options, except hidden ones. Method: bash loads the
/// completions. `packaging/test` tests other shells.
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

/// Goal: pages that cannot be written are a failure. Method: a folder that is missing.
#[test]
fn a_missing_folder_is_a_failure() {
    let output = run(&["generate", "man", "/nonexistent"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stderr.starts_with(b"elfen: writing into \"/nonexistent\": No such file"));
}
