//! Turns the errors of clap into the form of all other failures.
//!
//! Help and version go to stdout in clap's layout. A usage error becomes one line, because clap's
//! paragraphs hide the important sentence, and scripts log single lines.

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use clap::Command;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::failure::{Failure, Status};

/// The outcome of a command line that clap rejected, or that requested help.
pub fn report(
    error: &clap::Error,
    cli: &Command,
    words: &[OsString],
    out: &mut dyn Write,
) -> Result<ExitCode, Failure> {
    match error.kind() {
        ErrorKind::DisplayHelp
        | ErrorKind::DisplayVersion
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            write!(out, "{}", error.render()).map_err(Failure::output)?;
            let is_requested = error.kind() != ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
            Ok(ExitCode::from(if is_requested { 0 } else { Status::Usage as u8 }))
        }
        _ => Err(failure_of_variable(error, words)
            .unwrap_or_else(|| usage_failure(&error.render().to_string(), cli, words))),
    }
}

/// Blames the environment variable, where clap blames the option that the variable sets.
fn failure_of_variable(error: &clap::Error, words: &[OsString]) -> Option<Failure> {
    let Some(ContextValue::String(blamed)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    let option = blamed.split(' ').next()?;
    let typed = words.iter().any(|word| word.to_string_lossy().starts_with(option));
    let name = option.strip_prefix("--").filter(|_| !typed)?;
    let variable = format!("ELFEN_{}", name.replace('-', "_").to_uppercase());
    std::env::var_os(&variable)?;
    let (why, fix) =
        (sentence(&error.render().to_string()), format!("correct it, or `unset {variable}`"));
    Some(Failure::new(Status::Usage, format!("variable {variable}"), why, fix))
}

/// Parses clap's message, which has the paragraph `error: SENTENCE`, perhaps `tip: SENTENCE`, and
/// more.
fn usage_failure(rendered: &str, cli: &Command, words: &[OsString]) -> Failure {
    let (command, name) = command_of(cli, words);
    let why = sentence(rendered);
    if let Some(word) = why.strip_prefix("unrecognized subcommand ") {
        let word = word.trim_matches('\'');
        let names = command.get_subcommands().filter(|sub| !sub.is_hide_set());
        let similar = similar(word, names.map(Command::get_name));
        let fix = similar.map(|similar| format!("did you mean `{name} {similar}`? "));
        let fix = format!("{}see `{name} --help`", fix.unwrap_or_default());
        return Failure::new(Status::Usage, "arguments", format!("unknown command '{word}'"), fix);
    }
    let tip = rendered.lines().find_map(|line| line.trim_start().strip_prefix("tip: "));
    let tip = tip.map(|tip| format!("{tip}; ")).unwrap_or_default();
    Failure::new(Status::Usage, "arguments", why, format!("{tip}see `{name} --help`"))
}

/// The name that a user most likely meant. `None` if no name is within two typing errors.
fn similar<'a>(word: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let errors = |name: &&str| strsim::damerau_levenshtein(word, name);
    // Of a word of three letters, two errors leave too little.
    let most = if word.chars().count() < 5 { 1 } else { 2 };
    let nearest = names.min_by_key(errors)?;
    (errors(&nearest) <= most).then_some(nearest)
}

/// The sentence in which clap describes the error, as one line.
fn sentence(rendered: &str) -> String {
    let sentence = rendered.split("\n\n").next().unwrap_or(rendered);
    let sentence = sentence.strip_prefix("error: ").unwrap_or(sentence);
    sentence.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The command, and its name with subcommands, that the words of a command line begin with.
fn command_of<'a>(cli: &'a Command, words: &[OsString]) -> (&'a Command, String) {
    let mut command = cli;
    let mut name = cli.get_bin_name().unwrap_or(cli.get_name()).to_owned();
    for word in words.iter().skip(1) {
        let Some(named) = command.find_subcommand(word) else { break };
        name = format!("{name} {}", named.get_name());
        command = named;
    }
    (command, name)
}

/// The faults in the help of a command and its subcommands, for tests. Each help must end with an
/// example, and fit a terminal of 80 columns. A paragraph must be one line in the source, which
/// clap breaks.
pub fn help_faults(command: &Command) -> Vec<String> {
    let mut faults = Vec::new();
    add_help_faults(command, &mut faults);
    faults
}

fn add_help_faults(command: &Command, faults: &mut Vec<String>) {
    let name = command.get_name();
    let text = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    if !text.contains("Example:\n  ") && !text.contains("Examples:\n  ") {
        faults.push(format!("{name}: no example"));
    }
    let lines: Vec<&str> = text.lines().collect();
    let verbatim = lines.iter().filter(|line| line.starts_with(' '));
    let long = verbatim.filter(|line| line.chars().count() > 80);
    faults.extend(long.map(|line| format!("{name}: over 80 columns: {line}")));
    // A command with subcommands may format its own columns.
    let is_prose = |line: &str| !line.is_empty() && !line.starts_with(' ');
    for pair in lines.windows(2).filter(|_| !command.has_subcommands()) {
        if is_prose(pair[0]) && is_prose(pair[1]) && !pair[0].ends_with('.') {
            faults.push(format!("{name}: a paragraph has two lines: {}", pair[1]));
        }
    }
    for sub in command.get_subcommands() {
        add_help_faults(sub, faults);
    }
}

/// Rejects a program whose name begins with a dash: it is most likely a mistyped option of the
/// command with the arguments `A`.
pub fn check_program<A: clap::Args>(command: &str, program: &[OsString]) -> Result<(), Failure> {
    let Some(word) = program.first().map(|word| word.to_string_lossy()) else { return Ok(()) };
    if !word.starts_with('-') {
        return Ok(());
    }
    let typed = word.split('=').next().unwrap_or_default().trim_start_matches('-');
    let known = A::augment_args(Command::new("elfen"));
    let similar = similar(typed, known.get_arguments().filter_map(clap::Arg::get_long));
    let fix = similar.map(|similar| format!("did you mean --{similar}? "));
    let fix = format!("{}see `elfen {command} --help`", fix.unwrap_or_default());
    Err(Failure::new(Status::Usage, "arguments", format!("unknown option '{word}'"), fix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mistyped_names_are_recognised() {
        let names = ["pause", "run", "set", "status", "top"];
        for (typed, meant) in [
            ("stauts", Some("status")),
            ("rnu", Some("run")),
            ("statsu", Some("status")),
            ("tpo", Some("top")),
            ("puase", Some("pause")),
            ("profile", None),
            ("xyz", None),
        ] {
            assert_eq!(similar(typed, names.into_iter()), meant, "{typed}");
        }
    }
}
