//! `elfen profile trace`: records the instructions of a program for `elfen profile core`.

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use elfen_console::failure::{Failure, Status, to_stderr};
use elfen_console::output::{self, ResultFile};
use elfen_core_model::elftrace::{self, EXECUTED_MAX};

use crate::everything::{self, Ended, StartError, TraceError, TraceLimits};
use crate::signals;

const AFTER: &str = "\
The program runs in the code cache, under ptrace, until enough instructions are recorded: about \
fifty times as slowly. Then it goes on without Elfen. Its output and exit status are its own.

Recorded are the instructions of the program's first thread, with the addresses of memory that \
they use. If the program executes another one, the recording begins again there. A repeated \
string instruction has the addresses of its first repetition.

Not recorded:
  - instructions of the kernel;
  - code that belongs to no file, and instructions that cannot be moved;
  - addresses of gathers, of `bt` with a register, and of 32-bit operands.

Exit status: that of the program; 128 + N if signal N ended it; 126 and 127 if it cannot be run or \
was not found; 1 if nothing was recorded, or the trace cannot be written; 3 if it may not be traced.

Examples:
  elfen profile trace --instructions 20M -o run.elftrace -- ./program
  elfen profile trace --skip 100M -o run.elftrace -- lua5.4 script.lua
  elfen profile core run.elftrace";

/// Record the instructions of a program, and the addresses that they use
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER)]
pub(super) struct TraceArgs {
    /// How many instructions to record, as in 500k or 20M
    #[arg(long, value_name = "COUNT", default_value = "20M", value_parser = parse_length)]
    instructions: u64,

    /// How many instructions to run before that
    #[arg(long, value_name = "COUNT", default_value = "0", value_parser = parse_count)]
    skip: u64,

    /// Write the trace to this file
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,

    /// Print only what the program prints, and failures
    #[arg(short, long)]
    quiet: bool,

    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// Parses a count, such as `20M`.
fn parse_count(text: &str) -> Result<u64, String> {
    let (digits, unit) = match text.strip_suffix(['k', 'K']) {
        Some(digits) => (digits, 1_000),
        None => match text.strip_suffix('M') {
            Some(digits) => (digits, 1_000_000),
            None => match text.strip_suffix('G') {
                Some(digits) => (digits, 1_000_000_000),
                None => (text, 1),
            },
        },
    };
    let number: u64 = digits.parse().map_err(|_| "it is not a count, as in 20M".to_owned())?;
    number.checked_mul(unit).ok_or_else(|| "it is too large".to_owned())
}

fn parse_length(text: &str) -> Result<u64, String> {
    let count = parse_count(text)?;
    if (1..=EXECUTED_MAX).contains(&count) {
        Ok(count)
    } else {
        Err(format!("it must be from 1 to {}M", EXECUTED_MAX / 1_000_000))
    }
}

pub(super) fn run(args: &TraceArgs) -> Result<ExitCode, Failure> {
    // A file that cannot be written is found before the program runs.
    let unwritable = |error: io::Error| Failure::unwritable("the trace", &args.output, error);
    let file = ResultFile::open(&args.output).map_err(unwritable)?;
    if !args.quiet {
        to_stderr("trace: each instruction is recorded, in a code cache, under ptrace");
    }
    signals::pass_on()
        .map_err(|error| Failure::new(Status::Failed, "signals", error, "try again"))?;
    let limits = TraceLimits { skip: args.skip, instructions: args.instructions };
    let recorded = everything::record_trace(&args.program, limits, signals::set_program)
        .map_err(|error| failed(&error, args))?;
    let status = match recorded.ended {
        Ended::Exited(status) => u8::try_from(status).unwrap_or(1),
        Ended::Killed(signal) => u8::try_from(128 + signal).unwrap_or(1),
    };
    for left in &recorded.left {
        output::warn(&format!("not recorded: {left}"));
    }
    if recorded.lost > 0 {
        output::warn(&format!("{} stretches of the program are missing", recorded.lost));
    }
    let trace = recorded.trace;
    let executed = trace.executed();
    if executed == 0 {
        let fix = match args.skip {
            0 => "name a program that runs code of a file",
            _ => "use a smaller --skip",
        };
        return Err(Failure::new(Status::Failed, running(args), "nothing was recorded", fix));
    }
    file.write(|file| elftrace::write(&trace, file)).map_err(unwritable)?;
    if !args.quiet {
        let bytes = args.output.metadata().map_or(0, |known| known.len());
        to_stderr(&format!(
            "trace: {executed} instructions in {} blocks, {} addresses, {} KB",
            trace.blocks.len(),
            trace.addresses.len(),
            bytes.div_ceil(1000),
        ));
    }
    Ok(ExitCode::from(status))
}

fn failed(error: &TraceError, args: &TraceArgs) -> Failure {
    let (status, fix) = match error {
        TraceError::Start(StartError::Program(error)) => match error.kind() {
            io::ErrorKind::NotFound => (Status::NotFound, "name a program in PATH, or a path"),
            io::ErrorKind::PermissionDenied => (Status::NotStarted, "name an executable file"),
            _ => (Status::NotStarted, "name a program that runs"),
        },
        TraceError::Start(StartError::Rights) => (Status::Unsupported, "run as root"),
        TraceError::Start(StartError::Trace(_)) => {
            let fix = "allow ptrace, as with --cap-add=SYS_PTRACE in a container";
            (Status::Unsupported, fix)
        }
        TraceError::Wait(_) => (Status::Failed, "try again"),
    };
    Failure::new(status, running(args), error, fix)
}

fn running(args: &TraceArgs) -> String {
    let name = args.program.first().map(|word| word.to_string_lossy().into_owned());
    format!("running {}", name.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_have_units() {
        assert_eq!(parse_count("500k"), Ok(500_000));
        assert_eq!(parse_count("20M"), Ok(20_000_000));
        assert_eq!(parse_count("7"), Ok(7));
        assert!(parse_count("20 M").is_err() && parse_count("99999999999G").is_err());
        assert!(parse_length("0").is_err() && parse_length("1G").is_err());
    }
}
