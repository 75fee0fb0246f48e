//! `elfen lab bench fdo`: how much faster a program gets if its compiler knows a profile of it.
//!
//! The compiler is clang. The profiles are by bursts, by everything, and by counters that the
//! compiler puts into the program. Baseline: the same flags without a profile.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use elfen_console::duration::number;
use elfen_console::programs::find_program;
use elfen_rt::clock::monotonic_ns;

use super::profile::{Run, execute, printed};
use super::{
    BenchError, BenchReport, Column, Explain, Part, Progress, cases, label, measure, metric, runs,
    with_baseline,
};
use crate::live::scratch::Scratch;

const EXAMPLE: &str = "\
The compiler must be clang: by profiles of bursts it needs lines, which {flags} ask for. The \
program's output must not depend on time.

Examples:
  elfen lab bench fdo --compile 'clang -O2 {flags} *.c -o {output}' -- b.lua
  elfen lab bench fdo --profdata llvm-profdata-14 \\
    --compile 'clang-14 -O2 {flags} main.c -o {output}'";

/// Measure how much faster clang makes a program by profiles of `elfen profile`
///
/// The program is compiled without a profile, by a profile of bursts, by an exact profile, and by
/// counters of clang. The four programs run in turn, with the same arguments as for the profiles.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLE)]
pub(crate) struct BenchFdoArgs {
    /// A shell command that compiles the program, with {flags} and {output}
    #[arg(long, value_name = "COMMAND", value_parser = template)]
    compile: String,

    /// The program of LLVM that merges counters; of the same version as clang
    #[arg(long, value_name = "PROGRAM", default_value = "llvm-profdata")]
    profdata: PathBuf,

    /// Number of rounds; each round runs all four programs
    #[arg(long, value_name = "N", default_value_t = 15, value_parser = runs())]
    runs: usize,

    /// The program's arguments
    #[arg(last = true, value_name = "ARGUMENT")]
    arguments: Vec<OsString>,
}

const FLAGS: &str = "{flags}";
const OUTPUT: &str = "{output}";
/// Lines and what tells the code of one line apart, which change no instruction.
const LINES: &str = "-gline-tables-only -fdebug-info-for-profiling";

fn template(text: &str) -> Result<String, String> {
    match [FLAGS, OUTPUT].into_iter().find(|part| !text.contains(part)) {
        Some(missing) => Err(format!("it has no {missing}")),
        None => Ok(text.to_owned()),
    }
}

pub(crate) fn run(args: &BenchFdoArgs, progress: Progress<'_>) -> Result<BenchReport, BenchError> {
    let elfen = find_program("elfen").explain("finding elfen", "install the package elfen")?;
    let scratch = Scratch::new(1).explain("a temporary folder", "set TMPDIR")?;
    let output = scratch.path("output");
    let mut compile = |name: &str, flags: &str| {
        progress(&format!("compiles: {name}"));
        let program = scratch.path(name);
        compile(&args.compile, flags, &program).map(|()| program)
    };
    let plain = compile("plain", LINES)?;
    let counting = compile("counting", "-fprofile-instr-generate")?;
    let mut bursts = 0.0;
    let mut programs = vec![plain.clone()];
    for by in ["bursts", "everything"] {
        let recorded = scratch.path(&format!("{by}.elfprof"));
        let mut words: Vec<OsString> = vec![elfen.clone().into()];
        words.extend(["profile", "record", "-q", "--by", by, "-o"].map(OsString::from));
        words.extend([recorded.clone().into(), "--".into(), plain.clone().into()]);
        words.extend_from_slice(&args.arguments);
        execute(&words, &output)?;
        if by == "bursts" {
            let report = printed(&elfen, &["report".as_ref(), recorded.as_os_str()])?;
            bursts = report["bursts"].as_f64().unwrap_or(0.0);
        }
        let lines = scratch.path(&format!("{by}.prof"));
        export(&elfen, &recorded, &plain, &lines)?;
        programs.push(compile(by, &format!("{LINES} -fprofile-sample-use={}", lines.display()))?);
    }
    let merged = count(args, &counting, &scratch)?;
    programs.push(compile("counted", &format!("-fprofile-instr-use={}", merged.display()))?);
    let names = ["no profile", "bursts", "everything", "counters of clang"];
    let cases = with_baseline(cases("profile", names));
    let mut first: Option<Run> = None;
    let table = measure(("times", TIMES), &cases, args.runs, progress, |case, _, values| {
        let mut words: Vec<OsString> = vec![programs[case].clone().into()];
        words.extend_from_slice(&args.arguments);
        let begun_ns = monotonic_ns();
        let found = execute(&words, &output)?;
        values.add("ns", number(monotonic_ns() - begun_ns));
        if case == 1 {
            values.add("bursts", bursts);
        }
        if *first.get_or_insert_with(|| found.clone()) != found {
            let why = "the programs print different things, or end differently";
            return Err(BenchError::failed(why, "name a program that always does the same"));
        }
        Ok(())
    })?;
    Ok(table.into())
}

/// Compiles the program with some more flags.
fn compile(template: &str, flags: &str, output: &Path) -> Result<(), BenchError> {
    let command = template.replace(FLAGS, flags);
    let command = command.replace(OUTPUT, &output.display().to_string());
    finish(Command::new("sh").args(["-c", &command]), "compiling", "correct --compile")
}

/// Runs a command, and fails with its last message if that fails.
fn finish(command: &mut Command, what: &str, fix: &str) -> Result<(), BenchError> {
    let finished = command.output().explain(what.to_owned(), fix)?;
    if finished.status.success() {
        return Ok(());
    }
    let printed = String::from_utf8_lossy(&finished.stderr);
    let error = printed.lines().find(|line| line.contains("error")).or(printed.lines().last());
    let error = error.unwrap_or("it ended without a message");
    Err(BenchError::failed(format!("{what}: {error}"), fix))
}

fn export(elfen: &Path, recorded: &Path, program: &Path, to: &Path) -> Result<(), BenchError> {
    let fix = "see what `elfen profile export --to llvm` says about it";
    let mut words = Command::new(elfen);
    words.args(["profile", "export", "--to", "llvm", "--binary"]).arg(program).arg(recorded);
    let exported = words.output().explain("running elfen", fix)?;
    if !exported.status.success() {
        let why = String::from_utf8_lossy(&exported.stderr).trim().to_owned();
        return Err(BenchError::failed(why, "let the program run for some seconds"));
    }
    std::fs::write(to, exported.stdout).explain("a temporary file", "free space in TMPDIR")
}

/// Runs the program with counters, and returns their file.
fn count(args: &BenchFdoArgs, program: &Path, scratch: &Scratch) -> Result<PathBuf, BenchError> {
    let [raw, merged] = ["raw", "merged"].map(|name| scratch.path(name));
    let mut counted = Command::new(program);
    counted.args(&args.arguments).env("LLVM_PROFILE_FILE", &raw);
    counted.stdin(std::process::Stdio::null());
    // Its own exit status does not matter, as long as it has written counters.
    counted.output().explain("running the program with counters", "name one that runs")?;
    let mut merge = Command::new(&args.profdata);
    merge.arg("merge").arg(&raw).arg("-o").arg(&merged);
    let fix = "name llvm-profdata of clang's version by --profdata";
    finish(&mut merge, &format!("running {}", args.profdata.display()), fix)?;
    Ok(merged)
}

const TIMES: &[Column] = &[
    label("profile", "profile"),
    metric("ns", "time", "ms", 1).scaled(1e-6).lower(),
    metric("ratio", "times", "x", 3).ratio_of("ns").lower(),
    metric("bursts", "bursts", "", 0).show(&[Part::Median]),
];
