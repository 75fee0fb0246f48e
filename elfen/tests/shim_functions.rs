//! Goal: `elfen shim` attributes time to the right function if functions report entries and
//! returns, and prints a note if they report only entries. Method: a function that works for five
//! parts, calls a function that works for one part, and works for five parts again. 91 % of the
//! time are its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

mod alone;
mod needs;
mod preload;

use alone::command_with_its_library;
use preload::library;

/// Work is a number of iterations, not a time: a clock advances also while the program does not
/// run. An iteration is a chain of multiplications, whose time does not depend on the loop's
/// alignment. The shortest part takes about 2 us. A part that is not longer than a line transfer
/// between the CPUs could be missed, or sampled twice.
const SANDWICH: &str = r#"
__attribute__((always_inline)) static inline void work(long turns)
{
	long chain = turns;
	for (long turn = 0; turn < turns; turn++)
		__asm__ volatile("imul %0, %0; imul %0, %0; imul %0, %0"
				 : "+r"(chain));
}
__attribute__((noinline)) void filling(long turns)
{
	work(turns);
}
__attribute__((noinline)) void bread(long turns)
{
	work(5 * turns);
	filling(turns);
	work(5 * turns);
}
int main(void)
{
	for (long n = 0; n < 20000; n++)
		bread(600);
	return 3;
}
"#;

const RETURNS: &str = "-mfunction-return=thunk-extern";

fn stage() -> tempfile::TempDir {
    needs::two_cpus();
    tempfile::tempdir().unwrap()
}

fn build(folder: &Path, name: &str, options: &[&str]) -> PathBuf {
    build_of(SANDWICH, folder, name, options)
}

fn build_of(source: &str, folder: &Path, name: &str, options: &[&str]) -> PathBuf {
    let (file, program) = (folder.join(format!("{name}.c")), folder.join(name));
    fs::write(&file, source).unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-o"]).arg(&program).args(options).arg(&file);
    if options.contains(&RETURNS) {
        compiler.arg("-L").arg(library()).arg("-lelfen_return");
    }
    assert!(compiler.status().unwrap().success(), "{name}");
    program
}

/// A program whose forked child does most of the work.
const FORKS: &str = r#"
#include <sys/wait.h>
#include <unistd.h>
__attribute__((noinline)) void of_the_child(void)
{
	for (volatile long turn = 0; turn < 600000000; turn++)
		;
}
__attribute__((noinline)) void of_the_parent(void)
{
	for (volatile long turn = 0; turn < 200000000; turn++)
		;
}
int main(void)
{
	of_the_parent();
	if (fork() == 0) {
		of_the_child();
		_exit(0);
	}
	wait(NULL);
	return 3;
}
"#;

fn shim(words: &[&str], program: &Path) -> Output {
    let mut command = command_with_its_library();
    command.arg("shim").args(words).arg("--").arg(program).stdin(Stdio::null());
    command.output().unwrap()
}

fn summary(words: &[&str], program: &Path) -> Value {
    let output = shim(&[&["--json"], words].concat(), program);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn share(summary: &Value, name: &str) -> f64 {
    let mut tags = summary["tags"].as_array().unwrap().iter();
    let found = tags.find(|tag| tag["signal"] == "function" && tag["name"] == name);
    found.map_or(0.0, |tag| tag["share_percent"].as_f64().unwrap())
}

#[test]
#[ignore = "needs GCC, for room at the entries of functions"]
fn a_caller_has_its_time_back_when_what_it_called_returns() {
    let folder = stage();
    let room = "-fpatchable-function-entry=43";
    for (name, room) in [("both", room), ("jump", "-fpatchable-function-entry=5")] {
        let program = build(folder.path(), name, &[room, RETURNS]);
        let found = summary(&["--period", "300ns"], &program);
        assert_eq!(found["returns"], Value::from(true), "{name}: {found:#}");
        let bread = share(&found, "bread");
        assert!((89.0..=93.0).contains(&bread), "{found:#}: {name} {bread}");
        assert!(found["entries"].as_u64() >= Some(3), "{name}: {found:#}");
    }

    let program = build(folder.path(), "entries", &[room]);
    let found = summary(&["--period", "300ns"], &program);
    assert_eq!(found["returns"], Value::from(false), "{found:#}");
    assert!(share(&found, "bread") <= 50.0, "{found:#}");
    let source = |source: &str| {
        let mut signals = found["signals"].as_array().unwrap().iter();
        signals.any(|signal| signal["name"] == "function" && signal["source"] == source)
    };
    assert!(source("entries"), "{found:#}");
    let file = folder.path().join("entries.shim");
    let output = shim(&["-o", file.to_str().unwrap()], &program);
    let text = String::from_utf8(output.stdout).unwrap();
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(text.contains("callers' shares are too low; build it with"), "{text}");
    assert!(text.contains("and link it with libelfen_return.a"), "{text}");
    let page = folder.path().join("entries.html");
    let mut report = Command::new(env!("CARGO_BIN_EXE_elfen"));
    let report =
        report.args(["lab", "report"]).arg(&file).arg("--html").arg(&page).output().unwrap();
    assert!(report.status.success(), "{report:?}");
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains("shares are too low; build it with"), "its page has the note too");
}

/// Goal: a rate of calls counts each call, and a program that cannot be patched is observed without
/// functions.
#[test]
#[ignore = "needs GCC, for room at the entries of functions"]
fn calls_are_counted_and_static_programs_go_without_functions() {
    let folder = stage();
    let room = "-fpatchable-function-entry=43";
    let program = build(folder.path(), "both", &[room, RETURNS]);
    let found = summary(&["--rate", "calls", "--watch", "function"], &program);
    let rates = found["rates"].as_array().unwrap();
    assert!(rates.iter().any(|rate| rate["name"] == "calls per us"), "{found:#}");
    assert!(found["dte"]["kept"].as_u64() > Some(0), "{found:#}");

    // Functions are not patched if only the task is watched.
    let found = summary(&["--watch", "task"], &program);
    assert_eq!(found["entries"], Value::from(0), "{found:#}");

    let fixed = build(folder.path(), "fixed", &[room, "-static"]);
    let output = shim(&[], &fixed);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    let refused = shim(&["--watch", "function"], &fixed);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(1) && said.contains("statically linked"), "{said}");
}

/// Goal: a forked child is observed only with --follow.
#[test]
#[ignore = "needs root and GCC"]
fn children_are_observed_where_that_is_asked_for() {
    needs::root();
    let folder = stage();
    let room = "-fpatchable-function-entry=43";
    let program = build_of(FORKS, folder.path(), "forks", &[room, RETURNS, "-O0"]);
    let alone = summary(&["--watch", "function"], &program);
    assert_eq!(share(&alone, "of_the_child"), 0.0, "{alone:#}");
    assert!(share(&alone, "of_the_parent") > 60.0, "{alone:#}");
    // The child works three times as long. Not all of that is observed while other work runs on the
    // lanes.
    let both = |_| {
        let followed = summary(&["--watch", "function", "--follow"], &program);
        ["of_the_parent", "of_the_child"].map(|name| share(&followed, name))
    };
    let sees_both = |[parent, child]: &[f64; 2]| *parent > 5.0 && child > parent;
    assert!((0..5).map(both).any(|shares| sees_both(&shares)), "five times");
}
