//! What `elfen-batch` and `elfen-batch-c` share: a program repeats one iteration, and what it did
//! is counted and checked.
//!
//! Every iteration of a seed does the same work and must return the same checksum, so that borrowed
//! work can be compared with work alone, however often it was stopped in between.
//!
//! The programs themselves are in their binaries. Those in Rust have a check in their source, and a
//! binary that has one is known by it: nothing of it may reach the binary of the programs in C,
//! which are checked through their `-pg` entries instead.

use crate::beside::{Slowdown, Tally};
use crate::command;
use crate::process::{catch_interrupts, interrupted};
use crate::units::{Nanos, parse_nanos, seconds};
use clap::{Args, ValueEnum};
use rand::{Rng, SeedableRng};
use rand_xoshiro::SplitMix64;
use serde::Serialize;
use std::io;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// One iteration's amount of work.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    pub amount: u64,
    pub unit: &'static str,
}

/// A result that is not what it must be: the machine or the program computed wrongly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wrong(pub &'static str);

pub trait Program {
    fn work(&self) -> Work;

    /// Does it once, verifies it, and returns its checksum.
    fn iterate(&mut self) -> Result<u64, Wrong>;

    /// What was emulated, if anything was.
    fn emulated_core(&self) -> Option<EmulatedCore> {
        None
    }
}

/// How an emulated core slowed a program down.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct EmulatedCore {
    slowdown: f64,
    /// How long it ran beside a busy request lane, and how much longer it took for that.
    beside_s: f64,
    added_s: f64,
}

impl EmulatedCore {
    pub fn of(slowdown: Slowdown, tally: Tally) -> Self {
        let (beside_s, added_s) = (seconds(tally.all.beside_ns), seconds(tally.added_ns));
        Self { slowdown: slowdown.factor(), beside_s, added_s }
    }
}

/// One step of splitmix64: the same in c/micro.c.
pub fn mix(x: u64) -> u64 {
    SplitMix64::seed_from_u64(x).next_u64()
}

/// A checksum of bytes, eight at a time.
pub fn checksum(bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(bytes.len() as u64, |sum, chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        mix(sum ^ u64::from_le_bytes(word))
    })
}

#[derive(Clone, Debug, Args)]
pub struct Repetition {
    /// Stop after the iteration that reaches this time [default: 10s]
    #[arg(long, value_parser = parse_nanos, conflicts_with = "iterations")]
    duration: Option<Nanos>,

    /// Stop after this many iterations instead
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    iterations: Option<u64>,

    /// Decides what is computed
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
    /// What was done in all, in `unit`s.
    work: u64,
    unit: &'static str,
    per_second: f64,
    checksum: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    emulated_core: Option<EmulatedCore>,
}

/// All that a batch command does once it knows its program: `name` of `lang` in the words of its
/// report.
pub fn run(
    command: &str,
    name: &str,
    lang: &str,
    program: &mut dyn Program,
    repetition: &Repetition,
) -> ExitCode {
    if let Err(errno) = catch_interrupts() {
        return command::failure(command, &format!("installing the handler of Ctrl-C: {errno}"));
    }
    let report = match repeat(name, lang, program, repetition) {
        Ok(report) => report,
        Err(Wrong(what)) => {
            let advice = "the machine or the program computes wrongly";
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
    while iterations < limit && begin.elapsed() < time && !interrupted() {
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
            "; emulated core: slowdown {slowdown}, {added_s:.2} s longer for {beside_s:.2} s \
             beside requests"
        )
    });
    command::say(&format!(
        "{program} ({lang}): {iterations} iterations in {seconds:.2} s, {per_second:.0} {unit}/s, \
         checksum {checksum}{emulated}\n"
    ))
}

/// 32 KB, as micro.h has it.
pub const FLUSH_WORDS: usize = 32 * 1024 / size_of::<u64>();

mod micro {
    // SAFETY: as declared in c/micro.h. Where no pointer is passed, any arguments will do.
    unsafe extern "C" {
        pub(super) safe fn elfen_micro_loop(seed: u64, calls: u64) -> u64;
        pub(super) safe fn elfen_micro_matrix(seed: u64, calls: u64) -> u64;
        pub(super) fn elfen_micro_flush(seed: u64, calls: u64, buffer: *mut u64) -> u64;
    }
}

/// Loop, Matrix and Flush of the thesis's section 5.4. What each takes of the core is known: the
/// front end (IPC 1), the functional units, and the first-level data cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// Calls an empty function (thesis, section 5.4)
    Loop,
    /// Multiplies 5x5 matrices (section 5.4)
    Matrix,
    /// Zeros a 32 KB buffer (section 5.4)
    Flush,
}

impl Kind {
    pub fn work(self) -> Work {
        match self {
            Self::Loop => Work { amount: 1_000_000, unit: "calls" },
            Self::Matrix => Work { amount: 20_000, unit: "products" },
            Self::Flush => Work { amount: 2_000, unit: "buffers" },
        }
    }
}

/// The programs as the thesis had them: in C, built with `-pg`. `elfen-batch` has the same in Rust,
/// with the same checksums.
#[derive(Debug)]
pub struct MicroInC {
    kind: Kind,
    seed: u64,
    buffer: Box<[u64; FLUSH_WORDS]>,
}

impl MicroInC {
    pub fn new(kind: Kind, seed: u64) -> Self {
        Self { kind, seed, buffer: Box::new([0; FLUSH_WORDS]) }
    }
}

impl Program for MicroInC {
    fn work(&self) -> Work {
        self.kind.work()
    }

    fn iterate(&mut self) -> Result<u64, Wrong> {
        let (seed, calls) = (self.seed, self.work().amount);
        Ok(match self.kind {
            Kind::Loop => micro::elfen_micro_loop(seed, calls),
            Kind::Matrix => micro::elfen_micro_matrix(seed, calls),
            Kind::Flush => {
                let buffer = self.buffer.as_mut_ptr();
                // SAFETY: the buffer is ours alone for the call, and has the words that micro.h
                // says it must have (`FLUSH_WORDS`).
                unsafe { micro::elfen_micro_flush(seed, calls, buffer) }
            }
        })
    }
}
