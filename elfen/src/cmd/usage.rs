//! What clap has to say, in the shape of every other message.
//!
//! Help and version go to stdout as clap lays them out. A usage error becomes one line: clap's
//! several paragraphs bury the sentence that matters, and scripts log one line.

use std::io::Write;
use std::process::ExitCode;

use clap::error::ErrorKind;

use super::failure::{Failure, Status};

/// The outcome of a command line that clap did not accept, or that asked for help.
pub(crate) fn report(error: &clap::Error, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    match error.kind() {
        ErrorKind::DisplayHelp
        | ErrorKind::DisplayVersion
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            write!(out, "{}", error.render()).map_err(Failure::output)?;
            let asked = error.kind() != ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
            Ok(ExitCode::from(if asked { 0 } else { Status::Usage as u8 }))
        }
        _ => Err(usage_failure(&error.render().to_string())),
    }
}

/// clap writes `error: SENTENCE`, perhaps a `tip: SENTENCE`, then `Usage: elfen SUBCOMMAND
/// [OPTIONS]`, as paragraphs.
fn usage_failure(rendered: &str) -> Failure {
    let tip = rendered.lines().find_map(|line| line.trim_start().strip_prefix("tip: "));
    let tip = tip.map(|tip| format!("{tip}; ")).unwrap_or_default();
    let fix = format!("{tip}see `{} --help`", command_of(rendered));
    Failure::new(Status::Usage, "arguments", sentence(rendered), fix)
}

/// What clap says is wrong, as one line.
pub(crate) fn sentence(rendered: &str) -> String {
    let sentence = rendered.split("\n\n").next().unwrap_or(rendered);
    let sentence = sentence.strip_prefix("error: ").unwrap_or(sentence);
    sentence.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The command and subcommand that clap's usage line names.
fn command_of(rendered: &str) -> String {
    let usage = rendered.lines().find_map(|line| line.strip_prefix("Usage: ")).unwrap_or("elfen");
    let name = |word: &&str| word.starts_with(|c: char| c.is_ascii_lowercase());
    let words: Vec<&str> = usage.split_whitespace().take_while(name).collect();
    words.join(" ")
}
