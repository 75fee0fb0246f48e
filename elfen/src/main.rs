//! The `elfen` command: parse, dispatch, exit status.
//!
//! Every subcommand is a file, here in `cmd` or in `experiments`; the work behind it is
//! in a library. This file only turns their outcome into what a shell sees, so that all
//! of them fail the same way.

mod cmd;

use std::env;
use std::ffi::OsString;
use std::io::{self, BufWriter, Write};
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches};
use elfen_console::failure::{Failure, Status};
use elfen_console::usage;

use cmd::Cli;

fn main() -> ExitCode {
    let mut out = BufWriter::new(io::stdout().lock());
    let outcome = run(&mut out);
    // A full disk or a closed pipe may only show when the buffer goes out.
    let outcome = outcome.and_then(|code| {
        out.flush().map_err(Failure::output)?;
        Ok(code)
    });
    outcome.unwrap_or_else(|failure| failure.report())
}

fn run(out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let words: Vec<OsString> = env::args_os().collect();
    let parsed = Cli::command().try_get_matches_from(&words).and_then(|typed| {
        let cli = Cli::from_arg_matches(&typed)?;
        Ok((cli, typed))
    });
    match parsed {
        Ok((cli, typed)) => {
            cmd::check(&typed)?;
            cli.command.run(out)
        }
        Err(_) if words.get(1).is_some_and(|word| word == "hedge") => {
            let why = "hedging is a program of its own, elfen-hedge";
            Err(Failure::new(Status::Usage, "arguments", why, "see `elfen-hedge --help`"))
        }
        Err(error) => usage::report(&error, &Cli::command(), &words, out),
    }
}
