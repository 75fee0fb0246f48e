//! The command `elfen-batch`: programs to borrow with, whose work can be counted and checked. They
//! check themselves: `elfen_rt::check!()` stands where they spend their time.
//!
//! What an iteration computes is verified where it can be: what was compressed is unpacked, a
//! solution is checked against its clauses.

mod compress;
mod corunner;
mod factor;
mod json;
mod micro;
mod rangecoder;
mod sat;

use clap::{Parser, ValueEnum};
use compress::Compress;
use corunner::{Spin, Stall};
use factor::Factor;
use json::Json;
use micro::Micro;
use sat::Sat;
use std::process::ExitCode;
use workloads::batch::{self, Kind, Program, Repetition};
use workloads::command;

const COMMAND: &str = "elfen-batch";

/// Repeats one batch program and prints how much of its work was done, with a checksum of it.
#[derive(Debug, Parser)]
#[command(
    name = COMMAND,
    version,
    after_help = "Example: elfen-batch compress --duration 5s\n\n\
                  Every iteration of a seed does the same and has the same checksum. Ctrl-C and \
                  SIGTERM end the program after its iteration, with its report.\n\
                  Exit status: 0 done, 1 a result was wrong, 2 wrong arguments."
)]
struct Args {
    program: Which,

    #[command(flatten)]
    repetition: Repetition,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Which {
    /// Calls an empty function (thesis, section 5.4)
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

impl Which {
    fn program(self, seed: u64) -> Box<dyn Program> {
        match self {
            Self::Loop => Box::new(Micro::new(Kind::Loop, seed)),
            Self::Matrix => Box::new(Micro::new(Kind::Matrix, seed)),
            Self::Flush => Box::new(Micro::new(Kind::Flush, seed)),
            Self::Stall => Box::new(Stall::new(seed)),
            Self::Spin => Box::new(Spin::new(seed)),
            Self::Compress => Box::new(Compress::new(seed)),
            Self::Sat => Box::new(Sat::new(seed)),
            Self::Factor => Box::new(Factor::new(seed)),
            Self::Json => Box::new(Json::new(seed)),
        }
    }
}

fn main() -> ExitCode {
    let args: Args = match command::parse(COMMAND) {
        Ok(args) => args,
        Err(status) => return status,
    };
    let name = args.program.to_possible_value().expect("no variant is hidden");
    let mut program = args.program.program(args.repetition.seed);
    batch::run(COMMAND, name.get_name(), "rust", program.as_mut(), &args.repetition)
}
