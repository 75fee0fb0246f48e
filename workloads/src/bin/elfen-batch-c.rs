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
    program: Kind,

    #[command(flatten)]
    repetition: Repetition,
}

fn main() -> ExitCode {
    let args: Args = match command::parse(COMMAND) {
        Ok(args) => args,
        Err(status) => return status,
    };
    let name = args.program.to_possible_value().expect("no variant is hidden");
    let mut program = MicroInC::new(args.program, args.repetition.seed);
    batch::run(COMMAND, name.get_name(), "c", &mut program, &args.repetition)
}
