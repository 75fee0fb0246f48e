//! What the binaries of this crate share at their edge: one-line errors and exit statuses.
//!
//! A failure is one line and status 1, a usage error 2, what this machine lacks 3, as everywhere in
//! Elfen; clap's own several-line report is cut to its first sentence.

use clap::Parser;
use clap::error::ErrorKind;
use std::io::{self, Write};
use std::process::ExitCode;

pub const USAGE: u8 = 2;
const UNSUPPORTED: u8 = 3;

/// The arguments, or the status to leave with: help and version are printed by clap, errors in one
/// line.
pub fn parse<T: Parser>(program: &str) -> Result<T, ExitCode> {
    T::try_parse().map_err(|error| match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => match say(&error.to_string()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => failure(program, &format!("writing the help: {error}")),
        },
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            usage(program, "a subcommand is missing")
        }
        _ => usage(program, &one_line(&error.to_string())),
    })
}

/// Writes to the standard output. A reader that has left, as `head` does, has read enough.
pub fn say(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}

pub fn usage(program: &str, message: &str) -> ExitCode {
    complain(program, &format!("{message}; `{program} --help` shows the options and an example"));
    ExitCode::from(USAGE)
}

pub fn failure(program: &str, message: &str) -> ExitCode {
    complain(program, message);
    ExitCode::FAILURE
}

pub fn unsupported(program: &str, message: &str) -> ExitCode {
    complain(program, message);
    ExitCode::from(UNSUPPORTED)
}

/// One line on the standard error. Where that is closed or full, the exit status must do.
pub fn complain(program: &str, message: &str) {
    let _told = writeln!(io::stderr(), "{program}: {message}");
}

/// clap's first paragraph (the rest repeats the usage), on one line and without its prefix.
fn one_line(report: &str) -> String {
    let paragraph = report.split("\n\n").next().unwrap_or(report);
    let words: Vec<&str> = paragraph.split_whitespace().collect();
    let line = words.join(" ");
    line.strip_prefix("error: ").unwrap_or(&line).to_owned()
}

#[cfg(test)]
mod tests {
    use super::one_line;

    /// Goal: a report of several lines becomes one sentence. Method: clap's shape, with its usage
    /// below.
    #[test]
    fn a_report_becomes_one_line() {
        let report = "error: the following required arguments were not provided:\n  <URL>\n\n\
                      Usage: x <URL>\n";
        assert_eq!(one_line(report), "the following required arguments were not provided: <URL>");
    }
}
