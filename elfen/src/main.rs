//! The `elfen` command: parses arguments, calls a subcommand, returns its exit status. Every
//! subcommand is a file in `cmd`; libraries do the work.

mod cmd;

use std::env;
use std::process::ExitCode;

use elfen_console::command;
use elfen_console::failure::{Failure, Status};

use cmd::Cli;

fn main() -> ExitCode {
    if env::args_os().nth(1).is_some_and(|word| word == "hedge") {
        let why = "hedging is a separate program, elfen-hedge";
        let fix = "see `elfen-hedge --help`";
        return Failure::new(Status::Usage, "arguments", why, fix).report();
    }
    command::main(cmd::refuse, |cli: Cli, out| cli.command.run(out))
}
