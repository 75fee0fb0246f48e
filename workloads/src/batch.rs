//! The common part of `elfen-batch` and `elfen-batch-c`: repeats one iteration of a program, counts
//! the work, and verifies the result.
//!
//! All iterations with the same seed do the same work and must return the same checksum, however
//! often they are interrupted. So a run on borrowed time can be compared with a run on an idle
//! machine.
//!
//! The programs are in their binaries. The Rust programs have checks in their source, and other
//! tools recognize a binary with checks by these checks. The C programs get their checks through
//! their `-pg` entries. So the binary of the C programs must not contain code with checks.

use crate::beside::{Slowdown, Tally};
use crate::process::{catch_interrupts, interrupted};
use crate::units::{Nanos, parse_nanos, seconds};
use clap::{Args, ValueEnum};
use elfen_console::command::Outcome;
use elfen_console::failure::{Failure, Status};
use elfen_console::output;
use rand::{Rng, SeedableRng};
use rand_xoshiro::SplitMix64;
use serde::Serialize;
use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// The amount of work of one iteration.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    pub amount: u64,
    pub unit: &'static str,
}

/// A wrong result, because the machine or the program computed incorrectly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wrong(pub &'static str);

pub trait Program {
    fn work(&self) -> Work;

    /// Runs one iteration, verifies it, and returns its checksum.
    fn iterate(&mut self) -> Result<u64, Wrong>;

    /// The core that was emulated, if any.
    fn emulated_core(&self) -> Option<EmulatedCore> {
        None
    }
}

/// How much an emulated core slowed a program down.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct EmulatedCore {
    slowdown: f64,
    /// How long the program ran next to a busy request lane, and how much time the emulation added.
    beside_s: f64,
    added_s: f64,
}

impl EmulatedCore {
    pub fn of(slowdown: Slowdown, tally: Tally) -> Self {
        let (beside_s, added_s) = (seconds(tally.all.beside_ns), seconds(tally.added_ns));
        Self { slowdown: slowdown.factor(), beside_s, added_s }
    }
}

/// One step of splitmix64, the same as in c/micro.c.
pub fn mix(x: u64) -> u64 {
    SplitMix64::seed_from_u64(x).next_u64()
}

/// A checksum of bytes, in words of eight.
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

    /// Seed of the computation
    #[arg(long, default_value = "1")]
    pub seed: u64,

    /// Print one JSON object instead of a line
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct BatchProgramReport<'a> {
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

/// Repeats a program and prints the report. `name` and `lang` describe the program in the report.
pub fn run(
    name: &str,
    lang: &str,
    program: &mut dyn Program,
    repetition: &Repetition,
    out: &mut dyn Write,
) -> Outcome {
    catch_interrupts()?;
    let report = repeat(name, lang, program, repetition).map_err(|Wrong(what)| {
        let fix = "the machine or the program computes incorrectly";
        Failure::new(Status::Failed, name, what, fix)
    })?;
    output::print(out, repetition.json, &report, || text(&report))?;
    Ok(ExitCode::SUCCESS)
}

fn repeat<'a>(
    program_name: &'a str,
    lang: &'a str,
    program: &mut dyn Program,
    repetition: &Repetition,
) -> Result<BatchProgramReport<'a>, Wrong> {
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
    Ok(BatchProgramReport {
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

fn text(report: &BatchProgramReport<'_>) -> String {
    let BatchProgramReport {
        program, lang, iterations, seconds, per_second, unit, checksum, ..
    } = report;
    let emulated = report.emulated_core.map_or_else(String::new, |core| {
        let EmulatedCore { slowdown, beside_s, added_s } = core;
        format!(
            "; emulated core: slowdown {slowdown}, {added_s:.2} s added in {beside_s:.2} s next to \
             requests"
        )
    });
    format!(
        "{program} ({lang}): {iterations} iterations in {seconds:.2} s, {per_second:.0} {unit}/s, \
         checksum {checksum}{emulated}\n"
    )
}

/// 32 KB, the same as in micro.h.
pub const FLUSH_WORDS: usize = 32 * 1024 / size_of::<u64>();

mod micro {
    // SAFETY: as declared in c/micro.h. Functions without pointers accept any arguments.
    unsafe extern "C" {
        pub(super) safe fn elfen_micro_loop(seed: u64, calls: u64) -> u64;
        pub(super) safe fn elfen_micro_matrix(seed: u64, calls: u64) -> u64;
        pub(super) fn elfen_micro_flush(seed: u64, calls: u64, buffer: *mut u64) -> u64;
    }
}

/// Loop, Matrix and Flush of the thesis's section 5.4. Each uses a known part of the core: the
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

/// The programs as the thesis had them: in C, built with `-pg`. `elfen-batch` has the same programs
/// in Rust, with the same checksums.
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
                // SAFETY: no other code uses the buffer during the call, and it has the
                // `FLUSH_WORDS` that micro.h requires.
                unsafe { micro::elfen_micro_flush(seed, calls, buffer) }
            }
        })
    }
}
