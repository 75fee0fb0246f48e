//! `elfen shim` and its subcommands: arguments, messages and output. The binary `elfen` includes
//! them.

mod args;
mod count;
mod gather;
mod lane_choice;
mod live;
mod numbers;
mod observe;
mod recording_file;
mod show;
mod signals;
mod suggestions;
mod target;
mod wait;

pub use signals::{Unavailable, WatchableSignals, watchable_signals};

use std::io::Write;
use std::process::ExitCode;

use elfen_console::failure::Failure;

const AFTER: &str = "\
A SIGNAL is one of: task (which task runs), function, tag, value, service:NAME.queue_len, \
SYMBOL[+OFFSET][:TYPE], 0xADDRESS:TYPE, map:FILE+OFFSET:TYPE, jvm:COUNTER. TYPE is u8 to u64 or \
i8 to i64. `elfen shim signals` lists the signals of a program.

Examples:
  elfen shim -- lua5.4 script.lua           what is visible without privileges
  elfen shim -- ./program                   functions built with room at entries
  sudo elfen shim -p 4242 --watch hits -d 2s   a global, by its name
  sudo elfen shim -p 4242 --watch 0x55d0c010a0:u64 --share -d 1s
  elfen shim -o run.shim -- ./service && elfen shim show run.shim
  elfen shim signals redis-server           what can be watched, and how

The observer spins on its own lane at normal priority. SIGINT and SIGTERM are passed on to the \
program and end the run within a second, with recording and summary. Exit status: that of the \
program; 1 if the recording ended early, 2 for wrong arguments, 3 if the machine has no suitable \
clock. With --json, the program's standard output goes to standard error.";

/// Sample what a running thread does, every few tens of nanoseconds, without stopping it
///
/// An observer on another lane repeatedly reads memory that the program writes anyway, and reports
/// what the program did and for how long.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER, args_conflicts_with_subcommands = true)]
#[command(arg_required_else_help = true)]
pub struct ShimArgs {
    #[command(subcommand)]
    command: Option<Command>,

    #[command(flatten)]
    observe: args::ObserveArgs,
}

#[derive(clap::Subcommand, Debug)]
enum Command {
    Signals(signals::SignalsArgs),
    Show(show::ShowArgs),
    Export(show::ExportArgs),
}

pub fn run(args: &ShimArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    match &args.command {
        None => observe::run(&args.observe, out),
        Some(Command::Signals(args)) => signals::run(args, out),
        Some(Command::Show(args)) => show::show(args, out),
        Some(Command::Export(args)) => show::export(args, out),
    }
}
