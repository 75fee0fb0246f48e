//! The `elfen` command: parse, dispatch, exit status.
//!
//! Every subcommand is a file in `cmd`, the work behind it a module in `host`. This file knows
//! neither; it only turns their outcome into what a shell sees, so that all of them fail the same
//! way.

mod bench;
mod cmd;
mod host;

use std::env;
use std::ffi::OsString;
use std::io::{self, BufWriter, Write};
use std::process::ExitCode;

use cmd::failure::Failure;
use cmd::settings::{self, Refused};

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
    match settings::parse(&words) {
        Ok(understood) => {
            let outcome = understood.cli.command.run(out);
            outcome.map_err(|failure| settings::explain(failure, &understood.untyped))
        }
        Err(Refused::ByClap(error)) => cmd::usage::report(&error, &words, out),
        Err(Refused::Failure(failure)) => Err(failure),
    }
}
