//! The common `main` of all commands: parses arguments, runs the command, flushes its output, and
//! returns the exit status.

use std::env;
use std::ffi::OsString;
use std::io::{self, BufWriter, Write};
use std::process::ExitCode;

use clap::{ArgMatches, CommandFactory, FromArgMatches};

use crate::failure::Failure;
use crate::usage;

/// The outcome of a command.
pub type Outcome = Result<ExitCode, Failure>;

/// Parses this process's arguments as a `Cli` and runs it with a buffered standard output.
///
/// `refuse` gets the parsed arguments and can reject combinations that clap cannot express.
pub fn main<Cli: CommandFactory + FromArgMatches>(
    refuse: impl FnOnce(&ArgMatches) -> Result<(), Failure>,
    run: impl FnOnce(Cli, &mut dyn Write) -> Outcome,
) -> ExitCode {
    with_output(|out| parse_and_run(refuse, run, out))
}

/// Like `main`, for a command that opens its output itself.
pub fn parse_and_run<Cli: CommandFactory + FromArgMatches>(
    refuse: impl FnOnce(&ArgMatches) -> Result<(), Failure>,
    run: impl FnOnce(Cli, &mut dyn Write) -> Outcome,
    out: &mut dyn Write,
) -> Outcome {
    let words: Vec<OsString> = env::args_os().collect();
    let parsed = Cli::command().try_get_matches_from(&words).and_then(|typed| {
        let cli = Cli::from_arg_matches(&typed)?;
        Ok((cli, typed))
    });
    match parsed {
        Ok((cli, typed)) => {
            refuse(&typed)?;
            run(cli, out)
        }
        Err(error) => usage::report(&error, &Cli::command(), &words, out),
    }
}

/// Runs a command with a buffered standard output. Flushes the buffer before it decides the exit
/// status, because only the flush may reveal a full disk or a closed pipe.
pub fn with_output(run: impl FnOnce(&mut dyn Write) -> Outcome) -> ExitCode {
    let mut out = BufWriter::new(io::stdout().lock());
    let outcome = run(&mut out).and_then(|code| {
        out.flush().map_err(Failure::output)?;
        Ok(code)
    });
    outcome.unwrap_or_else(|failure| failure.report())
}
