//! `elfen lab bench check`: what each kind of check costs, against the same program without it.

use std::io::Write;
use std::process::ExitCode;

use elfen_console::failure::{Failure, Status};
use elfen_console::output::{print_json, warn};
use elfen_console::table;
use elfen_machine::affinity;
use serde::Serialize;

use crate::bench::check::{self, Cost, Costs, Error, KINDS};

const EXAMPLES: &str = "\
Examples:
  elfen lab bench check              every kind, on the last CPU of this process
  elfen lab bench check --cpu 3 --json | jq '.checks[] | {program, kind}'

The programs are built by cc and take no privileges. A slowdown of 1.2 is a fifth more time than \
without checks; a kind `X-return` calls hooks that do nothing, which shows how much of `X` is the \
call.";

/// Measure what a check costs
///
/// Small C programs, built with each kind of check and without, take turns on one CPU next to a
/// request lane that idles.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The CPU to measure on
    #[arg(long, value_name = "CPU")]
    cpu: Option<u32>,

    /// How often every kind takes its turn
    #[arg(short = 'n', long, value_name = "COUNT", default_value_t = 25,
        value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rounds: u32,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    cpu: u32,
    rounds: u32,
    checks: Vec<Check>,
    skipped: Vec<Skipped>,
    /// Why no instructions were counted; null if they were.
    not_counted: Option<String>,
}

#[derive(Serialize)]
struct Check {
    program: &'static str,
    kind: &'static str,
    added_ns_per_call: f64,
    slowdown: f64,
    added_instructions_per_call: Option<f64>,
}

#[derive(Serialize)]
struct Skipped {
    kind: &'static str,
    why: String,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let cpu = cpu(args)?;
    let Costs { checks, skipped, not_counted } =
        check::measure(cpu, args.rounds).map_err(|error| failure(&error))?;
    let skipped: Vec<Skipped> =
        skipped.into_iter().map(|(kind, why)| Skipped { kind: kind.name, why }).collect();
    if args.json {
        let checks = checks.iter().map(rounded).collect();
        print_json(out, &Report { cpu, rounds: args.rounds, checks, skipped, not_counted })?;
        return Ok(ExitCode::SUCCESS);
    }
    for Skipped { kind, why } in &skipped {
        warn(&format!("{kind} is left out: {why}"));
    }
    if let Some(why) = &not_counted {
        warn(&format!("no instructions were counted: {why}"));
    }
    out.write_all(table(&checks).as_bytes()).map_err(Failure::output)?;
    Ok(ExitCode::SUCCESS)
}

/// The last of the CPUs that we may use: the first one gets most interrupts.
fn cpu(args: &Args) -> Result<u32, Failure> {
    let what = "choosing a CPU";
    let failed = |error| Failure::new(Status::Failed, what, error, "see `elfen lanes`");
    let allowed = affinity::allowed().map_err(failed)?;
    let Some(cpu) = args.cpu else {
        let last = allowed.iter().last();
        return last.ok_or_else(|| {
            Failure::new(Status::Failed, what, "this process may use none", "see `taskset -p $$`")
        });
    };
    if allowed.contains(cpu) {
        return Ok(cpu);
    }
    let why = format!("CPU {cpu} is not one of {allowed} that this process may use");
    Err(Failure::new(Status::Usage, what, why, "name one of those, or none"))
}

fn rounded(cost: &Cost) -> Check {
    Check {
        program: cost.program,
        kind: cost.kind.name,
        added_ns_per_call: thousandths(cost.added_ns_per_call),
        slowdown: thousandths(cost.slowdown),
        added_instructions_per_call: cost.added_instructions_per_call.map(thousandths),
    }
}

fn thousandths(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

fn table(checks: &[Cost]) -> String {
    let row = |cost: &Cost| {
        let instructions = cost.added_instructions_per_call;
        vec![
            cost.program.to_owned(),
            cost.kind.name.to_owned(),
            format!("{:+.2}", cost.added_ns_per_call),
            format!("{:.3}", cost.slowdown),
            instructions.map_or("-".to_owned(), |added| format!("{added:.1}")),
        ]
    };
    let rows: Vec<Vec<String>> = checks.iter().map(row).collect();
    let heading = ["program", "kind", "ns per call", "slowdown", "instructions"];
    let kinds: Vec<Vec<String>> =
        KINDS.iter().map(|kind| vec![kind.name.to_owned(), kind.what.to_owned()]).collect();
    table::lines(&heading, &rows) + "\n" + &table::lines(&["kind", "what it is"], &kinds)
}

fn failure(error: &Error) -> Failure {
    let (status, fix) = match error {
        Error::NoCompiler(_) => (Status::Unsupported, "install a C compiler, such as gcc"),
        Error::Library(_) => (
            Status::Failed,
            "build it with `cargo build --release`, or set ELFEN_LIB to its folder",
        ),
        Error::Channels(_) => (Status::Failed, "see `ipcs -l` for the limits of shared memory"),
        Error::Folder(_) => (Status::Failed, "set TMPDIR to a folder that can be written"),
        Error::Compiler { .. } | Error::Program { .. } => {
            (Status::Failed, "see whether cc builds programs that run here")
        }
    };
    Failure::new(status, "measuring checks", error, fix)
}
