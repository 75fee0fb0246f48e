//! What clap has to say, in the shape of every other message.
//!
//! Help and version go to stdout as clap lays them out. A usage error becomes one line: clap's
//! several paragraphs bury the sentence that matters, and scripts log one line.

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use clap::CommandFactory;
use clap::error::ErrorKind;

use super::Cli;
use super::failure::{Failure, Status};

/// The outcome of a command line that clap did not accept, or that asked for help.
pub(crate) fn report(
    error: &clap::Error,
    words: &[OsString],
    out: &mut dyn Write,
) -> Result<ExitCode, Failure> {
    match error.kind() {
        ErrorKind::DisplayHelp
        | ErrorKind::DisplayVersion
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            write!(out, "{}", error.render()).map_err(Failure::output)?;
            let asked = error.kind() != ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
            Ok(ExitCode::from(if asked { 0 } else { Status::Usage as u8 }))
        }
        _ => Err(usage_failure(&error.render().to_string(), words)),
    }
}

/// clap writes `error: SENTENCE`, perhaps a `tip: SENTENCE`, and more, as paragraphs.
fn usage_failure(rendered: &str, words: &[OsString]) -> Failure {
    let tip = rendered.lines().find_map(|line| line.trim_start().strip_prefix("tip: "));
    let tip = tip.map(|tip| format!("{tip}; ")).unwrap_or_default();
    let fix = format!("{tip}see `{} --help`", command_of(words));
    Failure::new(Status::Usage, "arguments", sentence(rendered), fix)
}

/// What clap says is wrong, as one line.
pub(crate) fn sentence(rendered: &str) -> String {
    let sentence = rendered.split("\n\n").next().unwrap_or(rendered);
    let sentence = sentence.strip_prefix("error: ").unwrap_or(sentence);
    sentence.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The command and subcommand that the words name.
fn command_of(words: &[OsString]) -> String {
    let cli = Cli::command();
    let (mut command, mut name) = (&cli, "elfen".to_owned());
    for word in words.iter().skip(1) {
        let Some(named) = command.find_subcommand(word) else { break };
        name = format!("{name} {}", named.get_name());
        command = named;
    }
    name
}

/// A program whose name begins with a dash is an option with a slip in it.
pub(crate) fn check_program(command: &str, program: &[OsString]) -> Result<(), Failure> {
    let Some(word) = program.first().map(|word| word.to_string_lossy()) else { return Ok(()) };
    if !word.starts_with('-') {
        return Ok(());
    }
    let fix = format!("see `elfen {command} --help`; a program of that name is ./{word}");
    Err(Failure::new(
        Status::Usage,
        "arguments",
        format!("unexpected argument '{word}' found"),
        fix,
    ))
}
