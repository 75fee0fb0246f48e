//! `elfen lab bench profile`: how much longer a program takes under `elfen profile record`.
//! Baseline: the same program without it. Both must print the same and end the same way.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

use elfen_console::duration::number;
use elfen_console::programs::find_program;
use elfen_rt::clock::monotonic_ns;

use super::{
    BenchError, BenchReport, Column, Explain, Progress, cases, label, measure, metric, runs,
    with_baseline,
};
use crate::live::scratch::Scratch;

const EXAMPLE: &str = "\
Examples:
  elfen lab bench profile -- gzip -c file     --by everything, with gzip
  elfen lab bench profile --runs 20 -- sqlite3 :memory: '.read queries.sql'";

/// Measure how much longer a program takes while `elfen profile record` counts it
///
/// The program runs in turn with and without the profiler. It must print the same each time.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLE)]
pub(crate) struct BenchProfileArgs {
    /// Number of rounds; each round runs the program with and without the profiler
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = runs())]
    runs: usize,

    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    pub(crate) program: Vec<OsString>,
}

/// What a run of the program has shown.
#[derive(PartialEq, Eq)]
struct Run {
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
    let mut profiled: Vec<OsString> =
        ["profile", "record", "-q", "--by", "everything", "--"].map(OsString::from).into();
    profiled.insert(0, elfen.into());
    profiled.extend_from_slice(&args.program);
    let mut first: Option<Run> = None;
    let cases = with_baseline(cases("how", ["without the profiler", "by everything"]));
    let table = measure(("times", TIMES), &cases, args.runs, progress, |case, _, values| {
        let words = if case == 0 { &args.program } else { &profiled };
        let begun_ns = monotonic_ns();
        let found = execute(words, &output)?;
        values.add("ns", number(monotonic_ns() - begun_ns));
        let expected =
            first.get_or_insert_with(|| Run { status: found.status, output: found.output.clone() });
        if *expected != found {
            let why = "its output or exit status differs from run to run";
            return Err(BenchError::failed(why, "name a program that always does the same"));
        }
        Ok(())
    })?;
    Ok(table.into())
}

fn execute(words: &[OsString], output: &Path) -> Result<Run, BenchError> {
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
    metric("ratio", "times", "x", 2).ratio_of("ns").lower(),
];
