//! The `elfen-lab` command: parse, run, exit status. `elfen lab` and `elfen demo` start it.

use std::process::ExitCode;

use elfen_console::command;
use experiments::cmd::Cli;

fn main() -> ExitCode {
    command::main(|_typed| Ok(()), |cli: Cli, out| cli.run(out))
}
