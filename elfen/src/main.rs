//! The `elfen` command: parse, dispatch, exit status.
//!
//! Every subcommand is a file in `cmd`, the work behind it a module in `host`. This file knows
//! neither; it only turns their outcome into what a shell sees, so that all of them fail the same
//! way.

mod bench;
mod cmd;
mod host;

use std::io::{self, BufWriter, Write};
use std::process::ExitCode;

use clap::Parser;

use cmd::Command;
use cmd::failure::Failure;

const EXIT_STATUS: &str = "\
Exit status: 0 success, 1 failure, 2 bad arguments, 3 unsupported on this machine.
A failure is one line on stderr: `elfen: what failed: why; what to do`.";

/// Lends the idle half of an SMT core to batch programs, and hands it back in microseconds.
#[derive(Parser)]
#[command(name = "elfen", version, after_help = EXIT_STATUS)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

fn main() -> ExitCode {
    let mut out = BufWriter::new(io::stdout().lock());
    let outcome = match Cli::try_parse() {
        Ok(cli) => cli.command.run(&mut out),
        Err(error) => cmd::usage::report(&error, &mut out),
    };
    // A full disk or a closed pipe may only show when the buffer goes out.
    let outcome = outcome.and_then(|code| {
        out.flush().map_err(Failure::output)?;
        Ok(code)
    });
    outcome.unwrap_or_else(|failure| failure.report())
}
