//! Goal: one voice: settings come from flags, variables and files in that order, mistakes in them are told by their place,
//! and help says all there is. Method: the command itself, in folders of the test's own, with --dry-run and `lanes`,
//! which need nothing of the machine but two CPUs.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

struct Home(tempfile::TempDir);

impl Home {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn with(settings: &str) -> Self {
        let home = Self::new();
        fs::create_dir(home.0.path().join("elfen")).unwrap();
        fs::write(home.file(), settings).unwrap();
        home
    }

    fn file(&self) -> PathBuf {
        self.0.path().join("elfen/config.toml")
    }

    fn elfen(&self, words: &[&str], variables: &[(&str, &str)]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_elfen"));
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("ELFEN_") {
                command.env_remove(name);
            }
        }
        command.env("XDG_CONFIG_HOME", self.0.path()).envs(variables.iter().copied()).args(words);
        command.output().expect("elfen starts")
    }

    /// Value and place of a setting.
    fn setting(&self, key: &str, variables: &[(&str, &str)]) -> (Option<String>, Option<String>) {
        let output = self.elfen(&["config", "--json"], variables);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
        let settings = report["settings"].as_array().expect("a list");
        let found = settings.iter().find(|setting| setting["key"] == key).expect("every key");
        let text = |field: &str| found[field].as_str().map(str::to_owned);
        (text("value"), text("place"))
    }
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn a_variable_goes_before_the_file_and_the_file_before_what_is_built_in() {
    let home = Home::with("nap = \"spin\"\n\npolicy = 'fixed-budget'\n");
    let file = home.file().display().to_string();
    let is = |value: &str, place: &str| (Some(value.to_owned()), Some(place.to_owned()));
    assert_eq!(home.setting("nap", &[]), is("spin", &format!("{file}:1")));
    assert_eq!(home.setting("policy", &[]), is("fixed-budget", &format!("{file}:3")));
    let variable = [("ELFEN_NAP", "auto")];
    assert_eq!(home.setting("nap", &variable), is("auto", "ELFEN_NAP"));
    assert_eq!(home.setting("look-every", &[]), (Some("500us".to_owned()), None));
    assert_eq!(home.setting("budget", &[]), (None, None));
    let other = Home::with("nap = 'spin'");
    let instead = [("ELFEN_CONFIG", other.file().display().to_string())];
    let instead = instead.each_ref().map(|(name, file)| (*name, file.as_str()));
    assert_eq!(home.setting("policy", &instead), (Some("borrow-idle".to_owned()), None));
}

/// The usage error that a run in this home ends with; before anything of the machine is asked.
fn refused(home: &Home, words: &[&str], variables: &[(&str, &str)]) -> String {
    let run = ["run", "--lanes", "0:1", "--signal", "service", "--dry-run"];
    let run = [&run[..], words, &["--", "true"]].concat();
    let output = home.elfen(&run, variables);
    assert_eq!(output.status.code(), Some(2), "{words:?}: {}", stderr(&output));
    stderr(&output).lines().last().expect("a line").to_owned()
}

#[test]
fn a_flag_goes_before_all_and_a_parameter_counts_only_under_its_policy() {
    if std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() < 2) {
        println!("skipped: parameters of policies: a pair of lanes takes two CPUs");
        return;
    }
    let home = Home::with("policy = 'fixed-budget'\nbudget = '2ms'\nslo = 'p99=5ms'\n");
    // The policy of the file has its budget, and no use for the SLO beside it: what is missing is a service.
    assert!(refused(&home, &[], &[]).contains("no service was named"));
    assert!(refused(&home, &["--policy", "slo-budget"], &[]).contains("no service was named"));
    let variables = [("ELFEN_POLICY", "slo-budget"), ("ELFEN_BUDGET", "7ms")];
    assert!(refused(&home, &[], &variables).contains("no service was named"));
    // Typed, it is a mistake.
    let typed = refused(&home, &["--policy", "borrow-idle", "--budget", "2ms"], &[]);
    assert!(typed.starts_with("elfen: policy borrow-idle: it has no use for --budget"), "{typed}");
    let incomplete = refused(&Home::with("policy = 'fixed-budget'"), &[], &[]);
    let needs =
        "elfen: policy fixed-budget: it needs --budget; add --budget 2ms; not typed: policy (from ";
    assert!(
        incomplete.starts_with(needs) && incomplete.ends_with("config.toml:1)"),
        "{incomplete}"
    );
}

#[test]
fn lanes_of_the_file_are_the_lanes() {
    let home = Home::with("lanes = ['0:1']");
    let lanes = |home: &Home, words: &[&str]| {
        let recorded = machine();
        let words = [&["lanes", "--json", "--machine", &recorded][..], words].concat();
        let report: Value = serde_json::from_slice(&home.elfen(&words, &[]).stdout).unwrap();
        (report["chosen_by"].clone(), report["pairs"][0]["lanes"].clone())
    };
    assert_eq!(lanes(&home, &[]), ("hand".into(), "0:1".into()));
    assert_eq!(lanes(&home, &["--lanes", "1:0"]), ("hand".into(), "1:0".into()));
    assert_eq!(lanes(&Home::new(), &[]).0, "topology");
}

/// A recorded machine of two CPUs.
fn machine() -> String {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let file = folder.join("two-cpus");
    fs::write(&file, "/sys/devices/system/cpu/online: 0-1\naffinity: 0-1\n").unwrap();
    file.display().to_string()
}

#[test]
fn a_wrong_file_is_told_by_file_line_and_key_and_keeps_nobody_from_help() {
    let mistakes = [
        ("\nnaps = 'spin'", ":2: \"naps\" is no setting: possible are lanes, policy, "),
        ("lanes = '0:0'", ":1: lanes: CPU 0 is named twice"),
        ("budget = '5'", ":1: budget: invalid value '5' for '--budget <TIME>'"),
        ("slo = 'p99'", ":1: slo: invalid value"),
        ("nap = ", ":1: it is no TOML: "),
    ];
    for (settings, expected) in mistakes {
        let home = Home::with(settings);
        let expected = format!("elfen: settings {}{expected}", home.file().display());
        for words in [&["config"][..], &["lanes"], &["run", "--", "true"], &["bench", "service"]] {
            let output = home.elfen(words, &[]);
            let stderr = stderr(&output);
            assert_eq!((output.status.code(), stderr.lines().count()), (Some(2), 1), "{stderr}");
            assert!(stderr.starts_with(&expected), "{words:?}: {stderr}, expected {expected}");
        }
        for words in [&["--help"][..], &["run", "--help"], &["status"]] {
            assert_eq!(home.elfen(words, &[]).status.code(), Some(0), "{words:?}");
        }
    }
    let absent = Home::new().elfen(&["config"], &[("ELFEN_CONFIG", "/nonexistent")]);
    assert_eq!(stderr(&absent).split(": ").nth(1), Some("settings /nonexistent"));
}

#[test]
fn a_wrong_variable_is_told_by_its_name() {
    let home = Home::new();
    let variables = [("ELFEN_NAP", "snooze")];
    for words in [&["config"][..], &["run", "--", "true"]] {
        let output = home.elfen(words, &variables);
        assert_eq!(output.status.code(), Some(2));
        let expected = "elfen: variable ELFEN_NAP: invalid value 'snooze' for '--nap <NAP>'";
        assert!(stderr(&output).starts_with(expected), "{}", stderr(&output));
    }
    let typed = home.elfen(&["run", "--nap", "doze", "--", "true"], &variables);
    assert!(stderr(&typed).starts_with("elfen: arguments: invalid value 'doze'"));
}

/// Every subcommand, with those below it.
fn subcommands(home: &Home, above: &[String]) -> Vec<Vec<String>> {
    let words: Vec<&str> = above.iter().map(String::as_str).chain(["--help"]).collect();
    let help = stdout(&home.elfen(&words, &[]));
    let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let listed = listed.take_while(|line| !line.is_empty());
    let names = listed.filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    let mut all = vec![above.to_vec()];
    for name in names.filter(|name| !name.is_empty() && *name != "help") {
        all.extend(subcommands(home, &[above, &[name.to_owned()]].concat()));
    }
    all
}

/// Goal: whoever asks for help sees how it is called. Method: the help of every subcommand that has none below it.
#[test]
fn every_help_has_an_example() {
    let home = Home::new();
    let all = subcommands(&home, &[]);
    assert!(all.len() > 12, "{all:?}");
    for command in &all {
        let words: Vec<&str> = command.iter().map(String::as_str).chain(["--help"]).collect();
        let help = stdout(&home.elfen(&words, &[]));
        let parent: Vec<&str> = words.iter().copied().take(1).chain(["--help"]).collect();
        let above = stdout(&home.elfen(&parent, &[]));
        let example = |text: &str| text.contains("\nExample:\n") || text.contains("\nExamples:\n");
        let named = above.contains(&format!("elfen {}", command.join(" ")));
        assert!(example(&help) || (example(&above) && named), "elfen {}", words.join(" "));
    }
}

/// Goal: no variable is read that help keeps quiet about. Method: every name that begins with ELFEN_ in the sources.
#[test]
fn help_lists_every_variable() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut folders: Vec<PathBuf> =
        ["elfen", "elfen-instrument", "elfen-rt", "experiments", "kernel"]
            .map(|f| root.join(f).join("src"))
            .into();
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
    let is_name = |name: &String| name.bytes().all(|b| b.is_ascii_uppercase() || b == b'_');
    let help = stdout(&Home::new().elfen(&["--help"], &[]));
    let quiet: Vec<&String> = named
        .iter()
        .filter(|name| is_name(name) && !help.contains(&format!("  {name} ")))
        .collect();
    assert!(named.contains("ELFEN_LANES") && quiet.is_empty(), "{quiet:?}");
    assert!(help.contains("\nExit status:\n  0 ") && help.contains("NO_COLOR"));
}
