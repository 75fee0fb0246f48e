//! Goal: `elfen lab bench fdo` compiles a program by each kind of profile, and compares them.

use std::process::{Command, Output};

fn fdo(words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfen-lab"));
    command.args(["bench", "fdo"]).args(words).output().unwrap()
}

fn error(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

const SOURCE: &str = r#"
#include <stdio.h>
#include <stdlib.h>
static long steps(long n) {
    long count = 0;
    for (; n != 1; count++)
        n = n % 2 ? 3 * n + 1 : n / 2;
    return count;
}
int main(int count, char **words) {
    long most = 0, until = atol(words[count - 1]);
    for (long n = 1; n < until; n++)
        most = steps(n) > most ? steps(n) : most;
    printf("%ld\n", most);
}
"#;

#[test]
#[ignore = "needs clang, llvm-profdata, and root or kernel.perf_event_paranoid of at most 2"]
fn a_program_is_compiled_by_each_profile() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("steps.c");
    std::fs::write(&source, SOURCE).unwrap();
    let compile = format!("clang-14 -O2 {{flags}} {} -o {{output}}", source.display());
    let words = ["--compile", &compile, "--profdata", "llvm-profdata-14", "--runs", "1", "--json"];
    let output = fdo(&[&words[..], &["--", "2000000"]].concat());
    assert!(output.status.success(), "{}", error(&output));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = report["times"].as_array().unwrap();
    let names: Vec<&str> = rows.iter().map(|row| row["profile"].as_str().unwrap()).collect();
    assert_eq!(names, ["no profile", "bursts", "everything", "counters of clang"]);
    assert!(rows.iter().all(|row| row["ns"]["median"].as_f64() > Some(0.0)), "{report}");
}

#[test]
fn what_cannot_be_compiled_is_refused_with_a_reason() {
    let incomplete = fdo(&["--compile", "cc {flags} a.c"]);
    assert_eq!(incomplete.status.code(), Some(2));
    assert!(error(&incomplete).contains("it has no {output}"), "{}", error(&incomplete));
    let failing = fdo(&["--compile", "echo an error >&2; false {flags} {output}"]);
    assert_eq!(failing.status.code(), Some(1));
    assert!(error(&failing).contains("compiling: an error"), "{}", error(&failing));
}
