//! `elfen profile export`: converts a profile for other tools.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use elfen_console::failure::{Failure, Status, named};

use super::input::read;
use crate::export;
use crate::lines::Lines;
use crate::samples;
use crate::symbols::ProfileSymbols;

const AFTER: &str = "\
For bolt, the program must be linked with -Wl,--emit-relocs. For llvm, it must be compiled by \
clang with -O2 -gline-tables-only -fdebug-info-for-profiling.

Examples:
  elfen profile record -o run.elfprof -- ./program
  elfen profile export run.elfprof --to bolt > run.fdata
  llvm-bolt program -data run.fdata -reorder-blocks=ext-tsp -o program.fast
  elfen profile export run.elfprof --to llvm > run.prof
  clang -O2 -fprofile-sample-use=run.prof program.c -o program.fast";

/// The formats that a profile can be converted to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum ExportFormat {
    /// Taken branches of one file, for llvm-bolt
    Bolt,
    /// Lines of one file, for clang -fprofile-sample-use
    Llvm,
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
    let failed = |why: &dyn std::fmt::Display, fix: &str| {
        Failure::new(Status::Failed, named("the profile", &args.file), why, fix)
    };
    let profile = read(&args.file)?;
    if profile.files.is_empty() {
        return Err(failed(&"nothing was counted", "record a program that runs longer"));
    }
    let (symbols, changed) = ProfileSymbols::read(&profile);
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
    let text = match args.to {
        ExportFormat::Bolt => export::bolt(&profile, number, table),
        ExportFormat::Llvm => {
            let lines = Lines::read(Path::new(path)).ok_or_else(|| {
                let fix = "compile it with -gline-tables-only -fdebug-info-for-profiling";
                failed(&format!("{path} has no lines"), fix)
            })?;
            samples::llvm(&profile, number, table, &lines)
        }
    };
    if text.is_empty() {
        return Err(failed(&format!("{path} has no symbols"), "link it without -s"));
    }
    out.write_all(text.as_bytes()).map_err(Failure::output)?;
    Ok(ExitCode::SUCCESS)
}
