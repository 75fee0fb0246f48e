//! `elfen lab bench profile`: how much longer a program takes under `elfen profile record`, and how
//! well bursts fit exact counts. Baseline: the same program without it. All must print the same and
//! end the same way.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

use elfen_console::duration::number;
use elfen_console::programs::find_program;
use elfen_rt::clock::monotonic_ns;

use super::{
    BenchError, BenchReport, Column, Explain, Part, Progress, cases, label, measure, metric, runs,
    with_baseline,
};
use crate::live::scratch::Scratch;

const EXAMPLE: &str = "\
Examples:
  elfen lab bench profile -- gzip -c file
  elfen lab bench profile --runs 20 -- sqlite3 :memory: '.read queries.sql'";

/// Measure what `elfen profile record` costs a program, and how well its bursts fit exact counts
///
/// The program runs in turn without the profiler, by bursts, and by everything. It must print the
/// same each time.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLE)]
pub(crate) struct BenchProfileArgs {
    /// Number of rounds; each round runs the program in all three ways
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = runs())]
    runs: usize,

    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    pub(crate) program: Vec<OsString>,
}

/// What a run of the program has shown.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Run {
    status: Option<i32>,
    output: Vec<u8>,
}

pub(crate) fn run(
    args: &BenchProfileArgs,
    progress: Progress<'_>,
) -> Result<BenchReport, BenchError> {
    let elfen = find_program("elfen").explain("finding elfen", "install the package elfen")?;
    let scratch = Scratch::new(1).explain("a temporary folder", "set TMPDIR")?;
    let output = scratch.path("output");
    let [bursts, exact] = ["bursts", "exact"].map(|name| scratch.path(name));
    let words = |by: &str, file: &Path| {
        let mut words: Vec<OsString> = vec![elfen.clone().into()];
        words.extend(["profile", "record", "-q", "--by", by, "-o"].map(OsString::from));
        words.extend([file.into(), "--".into()]);
        words.extend_from_slice(&args.program);
        words
    };
    let ways = [args.program.clone(), words("bursts", &bursts), words("everything", &exact)];
    let mut first: Option<Run> = None;
    let names = cases("how", ["without the profiler", "by bursts", "by everything"]);
    let cases = with_baseline(names);
    let table = measure(("times", TIMES), &cases, args.runs, progress, |case, _, values| {
        let begun_ns = monotonic_ns();
        let found = execute(&ways[case], &output)?;
        values.add("ns", number(monotonic_ns() - begun_ns));
        let expected =
            first.get_or_insert_with(|| Run { status: found.status, output: found.output.clone() });
        if *expected != found {
            let why = "its output or exit status differs from run to run";
            return Err(BenchError::failed(why, "name a program that always does the same"));
        }
        if case == 1 {
            let report = printed(&elfen, &["report".as_ref(), bursts.as_os_str()])?;
            let part = |name: &str| report[name].as_f64().unwrap_or(0.0);
            values.add("bursts", part("bursts"));
            values.add("cost", part("cost_ns") / part("ran_ns").max(1.0) * 100.0);
        }
        if case == 2 {
            let words = ["compare".as_ref(), exact.as_os_str(), bursts.as_os_str()];
            let compared = printed(&elfen, &words)?;
            for (row, name) in [(1, "edges"), (2, "calls")] {
                values.add(name, compared["rows"][row]["overlap"].as_f64().unwrap_or(0.0));
            }
        }
        Ok(())
    })?;
    Ok(table.into())
}

/// The JSON object that a command of `elfen profile` prints.
pub(crate) fn printed(elfen: &Path, words: &[&OsStr]) -> Result<serde_json::Value, BenchError> {
    let fix = "see what `elfen profile` says about it";
    let mut command = Command::new(elfen);
    let printed = command.arg("profile").args(words).arg("--json").output();
    let printed = printed.explain("running elfen", fix)?.stdout;
    serde_json::from_slice(&printed).map_err(|error| BenchError::failed(error.to_string(), fix))
}

pub(super) fn execute(words: &[OsString], output: &Path) -> Result<Run, BenchError> {
    let fix = "name a program that runs";
    let (program, arguments) =
        words.split_first().ok_or_else(|| BenchError::failed("no program is named", fix))?;
    let file = File::create(output).explain("a temporary file", "free space in TMPDIR")?;
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(file).stderr(Stdio::null());
    let status = command.status().explain(format!("running {}", program.display()), fix)?;
    let output = fs::read(output).explain("a temporary file", "free space in TMPDIR")?;
    Ok(Run { status: status.code(), output })
}

const TIMES: &[Column] = &[
    label("how", "how"),
    metric("ns", "time", "ms", 1).scaled(1e-6).lower(),
    metric("ratio", "times", "x", 3).ratio_of("ns").lower(),
    metric("bursts", "bursts", "", 0).show(&[Part::Median]),
    metric("cost", "own account", "%", 2).show(&[Part::Median]),
    metric("edges", "overlap of edges", "", 3).higher().show(&[Part::Median]),
    metric("calls", "of calls", "", 3).higher().show(&[Part::Median]),
];
