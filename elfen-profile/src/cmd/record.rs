//! `elfen profile record`: runs a program and writes its profile.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use elfen_console::failure::{Failure, Status, to_stderr};
use elfen_console::output;

use crate::elfprof;
use crate::everything::{self, Ended, StartError, TraceError};
use crate::profile::Profile;
use crate::report::{ProfileReport, SortKey};
use crate::signals;
use crate::symbols::{ProfileSymbols, note_build_ids};

const AFTER: &str = "\
The program runs in a code cache, under ptrace, and so do its threads and children. It prints and \
returns what it would without Elfen, and takes about three times as long. Code that the program \
generates itself, as Java and JavaScript do, is not counted: such a process goes on without Elfen.

Exit status: that of the program; 128 + N if signal N ended it; 126 and 127 if it cannot be run or \
was not found; 1 if the profile cannot be written; 3 if it may not be traced.

Examples:
  elfen profile record -- ./program
  elfen profile record -o run.elfprof -- lua5.4 script.lua";

/// Rows that are printed if no file is named.
const ROWS: usize = 15;

/// How a profile comes about.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Mechanism {
    /// Count each edge of each block, exactly
    Everything,
}

/// Run a program, and count which of its code runs
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER)]
pub(super) struct RecordArgs {
    /// How to count
    #[arg(long, value_name = "MECHANISM", default_value = "everything")]
    by: Mechanism,

    /// Write the profile to a file [default: print the hottest functions]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Print only what the program prints, and failures
    #[arg(short, long)]
    quiet: bool,

    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

pub(super) fn run(args: &RecordArgs) -> Result<ExitCode, Failure> {
    // A file that cannot be written is found before the program runs.
    let file = args.output.as_deref().map(create).transpose()?;
    let Mechanism::Everything = args.by;
    if !args.quiet {
        to_stderr("profile by everything: each edge is counted, in a code cache, under ptrace");
    }
    signals::pass_on()
        .map_err(|error| Failure::new(Status::Failed, "signals", error, "try again"))?;
    let mut recorded = everything::record(&args.program, signals::set_program)
        .map_err(|error| failed(&error, args))?;
    recorded.profile.program =
        args.program.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    note_build_ids(&mut recorded.profile);
    if let (Some(file), Some(path)) = (file, args.output.as_deref()) {
        write(&recorded.profile, file, path)?;
    }
    if args.output.is_none() && !args.quiet {
        let (symbols, _) = ProfileSymbols::read(&recorded.profile);
        let report = ProfileReport::of(&recorded.profile, &symbols, ROWS);
        let _closed = io::stderr().write_all(report.text(SortKey::Function).as_bytes());
    } else {
        for left in &recorded.profile.left {
            output::warn(&format!("not counted: {left}"));
        }
    }
    Ok(ExitCode::from(match recorded.ended {
        Ended::Exited(status) => u8::try_from(status).unwrap_or(1),
        Ended::Killed(signal) => u8::try_from(128 + signal).unwrap_or(1),
    }))
}

fn create(path: &Path) -> Result<File, Failure> {
    output::create_private(path).map_err(|error| Failure::unwritable("the profile", path, error))
}

fn write(profile: &Profile, file: File, path: &Path) -> Result<(), Failure> {
    let mut file = BufWriter::new(file);
    elfprof::write(profile, &mut file)
        .and_then(|()| file.flush())
        .map_err(|error| Failure::unwritable("the profile", path, error))
}

fn failed(error: &TraceError, args: &RecordArgs) -> Failure {
    let name = args.program.first().map(|word| word.to_string_lossy().into_owned());
    let what = format!("running {}", name.unwrap_or_default());
    match error {
        TraceError::Start(StartError::Program(error)) => {
            let (status, fix) = match error.kind() {
                io::ErrorKind::NotFound => (Status::NotFound, "name a program in PATH, or a path"),
                io::ErrorKind::PermissionDenied => (Status::NotStarted, "name an executable file"),
                _ => (Status::NotStarted, "name a program that runs"),
            };
            Failure::new(status, what, error, fix)
        }
        TraceError::Start(StartError::Trace(_)) => {
            let fix = "allow ptrace, as with --cap-add=SYS_PTRACE in a container";
            Failure::new(Status::Unsupported, what, error, fix)
        }
        TraceError::Wait(_) => Failure::new(Status::Failed, what, error, "try again"),
    }
}
