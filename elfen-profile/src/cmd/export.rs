//! `elfen profile export`: converts a profile for other tools.

use std::fmt::Display;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use elfen_console::failure::{Failure, Status, named};
use elfen_console::output;

use super::input::{check_blocks, read};
use crate::export::{bolt, callgrind, firefox, folded, pprof};
use crate::lines::Lines;
use crate::profile::Profile;
use crate::samples;
use crate::stacks::Sources;
use crate::symbols::ProfileSymbols;

const AFTER: &str = "\
The formats for viewers need a profile with stacks: one by bursts, or one of `elfen profile record \
--by everything --what stacks`.

For bolt, the program must be linked with -Wl,--emit-relocs. For llvm, it must be compiled by \
clang with -O2 -gline-tables-only -fdebug-info-for-profiling.

Examples:
  elfen profile record -o run.elfprof -- ./program
  elfen profile export run.elfprof --to bolt > run.fdata
  llvm-bolt program -data run.fdata -reorder-blocks=ext-tsp -o program.fast
  elfen profile export run.elfprof --to llvm > run.prof
  clang -O2 -fprofile-sample-use=run.prof program.c -o program.fast
  elfen profile export run.elfprof --to folded | flamegraph.pl > run.svg
  elfen profile export run.elfprof --to pprof > run.pb.gz
  elfen profile export run.elfprof --to firefox > run.json
  elfen profile export run.elfprof --to callgrind > callgrind.out.run";

/// The formats that a profile can be converted to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum ExportFormat {
    /// Taken branches of one file, for llvm-bolt
    Bolt,
    /// Functions and their calls, for KCachegrind
    Callgrind,
    /// Stacks, for profiler.firefox.com
    Firefox,
    /// Stacks, one a line, for flame graphs
    Folded,
    /// Lines of one file, for clang -fprofile-sample-use
    Llvm,
    /// Stacks, for pprof
    Pprof,
}

impl ExportFormat {
    /// Whether it shows the callers of functions.
    fn has_stacks(self) -> bool {
        !matches!(self, Self::Bolt | Self::Llvm)
    }
}

/// Convert a profile for other tools
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER)]
pub(super) struct ExportArgs {
    /// A profile that `elfen profile record -o` wrote
    file: PathBuf,

    /// The format
    #[arg(long, value_name = "FORMAT")]
    to: ExportFormat,

    /// Of which file of the profile [default: the one with the most instructions]
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
}

pub(super) fn run(args: &ExportArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let failed = |why: &dyn Display, fix: &str| {
        Failure::new(Status::Failed, named("the profile", &args.file), why, fix)
    };
    let profile = read(&args.file)?;
    check_blocks(&profile, &args.file)?;
    if profile.files.is_empty() {
        return Err(failed(&"nothing was counted", "record a program that runs longer"));
    }
    let (symbols, changed) = ProfileSymbols::read(&profile);
    let bytes = if args.to.has_stacks() {
        if args.binary.is_some() {
            return Err(failed(&"--binary is for bolt and llvm only", "leave out --binary"));
        }
        if profile.stacks.is_empty() {
            return Err(failed(&"it has no stacks", "record it with `--what stacks`"));
        }
        for path in changed {
            output::warn(&format!("{path} has changed: its functions have no names"));
        }
        let sources = Sources::read(&profile);
        let exported = match args.to {
            ExportFormat::Callgrind => {
                Ok(callgrind::costs(&profile, &symbols, &sources).into_bytes())
            }
            ExportFormat::Firefox => firefox::profile(&profile, &symbols, &sources),
            ExportFormat::Pprof => pprof::profile(&profile, &symbols, &sources),
            _ => Ok(folded::stacks(&profile, &symbols, &sources).into_bytes()),
        };
        exported.map_err(|error| failed(&error, "record it again"))?
    } else {
        of_one_file(args, &profile, &symbols, &changed)?.into_bytes()
    };
    out.write_all(&bytes).map_err(Failure::output)?;
    Ok(ExitCode::SUCCESS)
}

/// For the tools that optimise one file.
fn of_one_file(
    args: &ExportArgs,
    profile: &Profile,
    symbols: &ProfileSymbols,
    changed: &[String],
) -> Result<String, Failure> {
    let failed = |why: &dyn Display, fix: &str| {
        Failure::new(Status::Failed, named("the profile", &args.file), why, fix)
    };
    let file = match &args.binary {
        Some(binary) => {
            let binary = binary.canonicalize().unwrap_or_else(|_| binary.clone());
            let binary = binary.to_string_lossy();
            profile.files.iter().position(|file| file.path == binary)
        }
        None => profile.hottest_file(),
    };
    let file = file.ok_or_else(|| failed(&"it has no such file", "leave out --binary"))?;
    let path = profile.files.get(file).map_or("", |file| &file.path);
    if changed.iter().any(|changed| changed == path) {
        let why = format!("{path} has changed since");
        return Err(failed(&why, "record it again"));
    }
    let number = u32::try_from(file).unwrap_or(u32::MAX);
    let table = symbols.table(number).ok_or_else(|| {
        failed(&format!("{path} cannot be read"), "restore it, or record another program")
    })?;
    let text = if args.to == ExportFormat::Bolt {
        bolt::branches(profile, number, table)
    } else {
        let lines = Lines::read(Path::new(path)).ok_or_else(|| {
            let fix = "compile it with -gline-tables-only -fdebug-info-for-profiling";
            failed(&format!("{path} has no lines"), fix)
        })?;
        samples::llvm(profile, number, table, &lines)
    };
    if text.is_empty() {
        return Err(failed(&format!("{path} has no symbols"), "link it without -s"));
    }
    Ok(text)
}
