//! The command `elfen-batch-c`: the thesis's micro benchmarks in C, built with `-pg`, so that
//! checks can be attached at `mcount`.

use clap::{Parser, ValueEnum};
use elfen_console::command;
use std::process::ExitCode;
use workloads::batch::{self, Kind, MicroInC, Repetition};

/// Repeats one of the thesis's programs in C and prints the amount of work that it did, with a
/// checksum. `elfen-batch` has the same programs in Rust, and others.
#[derive(Debug, Parser)]
#[command(
    name = "elfen-batch-c",
    version,
    after_help = "Example: elfen-batch-c matrix --duration 5s\n\n\
                  Exit status: 0 done, 1 a result was wrong, 2 wrong arguments."
)]
struct BatchCArgs {
    program: Kind,

    #[command(flatten)]
    repetition: Repetition,
}

fn main() -> ExitCode {
    command::main::<BatchCArgs>(
        |_| Ok(()),
        |BatchCArgs { program: kind, repetition }, out| {
            let name = kind.to_possible_value().expect("no variant is hidden");
            let mut program = MicroInC::new(kind, repetition.seed);
            batch::run(name.get_name(), "c", &mut program, &repetition, out)
        },
    )
}
