//! `elfen config`: every setting with its value, and where that comes from.

use std::io::Write;
use std::process::ExitCode;

use serde::Serialize;

use super::failure::Failure;
use super::settings::{self, KNOWN, Known};
use super::table;
use crate::host::settings::{Files, VARIABLE};

const EXAMPLES: &str = "\
Examples:
  elfen config                             what holds, and why
  ELFEN_POLICY=slo-budget elfen config     with a variable
  elfen config --json | jq '.settings[] | select(.key == \"lanes\").value'

A file has lines like these:
  lanes = \"0:1,2:3\"
  policy = \"slo-budget\"
  slo = \"p99=100ms\"
  service = \"search\"";

/// Show every setting with its value and its source
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    settings: Vec<SettingReport>,
    files: Vec<FileReport>,
}

#[derive(Serialize)]
struct SettingReport {
    key: &'static str,
    /// Absent if nothing is set and nothing built in.
    value: Option<String>,
    /// `variable`, `file` or `built in`.
    source: &'static str,
    /// The variable, or the file and its line.
    place: Option<String>,
}

#[derive(Serialize)]
struct FileReport {
    file: String,
    found: bool,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let files = settings::load()?;
    let report = Report {
        settings: KNOWN.iter().map(|known| setting(known, &files)).collect::<Result<_, _>>()?,
        files: files
            .looked
            .iter()
            .map(|l| FileReport { file: l.file.display().to_string(), found: l.found })
            .collect(),
    };
    super::print(out, args.json, &report, || report.text())?;
    Ok(ExitCode::SUCCESS)
}

fn setting(known: &Known, files: &Files) -> Result<SettingReport, Failure> {
    let report = |value, source, place| SettingReport { key: known.key, value, source, place };
    if let Some(value) = known.in_variable()? {
        return Ok(report(Some(value), "variable", Some(known.variable.to_owned())));
    }
    Ok(match files.get(known.key) {
        Some(found) => report(Some(found.text.clone()), "file", Some(found.place.to_string())),
        None => report(built_in(known), "built in", None),
    })
}

/// The default of the option of `elfen run`.
fn built_in(known: &Known) -> Option<String> {
    let command = settings::command();
    let run = command.find_subcommand("run")?;
    let argument = run.get_arguments().find(|argument| *argument.get_id() == known.id())?;
    let value = argument.get_default_values().first()?;
    Some(value.to_string_lossy().into_owned())
}

impl Report {
    fn text(&self) -> String {
        let row = |setting: &SettingReport| {
            let source = setting.place.as_deref().unwrap_or(setting.source);
            let none = if setting.key == "lanes" { "the machine's own" } else { "-" };
            let value = setting.value.as_deref().unwrap_or(none);
            vec![setting.key.to_owned(), value.to_owned(), source.to_owned()]
        };
        let rows: Vec<Vec<String>> = self.settings.iter().map(row).collect();
        let mut text = table::lines(&["SETTING", "VALUE", "SOURCE"], &rows);
        text.push('\n');
        for FileReport { file, found } in &self.files {
            text += &format!("{file}: {}\n", if *found { "read" } else { "absent" });
        }
        if self.files.is_empty() {
            text += &format!("no files: neither a home nor {VARIABLE}\n");
        }
        text
    }
}
