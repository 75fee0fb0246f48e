//! The subcommands of `elfen tailor`, one file each.

pub mod failure;
mod record;
mod report;
mod target;
mod watch;

use std::io::Write;
use std::process::ExitCode;

use elfen_console::failure::Failure;

const EXAMPLES: &str = "\
Examples:
  sudo elfen tailor record -d 10s --port 6379       a Redis that runs here
  elfen tailor report elfen.trace                   its slowest 1 %
  sudo elfen tailor watch --port 6379 --slow 10ms   a line for each slow request

`sudo elfen lab check` injects known faults into a test service, and shows whether the \
explanations are correct on this machine.";

/// Explain why the slowest requests of a service were slow
///
/// Records what the kernel does around the requests of an unmodified service, explains each request
/// as segments that sum up to its latency, and ranks the causes of its tail.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct TailorArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand, Debug)]
enum Command {
    Record(record::RecordArgs),
    Report(report::ReportArgs),
    Watch(watch::WatchArgs),
}

pub fn run(args: &TailorArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    match &args.command {
        Command::Record(args) => record::run(args, out),
        Command::Report(args) => report::run(args, out),
        Command::Watch(args) => watch::run(args, out),
    }
}
