//! Goal: `elfen shim` observes what a program does, and exports it for other tools. Method:
//! programs with tags and globals.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::alone::command_with_its_library;
use crate::needs;
use crate::stage::{KilledOnDrop, build, json, kill, observe, said, shim, text, until};

const TAGS: &str = r#"
#include "elfen_tag.h"
#ifndef TURNS
#define TURNS 3000
#define LENGTH 10000
#endif
static void spin(long n) { for (volatile long i = 0; i < n; i++) ; }
int main(void)
{
	for (int turn = 0; turn < TURNS; turn++) {
		elfen_u32 before = elfen_tag("parse, and more");
		elfen_value((elfen_u64)turn);
		spin(3 * LENGTH);
		elfen_tag("reply");
		spin(LENGTH);
		elfen_tag_back(before);
	}
	return 7;
}
"#;

/// A program that also writes its globals in two hundred forked children, and reports if the memory
/// of parent and child is mixed up.
const FORKS: &str = r#"
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>
unsigned long hits;
unsigned short small = 5;
const long fixed = 3;
__thread long own;
int main(void)
{
	for (unsigned long round = 1; round <= 200; round++) {
		hits = round;
		own = fixed;
		pid_t child = fork();
		if (child == 0) {
			if (hits != round || small != 5)
				_exit(2);
			hits = 1000000 + round;
			small = 9;
			_exit(hits == 1000000 + round && small == 9 ? 0 : 3);
		}
		int status = 0;
		if (child < 0 || waitpid(child, &status, 0) != child || status != 0 ||
		    hits != round || small != 5) {
			printf("mixed in round %lu, status %d\n", round, status);
			return 1;
		}
	}
	puts("none mixed");
	return 0;
}
"#;

fn names<'a>(summary: &'a Value, signal: &str) -> Vec<&'a str> {
    let tags = summary["tags"].as_array().unwrap().iter();
    tags.filter(|tag| tag["signal"] == signal).map(|tag| tag["name"].as_str().unwrap()).collect()
}

#[test]
fn tags_are_seen_recorded_and_exported() {
    needs::two_cpus();
    let folder = tempfile::tempdir().unwrap();
    let program = build(folder.path(), "tags", TAGS, &[]);
    let file = folder.path().join("run.shim");
    let words = ["--json", "--watch", "tag", "--watch", "value", "-o", file.to_str().unwrap()];
    let output = observe(&words, &program);
    let summary = json(&output);
    assert_eq!((output.status.code(), &summary["exit_status"]), (Some(7), &Value::from(7)));
    let seen = names(&summary, "tag");
    assert!(seen.contains(&"parse, and more") && seen.contains(&"reply"), "{summary:#}");
    let value = summary["signals"].as_array().unwrap().iter().find(|one| one["name"] == "value");
    assert!(value.unwrap()["values"]["most"].as_u64().unwrap() < 3000, "{summary:#}");
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);

    let path = file.to_str().unwrap();
    let shown = json(&shim(&["show", path, "--json"]));
    assert_eq!(shown["tags"], summary["tags"], "the file has the same tags");
    let csv = text(shim(&["export", path]));
    for tag in summary["tags"].as_array().unwrap().iter().filter(|tag| tag["signal"] == "tag") {
        let name = match tag["name"].as_str().unwrap() {
            "parse, and more" => "\"parse, and more\"".to_owned(),
            other => other.to_owned(),
        };
        let prefix = "tag,";
        let rows: Vec<&str> = csv
            .lines()
            .filter(|row| row.starts_with(prefix) && row.contains(&format!(",{name},")))
            .collect();
        let sum: u64 = rows
            .iter()
            .map(|row| {
                let mut fields = row.split(',').skip(1).map(|field| field.parse::<u64>());
                let (start, end) = (fields.next().unwrap(), fields.next().unwrap());
                end.unwrap() - start.unwrap()
            })
            .sum();
        let time = tag["time_ns"].as_u64().unwrap();
        // The ends of each row are rounded down to whole nanoseconds.
        assert!(sum.abs_diff(time) <= rows.len() as u64 + 1, "{name}: {sum} and {time}");
    }
    let trace = json(&shim(&["export", path, "--as", "perfetto"]));
    assert!(trace["traceEvents"].as_array().unwrap().iter().any(|event| event["name"] == "reply"));
    let folded = text(shim(&["export", path, "--as", "folded"]));
    assert!(folded.lines().any(|line| line.contains(";tag;reply ")), "{folded}");
    let profile = json(&shim(&["export", path, "--as", "firefox"]));
    assert_eq!(weights(&profile, "tag", "reply"), time_of(&summary, "reply"));
    // A truncated file is read up to its last complete chunk, with a warning. An empty file is
    // refused.
    let whole = fs::read(&file).unwrap();
    fs::write(&file, &whole[..whole.len() - 3]).unwrap();
    let cut = shim(&["show", path, "--json"]);
    assert!(said(&cut).contains("truncated"));
    assert_eq!(json(&cut)["tags"], summary["tags"]);
    fs::write(&file, "").unwrap();
    assert_eq!(shim(&["show", path]).status.code(), Some(1));
}

/// The time of a tag in nanoseconds, rounded down to ten microseconds.
fn time_of(summary: &Value, name: &str) -> u64 {
    let mut tags = summary["tags"].as_array().unwrap().iter();
    let tag = tags.find(|tag| tag["signal"] == "tag" && tag["name"] == name).unwrap();
    tag["time_ns"].as_u64().unwrap() / 10_000 * 10
}

/// The time of a tag in a profile, rounded in the same way. Also checks that all columns of each
/// table have the same length.
fn weights(profile: &Value, thread: &str, name: &str) -> u64 {
    let shared = &profile["shared"];
    let tables = ["funcTable", "frameTable", "stackTable", "nativeSymbols", "resourceTable"];
    let thread = profile["threads"].as_array().unwrap().iter().find(|one| one["name"] == thread);
    let samples = &thread.unwrap()["samples"];
    for table in tables.map(|name| &shared[name]).into_iter().chain([samples]) {
        let length = usize::try_from(table["length"].as_u64().unwrap()).unwrap();
        let columns = table.as_object().unwrap().values().filter_map(Value::as_array);
        assert!(columns.into_iter().all(|column| column.len() == length), "{table}");
    }
    let number = |value: &Value| usize::try_from(value.as_u64().unwrap()).unwrap();
    let name_of = |stack: &Value| {
        let frame = number(&shared["stackTable"]["frame"][number(stack)]);
        let function = number(&shared["frameTable"]["func"][frame]);
        &shared["stringArray"][number(&shared["funcTable"]["name"][function])]
    };
    let stacks = samples["stack"].as_array().unwrap().iter();
    let rows = stacks.zip(samples["weight"].as_array().unwrap());
    let of_name = rows.filter(|(stack, _)| !stack.is_null() && name_of(stack) == name);
    let ms: f64 = of_name.map(|(_, weight)| weight.as_f64().unwrap()).sum();
    // Rounded to ten microseconds, because the ends of each row are rounded down to whole
    // nanoseconds.
    format!("{:.0}", (ms * 100.0).floor() * 10.0).parse().unwrap()
}

#[test]
fn globals_are_shared_and_forks_stay_apart() {
    needs::two_cpus();
    let folder = tempfile::tempdir().unwrap();
    let program = build(folder.path(), "forks", FORKS, &[]);
    let output = observe(&["--watch", "hits", "--watch", "small", "--period", "max"], &program);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("none mixed"), "{output:?}");
    assert!(text.contains("hits") && !text.contains("were not shared"), "{text}");
    let rows: Vec<&str> = text.lines().filter(|line| line.starts_with("hits")).collect();
    assert!(rows.iter().all(|line| !line.contains("10000")), "a child's value: {text}");
    for (watch, why) in [
        ("fixed", "read-only"),
        ("own", "thread-local"),
        ("none", "no object"),
        ("small+1:u16", "does not fit"),
    ] {
        let output = observe(&["--watch", watch], &program);
        let said = said(&output);
        assert!(output.status.code() == Some(2) && said.contains(why), "{watch}: {said}");
    }
}

/// Goal: a global of a C++ program is found by its name in the source. Method: a C global with a
/// mangled C++ name.
#[test]
fn a_cpp_global_is_found_by_its_own_name() {
    needs::two_cpus();
    let folder = tempfile::tempdir().unwrap();
    let source = "volatile unsigned long hits __asm__(\"_ZN5queue5depthE\");\n\
                  int main(void) { while (hits < 50000000) hits++; return 0; }\n";
    let program = build(folder.path(), "cpp", source, &[]);
    for name in ["queue::depth", "depth"] {
        let summary = json(&observe(&["--json", "--watch", name], &program));
        let signal = &summary["signals"][0];
        assert_eq!((&signal["name"], &signal["source"]), (&name.into(), &"shared-at-start".into()));
        assert_eq!(signal["values"]["last"], 50_000_000, "{summary:#}");
    }
}

#[test]
fn what_cannot_work_is_refused_in_one_line() {
    needs::two_cpus();
    let none = Path::new("/nonexistent/program");
    let cases: [(&[&str], &Path, i32); 6] = [
        (&["--period", "0us"], Path::new("true"), 2),
        (&["--cpu", "0", "--observer-cpu", "0"], Path::new("true"), 2),
        (&["--observer-cpu", "8000"], Path::new("true"), 2),
        (&["--watch", "0x1004:u64"], Path::new("true"), 2),
        (&[], none, 1),
        (&["--watch", "function"], Path::new("true"), 1),
    ];
    for (words, program, status) in cases {
        let output = observe(words, program);
        let said = said(&output);
        assert_eq!(output.status.code(), Some(status), "{words:?}: {said}");
        let lines = said.lines().filter(|line| line.starts_with("elfen: ")).count();
        assert_eq!((lines, said.lines().count()), (1, 1), "{words:?}: {said}");
    }
    for pid in ["2", "999999999"] {
        let output = shim(&["-p", pid]);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
    }
}

/// Goal: without privileges and without options, the output fits on one screen and suggests what
/// else could be observed.
#[test]
fn a_first_try_is_one_screen() {
    needs::two_cpus();
    let folder = tempfile::tempdir().unwrap();
    let elfen = folder.path().join("elfen");
    fs::copy(env!("CARGO_BIN_EXE_elfen"), &elfen).unwrap();
    for path in [folder.path(), &elfen] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let mut command = Command::new(&elfen);
    command.args(["shim", "--", "sh", "-c", "i=0; while [ $i -lt 30000 ]; do i=$((i+1)); done"]);
    // SAFETY: geteuid takes no arguments.
    if unsafe { libc::geteuid() } == 0 {
        command.uid(65_534).gid(65_534);
    }
    let text = text(command.current_dir("/").output().unwrap());
    assert!(text.contains("More can be observed:"), "{text}");
    assert!(text.lines().count() <= 24, "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
}

/// Makes this process real-time. Also restores the default action of SIGINT, because the test may
/// have inherited that SIGINT is ignored.
fn become_real_time() -> std::io::Result<()> {
    // SAFETY: SIG_DFL installs no handler.
    unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) };
    let lowest = libc::sched_param { sched_priority: 1 };
    // SAFETY: `lowest` is a live sched_param.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const lowest) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Goal: an observer runs at normal priority, whatever the class of its command. The command's main
/// thread ends the observer, and a real-time observer would keep that thread off their common CPU.
/// Method: a real-time command, which requires root, and the class of its observer in /proc.
#[test]
#[ignore = "needs root"]
fn an_observer_is_an_ordinary_thread() {
    needs::two_cpus();
    needs::root();
    let mut command = command_with_its_library();
    command.args(["shim", "--", "sleep", "600"]).stdout(Stdio::null());
    // SAFETY: between fork and exec, `become_real_time` makes only system calls.
    unsafe { command.pre_exec(become_real_time) };
    let shim = KilledOnDrop(command.spawn().unwrap());
    let class = || {
        let tasks = fs::read_dir(format!("/proc/{}/task", shim.0.id())).unwrap();
        tasks.flatten().find_map(|task| {
            let stat = fs::read_to_string(task.path().join("stat")).ok()?;
            let (name, rest) = stat.rsplit_once(')')?;
            // The class is field 41 of the line, and two fields precede `rest`.
            let class = rest.split_whitespace().nth(38)?.parse::<i32>().ok()?;
            name.ends_with("(elfen-observer").then_some(class)
        })
    };
    until("an ordinary observer", || class() == Some(libc::SCHED_OTHER));
    kill(shim.0.id(), libc::SIGINT);
    let mut shim = shim;
    shim.0.wait().unwrap();
}

/// Goal: `--live` shows every second what ran in it, and prints the usual summary at the end.
/// Method: a shell that runs until it was shown twice, without a terminal.
#[test]
fn each_second_is_shown_while_it_goes_on() {
    needs::two_cpus();
    let mut command = command_with_its_library();
    command.args(["shim", "--live", "--", "sh", "-c", "read line; exit 4"]);
    let mut shown = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(shown.stdout.take().unwrap()).lines().map(Result::unwrap);
    let seconds = lines.by_ref().filter(|line| line.contains("samples in the last second"));
    assert_eq!(seconds.take(2).count(), 2);
    drop(shown.stdin.take());
    let text: String = lines.map(|line| line + "\n").collect();
    assert_eq!(shown.wait().unwrap().code(), Some(4), "{text}");
    assert!(text.contains("More can be observed:") && text.contains("share"), "{text}");
    let refused = command_with_its_library().args(["shim", "--live", "--json"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
}

/// Goal: with --keep-last, a file has only the end of a run. With --keep samples, each sample is a
/// row. Method: a recording of each kind, read back.
#[test]
fn the_end_alone_or_every_sample_is_kept() {
    needs::two_cpus();
    let folder = tempfile::tempdir().unwrap();
    let program = build(folder.path(), "tags", TAGS, &[]);
    let file = folder.path().join("run.shim");
    let path = file.to_str().unwrap();
    let words = ["--json", "--watch", "tag", "--keep-last", "5ms", "-o", path];
    let output = observe(&words, &program);
    let printed = json(&output);
    let shown = json(&shim(&["show", path, "--json"]));
    assert_eq!((&shown["tags"], &shown["gaps"]), (&printed["tags"], &printed["gaps"]));
    let time = |key: &str| shown[key].as_u64().unwrap();
    assert!(time("observed_ns") + time("gap_ns") <= 5_000_000, "{shown:#}");

    let words = ["--watch", "tag", "--keep", "samples", "--period", "100us", "-o", path];
    let output = observe(&words, &program);
    assert!(said(&output).contains("--memory is full after"), "{output:?}");
    let csv = text(shim(&["export", path]));
    let kept = csv.lines().skip(2).filter(|row| !row.contains("(gap)"));
    let mut samples = kept.map(|row| row.rsplit(',').next().unwrap());
    assert!(samples.all(|samples| samples == "1"), "{csv}");
}

/// Goal: --keep histogram needs little memory for any duration. Method: a program and a memory size
/// with which a recording ends early without this option.
#[test]
fn sums_need_little_memory_however_long_it_takes() {
    needs::two_cpus();
    let folder = tempfile::tempdir().unwrap();
    // Many changes per millisecond, because other work on this machine may leave little time to run
    // and observe the program.
    let options = ["-DTURNS=5000000", "-DLENGTH=100"];
    let program = build(folder.path(), "quick", TAGS, &options);
    let words = ["--json", "--watch", "tag", "--period", "300ns", "--memory", "1KB"];
    let full = json(&observe(&words, &program));
    let ended = full["ended"].as_str().unwrap();
    assert!(ended.starts_with("its memory is full"), "{full:#}");

    let words = [&words[..], &["--keep", "histogram"]].concat();
    let output = observe(&words, &program);
    let summary = json(&output);
    assert_eq!((output.status.code(), &summary["ended"]), (Some(7), &"".into()), "{summary:#}");
    let changes = |summary: &Value| summary["signals"][0]["new_values"].as_u64().unwrap();
    assert!(changes(&summary) > changes(&full), "{summary:#}");
    assert!(summary["gaps"].as_u64() >= Some(1), "no samples are taken while runs are added up");
    let tags = summary["tags"].as_array().unwrap();
    let share: f64 = tags.iter().map(|tag| tag["share_percent"].as_f64().unwrap()).sum();
    assert!((share - 100.0).abs() < 0.01, "{summary:#}");
    assert_eq!(names(&summary, "tag")[..2], ["parse, and more", "reply"], "{summary:#}");
    for tag in tags {
        let columns = tag["histogram"].as_array().into_iter().flatten();
        let runs: u64 = columns.map(|column| column[2].as_u64().unwrap()).sum();
        assert_eq!(Some(runs), tag["runs"].as_u64(), "{tag:#}");
    }
    let file = folder.path().join("run.shim");
    let words = [&words[..], &["-o", file.to_str().unwrap()]].concat();
    let refused = observe(&words, &program);
    assert_eq!(refused.status.code(), Some(2));
    assert!(said(&refused).contains("it keeps no runs"));
}
