//! `elfen lab` and `elfen demo`. Both start the program `elfen-lab`, so that `elfen`, which runs as
//! root, does not contain the laboratory.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use elfen_console::command::Outcome;
use elfen_console::failure::{Failure, Status};
use elfen_console::programs::find_program;

const PROGRAM: &str = "elfen-lab";

/// Measure, simulate, plan and report (elfen-lab)
#[derive(clap::Args, Debug)]
#[command(disable_help_flag = true)]
#[command(after_help = "Example:\n  elfen lab --help     the commands of the laboratory")]
pub(crate) struct LabArgs {
    /// A command of the laboratory, and its arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    words: Vec<OsString>,
}

/// See what a batch costs a service, with and without Elfen, in a minute (elfen-lab)
#[derive(clap::Args, Debug)]
#[command(disable_help_flag = true)]
#[command(after_help = "Example:\n  elfen demo --help     what it runs, and its options")]
pub(crate) struct DemoArgs {
    /// Options of the demo
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "OPTIONS")]
    words: Vec<OsString>,
}

pub(crate) fn run(args: &LabArgs) -> Outcome {
    Err(exec_lab(&args.words))
}

pub(crate) fn demo(args: &DemoArgs) -> Outcome {
    let demo = OsString::from("demo");
    let words: Vec<OsString> = [&[demo], &args.words[..]].concat();
    Err(exec_lab(&words))
}

/// Replaces this process by `elfen-lab`. Returns only if that fails.
fn exec_lab(words: &[OsString]) -> Failure {
    let program = match find_program(PROGRAM) {
        Ok(program) => program,
        Err(error) => {
            let fix = "install the package elfen-lab, or build it with `cargo build --release`";
            return Failure::new(Status::NotFound, PROGRAM, error, fix);
        }
    };
    let error = Command::new(&program).args(words).exec();
    let what = format!("starting {}", program.display());
    Failure::new(Status::NotStarted, what, error, "check that it is executable")
}
