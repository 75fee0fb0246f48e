//! The `elfen-lab` command: parses its arguments, runs a subcommand and exits with its status.
//! `elfen lab` and `elfen demo` start it.

use std::process::ExitCode;

use elfen_console::command;
use experiments::cmd::Cli;

fn main() -> ExitCode {
    command::main(|_typed| Ok(()), |cli: Cli, out| cli.run(out))
}
