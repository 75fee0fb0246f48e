//! `elfen profile report`: prints a profile.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use elfen_console::failure::{Failure, Status, named};
use elfen_console::output;

use crate::elfprof;
use crate::report::{ProfileReport, SortKey};
use crate::symbols::ProfileSymbols;

const AFTER: &str = "\
Examples:
  elfen profile report run.elfprof
  elfen profile report run.elfprof --sort call --top 10
  elfen profile report run.elfprof --json | jq '.functions[0]'";

/// Print which functions and calls of a profile ran most
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER)]
pub(super) struct ReportArgs {
    /// A profile that `elfen profile record -o` wrote
    file: PathBuf,

    /// What to list
    #[arg(long, value_name = "KEY", default_value = "function")]
    sort: SortKey,

    /// The number of rows
    #[arg(long, value_name = "ROWS", default_value_t = 20)]
    top: usize,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &ReportArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let profile = elfprof::read(&args.file).map_err(|error| {
        let fix = "name a file that `elfen profile record -o` wrote";
        Failure::new(Status::Failed, named("the profile", &args.file), error, fix)
    })?;
    let (symbols, changed) = ProfileSymbols::read(&profile);
    for path in changed {
        output::warn(&format!("{path} has changed since the profile: its functions have no names"));
    }
    let report = ProfileReport::of(&profile, &symbols, args.top);
    output::print(out, args.json, &report, || report.text(args.sort))?;
    Ok(ExitCode::SUCCESS)
}
