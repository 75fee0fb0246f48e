//! Repeats one program for a time or a number of iterations, verifies each iteration, and reports
//! the work done.

use super::program::{EmulatedCore, Program, Wrong};
use crate::command;
use crate::process::interrupt;
use crate::units::{Nanos, parse_nanos};
use clap::Args;
use serde::Serialize;
use std::io;
use std::process::ExitCode;
use std::time::{Duration, Instant};

#[derive(Clone, Debug, Args)]
pub struct Repetition {
    /// Stop after the iteration that reaches this time [default: 10s]
    #[arg(long, value_parser = parse_nanos, conflicts_with = "iterations")]
    duration: Option<Nanos>,

    /// Stop after this many iterations instead
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    iterations: Option<u64>,

    /// Seed of the computation
    #[arg(long, default_value = "1")]
    pub seed: u64,

    /// Print one JSON object instead of a line
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    program: &'a str,
    lang: &'a str,
    seed: u64,
    iterations: u64,
    seconds: f64,
    /// The work done in total, in units of `unit`.
    work: u64,
    unit: &'static str,
    per_second: f64,
    checksum: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    emulated_core: Option<EmulatedCore>,
}

/// Runs a batch command for a program. `name` and `lang` describe the program in the report.
pub fn run(
    command: &str,
    name: &str,
    lang: &str,
    program: &mut dyn Program,
    repetition: &Repetition,
) -> ExitCode {
    if let Err(errno) = interrupt::install() {
        return command::failure(command, &format!("installing the handler of Ctrl-C: {errno}"));
    }
    let report = match repeat(name, lang, program, repetition) {
        Ok(report) => report,
        Err(Wrong(what)) => {
            let advice = "the machine or the program computes incorrectly";
            return command::failure(command, &format!("{name}: {what}: {advice}"));
        }
    };
    match print(repetition, &report) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            command::failure(command, &format!("writing to the standard output: {error}"))
        }
    }
}

fn repeat<'a>(
    program_name: &'a str,
    lang: &'a str,
    program: &mut dyn Program,
    repetition: &Repetition,
) -> Result<Report<'a>, Wrong> {
    let limit = repetition.iterations.unwrap_or(u64::MAX);
    let time = match (repetition.duration, repetition.iterations) {
        (Some(duration), _) => Duration::from_nanos(duration),
        (None, Some(_)) => Duration::MAX,
        (None, None) => Duration::from_secs(10),
    };
    let begin = Instant::now();
    let checksum = program.iterate()?;
    let mut iterations = 1;
    while iterations < limit && begin.elapsed() < time && !interrupt::asked() {
        if program.iterate()? != checksum {
            return Err(Wrong("two iterations have different checksums"));
        }
        iterations += 1;
    }
    let seconds = begin.elapsed().as_secs_f64();
    let work = program.work().amount * iterations;
    Ok(Report {
        program: program_name,
        lang,
        seed: repetition.seed,
        iterations,
        seconds,
        work,
        unit: program.work().unit,
        per_second: work as f64 / seconds,
        checksum: format!("{checksum:016x}"),
        emulated_core: program.emulated_core(),
    })
}

fn print(repetition: &Repetition, report: &Report<'_>) -> io::Result<()> {
    if repetition.json {
        return command::say(&(serde_json::to_string(report)? + "\n"));
    }
    let Report { program, lang, iterations, seconds, per_second, unit, checksum, .. } = report;
    let emulated = report.emulated_core.map_or_else(String::new, |core| {
        let EmulatedCore { slowdown, beside_s, added_s } = core;
        format!(
            "; emulated core: slowdown {slowdown}, {added_s:.2} s added in {beside_s:.2} s next to \
             requests"
        )
    });
    command::say(&format!(
        "{program} ({lang}): {iterations} iterations in {seconds:.2} s, {per_second:.0} {unit}/s, \
         checksum {checksum}{emulated}\n"
    ))
}
