//! The command `elfen-batch-c`: the thesis's micro benchmarks in C, built with `-pg`, for checks
//! that come in at `mcount`.

use clap::{Parser, ValueEnum};
use std::process::ExitCode;
use workloads::batch::{self, Kind, MicroInC, Repetition};
use workloads::command;

const COMMAND: &str = "elfen-batch-c";

/// Repeats one of the thesis's programs in C and prints how much of its work was done, with a
/// checksum of it. `elfen-batch` has the same in Rust, and more.
#[derive(Debug, Parser)]
#[command(
    name = COMMAND,
    version,
    after_help = "Example: elfen-batch-c matrix --duration 5s\n\n\
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
}

fn main() -> ExitCode {
    let args: Args = match command::parse(COMMAND) {
        Ok(args) => args,
        Err(status) => return status,
    };
    let kind = match args.program {
        Which::Loop => Kind::Loop,
        Which::Matrix => Kind::Matrix,
        Which::Flush => Kind::Flush,
    };
    let name = args.program.to_possible_value().expect("no variant is hidden");
    let mut program = MicroInC::new(kind, args.repetition.seed);
    batch::run(COMMAND, name.get_name(), "c", &mut program, &args.repetition)
}
