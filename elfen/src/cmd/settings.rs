//! From the command line, variables and settings files to the arguments of a subcommand.
//!
//! One table says which options have a variable and a line in the files. clap itself keeps the order, flag before variable
//! before default: the variables are told to it here, and what the files say becomes the default. So a subcommand finds
//! its arguments as if all had been typed, and none of them knows of files.
//!
//! A budget that waits in a file for the policy that uses it must not keep another policy from being asked for by a flag:
//! what the files and variables say of a parameter counts only under a policy that has it.

use std::ffi::OsString;

use clap::builder::Resettable;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, Command, CommandFactory, FromArgMatches};

use super::failure::{Failure, Status};
use super::{Cli, usage};
use crate::host::pair;
use crate::host::settings::{Files, Wrong};

/// An option that may also be set by a variable and by the files.
#[derive(Debug)]
pub(crate) struct Known {
    /// The option's name, and the key in the files.
    pub(crate) key: &'static str,
    pub(crate) variable: &'static str,
    /// The subcommands that take it from there. `simulate` and `plan` have a --policy too, and it is the model's.
    of: &'static [&'static str],
}

const fn known(key: &'static str, variable: &'static str, of: &'static [&'static str]) -> Known {
    Known { key, variable, of }
}

const LANES: &[&str] =
    &["run", "serve", "lanes", "doctor", "bench", "calibrate", "demo", "experiment"];
const POLICY: &[&str] = &["run", "set"];

pub(crate) const KNOWN: [Known; 11] = [
    known("lanes", "ELFEN_LANES", LANES),
    known("policy", "ELFEN_POLICY", POLICY),
    known("budget", "ELFEN_BUDGET", POLICY),
    known("slo", "ELFEN_SLO", POLICY),
    known("ref-ipc", "ELFEN_REF_IPC", POLICY),
    known("service", "ELFEN_SERVICE", &["run"]),
    known("signal", "ELFEN_SIGNAL", &["run"]),
    known("nap", "ELFEN_NAP", &["run"]),
    known("inject", "ELFEN_INJECT", &["run"]),
    known("look-every", "ELFEN_LOOK_EVERY", &["run"]),
    known("look-slack", "ELFEN_LOOK_SLACK", &["run"]),
];

impl Known {
    /// As clap calls the option's argument.
    pub(crate) fn id(&self) -> String {
        self.key.replace('-', "_")
    }

    /// Whether a policy has a parameter of this name; other options have nothing to do with policies.
    fn is_used_by(&self, policy: &str) -> bool {
        match self.key {
            "budget" => matches!(policy, "fixed-budget" | "refresh-budget" | "dynamic-budget"),
            "slo" => policy == "slo-budget",
            "ref-ipc" => policy == "dynamic-budget",
            _ => true,
        }
    }

    /// What the variable says, if the option takes it.
    pub(crate) fn in_variable(&self) -> Result<Option<String>, Failure> {
        let Some(value) = std::env::var_os(self.variable) else { return Ok(None) };
        let value = value.to_string_lossy().into_owned();
        check(self.key, &value).map_err(|why| {
            let fix = format!("correct it, or `unset {}`", self.variable);
            Failure::new(Status::Usage, format!("variable {}", self.variable), why, fix)
        })?;
        Ok(Some(value))
    }
}

/// A command line that was understood.
pub(crate) struct Understood {
    pub(crate) cli: Cli,
    /// What of it nobody typed: `policy (from /etc/elfen/config.toml:2)`.
    pub(crate) untyped: Vec<String>,
}

/// A command line that was not, or that asks for help.
pub(crate) enum Refused {
    ByClap(clap::Error),
    Failure(Failure),
}

/// clap blames the option for what its variable says.
fn blame(error: clap::Error, words: &[OsString]) -> Refused {
    if !matches!(error.kind(), ErrorKind::InvalidValue | ErrorKind::ValueValidation) {
        return Refused::ByClap(error);
    }
    let rendered = error.render().to_string();
    let blamed = |known: &&Known| {
        let option = format!("--{}", known.key);
        let typed = words.iter().any(|word| word.to_string_lossy().starts_with(&option));
        !typed && rendered.contains(&format!("'{option} <"))
    };
    let of_variable = KNOWN.iter().find(blamed).map(Known::in_variable);
    match of_variable {
        Some(Err(failure)) => Refused::Failure(failure),
        _ => Refused::ByClap(error),
    }
}

impl From<clap::Error> for Refused {
    fn from(error: clap::Error) -> Self {
        Self::ByClap(error)
    }
}

/// The whole command with its variables, for parsing and for its manual.
pub(crate) fn command() -> Command {
    Cli::command().mut_subcommands(|sub| each_known(sub, &|known, arg| arg.env(known.variable)))
}

/// Changes the known options of a subcommand and of those below it.
fn each_known(sub: Command, change: &dyn Fn(&Known, clap::Arg) -> clap::Arg) -> Command {
    let name = sub.get_name().to_owned();
    let of_this = |known: &&Known| known.of.contains(&name.as_str());
    KNOWN
        .iter()
        .filter(of_this)
        .fold(sub, |sub, known| in_all(sub, &known.id(), &|arg| change(known, arg)))
}

fn in_all(sub: Command, id: &str, change: &dyn Fn(clap::Arg) -> clap::Arg) -> Command {
    let has = sub.get_arguments().any(|arg| arg.get_id() == id);
    let sub = if has { sub.mut_arg(id, change) } else { sub };
    sub.mut_subcommands(|below| in_all(below, id, change))
}

/// Understands a command line, with what the files say.
pub(crate) fn parse(words: &[OsString]) -> Result<Understood, Refused> {
    // Help and usage errors must not depend on files.
    let typed = command().try_get_matches_from(words).map_err(|error| blame(error, words))?;
    let name = typed.subcommand_name().unwrap_or_default();
    if !KNOWN.iter().any(|known| known.of.contains(&name)) {
        return Ok(Understood { cli: Cli::from_arg_matches(&typed)?, untyped: Vec::new() });
    }
    let files = load().map_err(Refused::Failure)?;
    let policy = policy_of(&typed, &files);
    let full = command().mut_subcommands(|sub| {
        each_known(sub, &|known, arg| match files.get(known.key) {
            _ if !known.is_used_by(&policy) => arg.env(Resettable::Reset),
            Some(setting) => arg.default_value(setting.text.clone()),
            None => arg,
        })
    });
    let matches = full.try_get_matches_from(words)?;
    let untyped = untyped(&matches, &files);
    Ok(Understood { cli: Cli::from_arg_matches(&matches)?, untyped })
}

/// The policy that holds in the end.
fn policy_of(typed: &ArgMatches, files: &Files) -> String {
    let leaf = leaf(typed);
    let file = || files.get("policy").map(|setting| setting.text.clone());
    let (source, value) = (source_of(leaf, "policy"), raw(leaf, "policy"));
    match source {
        Some(ValueSource::DefaultValue) | None => file().or(value),
        Some(_) => value,
    }
    .unwrap_or_default()
}

fn leaf(matches: &ArgMatches) -> &ArgMatches {
    matches.subcommand().map_or(matches, |(_, below)| leaf(below))
}

fn source_of(leaf: &ArgMatches, id: &str) -> Option<ValueSource> {
    leaf.ids().any(|known| known == id).then(|| leaf.value_source(id)).flatten()
}

fn raw(leaf: &ArgMatches, id: &str) -> Option<String> {
    leaf.ids().any(|known| known == id).then_some(())?;
    let value = leaf.get_raw(id)?.next()?;
    Some(value.to_string_lossy().into_owned())
}

fn untyped(matches: &ArgMatches, files: &Files) -> Vec<String> {
    let leaf = leaf(matches);
    let describe = |known: &Known| match source_of(leaf, &known.id())? {
        ValueSource::EnvVariable => Some(format!("{} (from {})", known.key, known.variable)),
        ValueSource::DefaultValue => {
            files.get(known.key).map(|setting| format!("{} (from {})", known.key, setting.place))
        }
        _ => None,
    };
    KNOWN.iter().filter_map(describe).collect()
}

/// A failure over arguments that nobody typed says where they come from.
pub(crate) fn explain(failure: Failure, untyped: &[String]) -> Failure {
    match failure {
        Failure::Reported { status: Status::Usage, what, why, fix } if !untyped.is_empty() => {
            let fix = format!("{fix}; not typed: {}", untyped.join(", "));
            Failure::Reported { status: Status::Usage, what, why, fix }
        }
        other => other,
    }
}

/// Reads the files, and holds every value in them against the option that takes it.
pub(crate) fn load() -> Result<Files, Failure> {
    let keys = KNOWN.map(|known| known.key);
    let files = Files::load(&keys).map_err(|wrong| refuse(&wrong))?;
    for setting in &files.settings {
        check(setting.key, &setting.text).map_err(|why| {
            let why = format!("{}: {why}", setting.key);
            refuse(&Wrong::Line { place: setting.place.clone(), why })
        })?;
    }
    Ok(files)
}

fn refuse(wrong: &Wrong) -> Failure {
    let fix = match wrong {
        Wrong::Unreadable { .. } | Wrong::Long { .. } => "make it readable, or remove it",
        Wrong::Line { .. } => "correct the line; `elfen config` shows all settings",
    };
    Failure::new(Status::Usage, format!("settings {}", wrong.place()), wrong, fix)
}

/// Whether the option of this name takes this text.
pub(crate) fn check(key: &str, text: &str) -> Result<(), String> {
    if key == "lanes" {
        return pair::parse(text).map(drop).map_err(|error| error.to_string());
    }
    let words = ["elfen", "run", &format!("--{key}={text}"), "program"].map(str::to_owned);
    match Cli::command().try_get_matches_from(words) {
        Ok(_) => Ok(()),
        Err(error) => Err(usage::sentence(&error.render().to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the table names options that are there, and is complete where it says so. Method: every option of
    /// every subcommand in the table, as clap has them; a variable shows that the table reached it.
    #[test]
    fn every_known_option_exists_where_it_is_said_to() {
        let command = command();
        for known in &KNOWN {
            for name in known.of {
                let sub = command.find_subcommand(name).unwrap_or_else(|| panic!("{name}"));
                assert!(reads(sub, known), "{} of {name}", known.key);
            }
            assert_eq!(known.variable, format!("ELFEN_{}", known.id().to_uppercase()));
        }
        let simulate = command.find_subcommand("simulate").expect("it has a --policy of its own");
        assert!(simulate.get_arguments().any(|arg| arg.get_id() == "policy"));
        assert!(KNOWN.iter().all(|known| !reads(simulate, known)));
    }

    fn reads(command: &Command, known: &Known) -> bool {
        let here = |arg: &clap::Arg| {
            *arg.get_id() == known.id() && arg.get_env().is_some_and(|name| name == known.variable)
        };
        command.get_arguments().any(here) || command.get_subcommands().any(|sub| reads(sub, known))
    }

    /// Goal: only a wrong use of what was not typed names its origin. Method: failures of each kind.
    #[test]
    fn a_usage_failure_names_what_was_not_typed() {
        let failure = |status| Failure::new(status, "what", "why", "fix");
        let untyped = ["nap (from ELFEN_NAP)".to_owned()];
        let shown = |status, untyped| explain(failure(status), untyped).to_string();
        assert_eq!(
            shown(Status::Usage, &untyped),
            "what: why; fix; not typed: nap (from ELFEN_NAP)"
        );
        assert_eq!(shown(Status::Usage, &[]), "what: why; fix");
        assert_eq!(shown(Status::Failed, &untyped), "what: why; fix");
    }
}
