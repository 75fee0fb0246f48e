//! `elfen profile diff`: what changed between two profiles.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use elfen_console::failure::Failure;
use elfen_console::output;

use super::input::{check_counted, read};
use crate::diff::{Diff, DiffKey, other_files};
use crate::symbols::ProfileSymbols;

const AFTER: &str = "\
Shares are in percent, changes and their errors (±) in percentage points. Only changes larger than \
twice their errors are listed; --all lists all.

Functions match by their names and the names of their files, so a rebuilt program can be compared \
with the old one. The program of each profile must still exist: keep the old one, and write the \
new one to another folder. Edges are compared in files that have not changed.

Examples:
  elfen profile record -o before.elfprof -- old/program
  elfen profile record -o after.elfprof -- new/program
  elfen profile diff before.elfprof after.elfprof
  elfen profile diff before.elfprof after.elfprof --sort call --top 5";

/// Print which functions, calls or edges changed between two profiles
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER)]
pub(super) struct DiffArgs {
    /// A profile that `elfen profile record -o` wrote
    before: PathBuf,

    /// The profile to compare it with
    after: PathBuf,

    /// What to list
    #[arg(long, value_name = "KEY", default_value = "function")]
    sort: DiffKey,

    /// The number of rows
    #[arg(long, value_name = "ROWS", default_value_t = 20)]
    top: usize,

    /// Also list changes within twice their errors
    #[arg(long)]
    all: bool,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &DiffArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let [before, after] = [&args.before, &args.after].map(|path| read(path));
    let (before, after) = (before?, after?);
    check_counted(&before, &args.before)?;
    check_counted(&after, &args.after)?;
    let [(old, old_changed), (new, new_changed)] = [&before, &after].map(ProfileSymbols::read);
    for (file, changed) in [(&args.before, old_changed), (&args.after, new_changed)] {
        for path in changed {
            let since = file.display();
            output::warn(&format!("{path} has changed since {since}: its functions have no names"));
        }
    }
    if args.sort == DiffKey::Edge {
        for path in other_files(&before, &after) {
            output::warn(&format!(
                "edges of {path} are left out: the profiles have no common build"
            ));
        }
    }
    let diff = Diff::of((&before, &old), (&after, &new), args.sort, args.top, args.all);
    output::print(out, args.json, &diff, || diff.text())?;
    Ok(ExitCode::SUCCESS)
}
