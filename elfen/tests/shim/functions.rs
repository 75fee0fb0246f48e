//! Goal: `elfen shim` attributes time to the right function if functions report entries and
//! returns, and prints a note if they report only entries. Method: a function that works for five
//! parts, calls a function that works for one part, and works for five parts again. So 91 % of the
//! time is its own.

use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

use crate::needs;
use crate::stage::{ROOM, build, json, observe, report_page, said};

/// Work is a number of iterations and not a time, because a clock also advances while the program
/// does not run. An iteration is a chain of multiplications, whose time does not depend on the
/// loop's alignment. The shortest part takes about 2 us. A part shorter than a line transfer
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

fn stage() -> TempDir {
    needs::two_cpus();
    tempfile::tempdir().unwrap()
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

fn summary(words: &[&str], program: &Path) -> Value {
    let output = observe(&[&["--json"], words].concat(), program);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    json(&output)
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
    let hooks = ["-finstrument-functions", "-finstrument-functions-exclude-function-list=work"];
    for (name, options) in [
        ("both", [ROOM, RETURNS]),
        ("jump", ["-fpatchable-function-entry=5", RETURNS]),
        ("hooks", hooks),
    ] {
        let program = build(folder.path(), name, SANDWICH, &options);
        let found = summary(&["--period", "300ns"], &program);
        assert_eq!(found["returns"], Value::from(true), "{name}: {found:#}");
        // Without the time before the first function, which is long on a busy machine.
        let [bread, filling] = ["bread", "filling"].map(|name| share(&found, name));
        let part = 100.0 * bread / (bread + filling);
        assert!((89.0..=93.0).contains(&part), "{found:#}: {name} {part}");
        assert!(name == "hooks" || found["entries"].as_u64() >= Some(3), "{name}: {found:#}");
    }

    let program = build(folder.path(), "entries", SANDWICH, &[ROOM]);
    let found = summary(&["--period", "300ns"], &program);
    assert_eq!(found["returns"], Value::from(false), "{found:#}");
    assert!(share(&found, "bread") <= 50.0, "{found:#}");
    let source = |source: &str| {
        let mut signals = found["signals"].as_array().unwrap().iter();
        signals.any(|signal| signal["name"] == "function" && signal["source"] == source)
    };
    assert!(source("entries"), "{found:#}");
    let file = folder.path().join("entries.shim");
    let output = observe(&["-o", file.to_str().unwrap()], &program);
    let text = String::from_utf8(output.stdout).unwrap();
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(text.contains("callers' shares are too low; build it with"), "{text}");
    assert!(text.contains("and link it with libelfen_return.a"), "{text}");
    let page = report_page(&file);
    assert!(page.contains("shares are too low; build it with"), "its page has the note too");
}

/// Goal: a rate of calls counts each call, and a program that cannot be patched is observed without
/// functions.
#[test]
#[ignore = "needs GCC, for room at the entries of functions"]
fn calls_are_counted_and_static_programs_go_without_functions() {
    let folder = stage();
    let program = build(folder.path(), "both", SANDWICH, &[ROOM, RETURNS]);
    let found = summary(&["--rate", "calls", "--watch", "function"], &program);
    let rates = found["rates"].as_array().unwrap();
    assert!(rates.iter().any(|rate| rate["name"] == "calls per us"), "{found:#}");
    assert!(found["dte"]["kept"].as_u64() > Some(0), "{found:#}");

    // Functions are not patched if only the task is watched.
    let found = summary(&["--watch", "task"], &program);
    assert_eq!(found["entries"], Value::from(0), "{found:#}");

    let fixed = build(folder.path(), "fixed", SANDWICH, &[ROOM, "-static"]);
    let output = observe(&[], &fixed);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    let refused = observe(&["--watch", "function"], &fixed);
    let said = said(&refused);
    assert!(refused.status.code() == Some(1) && said.contains("statically linked"), "{said}");
}

/// Goal: a forked child is observed only with --follow.
#[test]
#[ignore = "needs root and GCC"]
fn children_are_observed_where_that_is_asked_for() {
    needs::root();
    let folder = stage();
    let program = build(folder.path(), "forks", FORKS, &[ROOM, RETURNS, "-O0"]);
    let alone = summary(&["--watch", "function"], &program);
    assert_eq!(share(&alone, "of_the_child"), 0.0, "{alone:#}");
    assert!(share(&alone, "of_the_parent") > 60.0, "{alone:#}");
    // The child works three times as long. Part of that is not observed while other work runs on
    // the lanes.
    let both = |_| {
        let followed = summary(&["--watch", "function", "--follow"], &program);
        ["of_the_parent", "of_the_child"].map(|name| share(&followed, name))
    };
    let sees_both = |[parent, child]: &[f64; 2]| *parent > 5.0 && child > parent;
    assert!((0..5).map(both).any(|shares| sees_both(&shares)), "five times");
}
