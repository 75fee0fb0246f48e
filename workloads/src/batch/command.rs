//! What `elfen-batch` does: repeats one program until told to stop, checks each iteration, and says
//! how much was done.

use super::compress::Compress;
use super::corunner::{Spin, Stall};
use super::factor::Factor;
use super::json::Json;
use super::micro::{Kind, Micro};
use super::sat::Sat;
use super::{Program, Wrong};
use crate::units::{Nanos, parse_nanos};
use crate::{command, interrupt};
use clap::{Parser, ValueEnum};
use serde::Serialize;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

const PROGRAM: &str = "elfen-batch";

/// Repeats one batch program and prints how much of its work was done, with a checksum of it.
#[derive(Debug, Parser)]
#[command(
    name = "elfen-batch",
    version,
    after_help = "Example: elfen-batch compress --duration 5s\n\n\
                  Every iteration of a seed does the same and has the same checksum. Ctrl-C and \
                  SIGTERM end the program after its iteration, with its report.\n\
                  Exit status: 0 done, 1 a result was wrong, 2 wrong arguments."
)]
struct Args {
    program: Which,

    /// Run the version in C, with its `-pg` entries, or the one in Rust (loop, matrix and flush)
    #[arg(long, value_enum, default_value = "c")]
    lang: Lang,

    /// Stop after the iteration that reaches this time [default: 10s]
    #[arg(long, value_parser = parse_nanos, conflicts_with = "iterations")]
    duration: Option<Nanos>,

    /// Stop after this many iterations instead
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    iterations: Option<u64>,

    /// Decides what is computed
    #[arg(long, default_value = "1")]
    seed: u64,

    /// Print one JSON object instead of a line
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Which {
    /// Calls an empty function (section 5.4)
    Loop,
    /// Multiplies 5x5 matrices (section 5.4)
    Matrix,
    /// Zeros a 32 KB buffer (section 5.4)
    Flush,
    /// Non-temporal stores and fences: IPC 0.01 (section 5.2)
    Stall,
    /// An empty loop: IPC 1 (section 5.2)
    Spin,
    /// Compresses text, unpacks and compares it
    Compress,
    /// Solves 3-SAT formulas and checks the solutions
    Sat,
    /// Factorises a matrix and multiplies the factors
    Factor,
    /// Parses JSON, prints it and compares
    Json,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Lang {
    C,
    Rust,
}

impl Which {
    fn program(self, lang: Lang, seed: u64) -> Box<dyn Program> {
        let in_c = lang == Lang::C;
        match self {
            Self::Loop => Box::new(Micro::new(Kind::Loop, in_c, seed)),
            Self::Matrix => Box::new(Micro::new(Kind::Matrix, in_c, seed)),
            Self::Flush => Box::new(Micro::new(Kind::Flush, in_c, seed)),
            Self::Stall => Box::new(Stall::new(seed)),
            Self::Spin => Box::new(Spin::new(seed)),
            Self::Compress => Box::new(Compress::new(seed)),
            Self::Sat => Box::new(Sat::new(seed)),
            Self::Factor => Box::new(Factor::new(seed)),
            Self::Json => Box::new(Json::new(seed)),
        }
    }

    fn has_two_languages(self) -> bool {
        matches!(self, Self::Loop | Self::Matrix | Self::Flush)
    }
}

#[derive(Debug, Serialize)]
struct Report {
    program: String,
    lang: &'static str,
    seed: u64,
    iterations: u64,
    seconds: f64,
    /// What was done in all, in `unit`s.
    work: u64,
    unit: &'static str,
    per_second: f64,
    checksum: String,
}

pub fn main() -> ExitCode {
    let args: Args = match command::parse(PROGRAM) {
        Ok(args) => args,
        Err(status) => return status,
    };
    if let Err(errno) = interrupt::install() {
        return command::failure(PROGRAM, &format!("installing the handler of Ctrl-C: {errno}"));
    }
    let report = match repeat(&args) {
        Ok(report) => report,
        Err(Wrong(what)) => {
            let name = args.program.name();
            let advice = "the machine or the program computes wrongly";
            return command::failure(PROGRAM, &format!("{name}: {what}: {advice}"));
        }
    };
    match print(&args, &report) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            command::failure(PROGRAM, &format!("writing to the standard output: {error}"))
        }
    }
}

fn repeat(args: &Args) -> Result<Report, Wrong> {
    let mut program = args.program.program(args.lang, args.seed);
    let limit = args.iterations.unwrap_or(u64::MAX);
    let time = match (args.duration, args.iterations) {
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
        program: args.program.name(),
        lang: if args.program.has_two_languages() && args.lang == Lang::C { "c" } else { "rust" },
        seed: args.seed,
        iterations,
        seconds,
        work,
        unit: program.work().unit,
        per_second: work as f64 / seconds,
        checksum: format!("{checksum:016x}"),
    })
}

impl Which {
    fn name(self) -> String {
        let value = self.to_possible_value().expect("no variant is hidden");
        value.get_name().to_owned()
    }
}

fn print(args: &Args, report: &Report) -> io::Result<()> {
    let mut out = io::stdout().lock();
    if args.json {
        serde_json::to_writer(&mut out, report)?;
        return writeln!(out);
    }
    let Report { program, lang, iterations, seconds, per_second, unit, checksum, .. } = report;
    writeln!(
        out,
        "{program} ({lang}): {iterations} iterations in {seconds:.2} s, {per_second:.0} {unit}/s, \
         checksum {checksum}"
    )
}
