//! `elfen profile` and its subcommands: arguments, messages and output.

mod compare;
mod core;
mod diff;
mod export;
mod input;
mod record;
mod report;
mod rules_file;
mod set;
mod trace;

use std::io::Write;
use std::process::ExitCode;

use elfen_console::failure::Failure;

const AFTER: &str = "\
Examples:
  elfen profile record -- ./program        prints the hottest functions
  elfen profile record -o run.elfprof -- lua5.4 script.lua
  elfen profile report run.elfprof --sort call --top 10
  elfen profile diff before.elfprof after.elfprof
  elfen profile export run.elfprof --to bolt > run.fdata
  elfen profile trace -o run.elftrace -- ./program
  elfen profile core run.elftrace          where a modelled core waits";

/// Count which code of a program runs, and how often
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER, arg_required_else_help = true)]
pub struct ProfileArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand, Debug)]
enum Command {
    Compare(compare::CompareArgs),
    Core(core::CoreArgs),
    Diff(diff::DiffArgs),
    Export(export::ExportArgs),
    Record(record::RecordArgs),
    Report(report::ReportArgs),
    Set(set::SetArgs),
    Trace(trace::TraceArgs),
}

pub fn run(args: &ProfileArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    match &args.command {
        Command::Compare(args) => compare::run(args, out),
        Command::Core(args) => core::run(args, out),
        Command::Diff(args) => diff::run(args, out),
        Command::Export(args) => export::run(args, out),
        Command::Record(args) => record::run(args),
        Command::Report(args) => report::run(args, out),
        Command::Set(args) => set::run(args, out),
        Command::Trace(args) => trace::run(args),
    }
}
