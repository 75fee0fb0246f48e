//! `elfen lab bench`: what Elfen's parts cost on this machine. One file a benchmark.

mod batch;
mod check;
mod guard;
mod hedge;
mod here;
mod nap;
mod overlap;
mod rows;
mod service;
mod shim;
mod signal;
mod tailor;

use std::io::Write;
use std::process::ExitCode;

use elfen_console::failure::Failure;

const EXAMPLES: &str = "\
Examples:
  sudo elfen lab bench batch -- xz -6 -k -c a.tar  any program, beside requests
  elfen lab bench check               what each kind of check adds to a call
  elfen lab bench hedge               what a hedging proxy makes of pauses
  elfen lab bench nap                 how long a lane takes to sleep and to wake
  sudo elfen lab bench overlap        how long a batch runs next to requests
  sudo elfen lab bench signal         how late the task map is, and its cost
  elfen lab bench service --json      what publishing a request costs
  elfen lab bench shim                what elfen shim sees, and what that costs";

/// Measure what Elfen's parts cost on this machine
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    #[command(subcommand)]
    benchmark: Benchmark,
}

#[derive(clap::Subcommand, Debug)]
enum Benchmark {
    Batch(batch::Args),
    Check(check::Args),
    Guard(guard::Args),
    Hedge(hedge::Args),
    Nap(nap::Args),
    Overlap(overlap::Args),
    Service(service::Args),
    Shim(shim::Args),
    Signal(signal::Args),
    Tailor(tailor::Args),
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    match &args.benchmark {
        Benchmark::Batch(args) => batch::run(args, out),
        Benchmark::Check(args) => check::run(args, out),
        Benchmark::Guard(args) => guard::run(args, out),
        Benchmark::Hedge(args) => hedge::run(args, out),
        Benchmark::Nap(args) => nap::run(args, out),
        Benchmark::Overlap(args) => overlap::run(args, out),
        Benchmark::Service(args) => service::run(args, out),
        Benchmark::Shim(args) => shim::run(args, out),
        Benchmark::Signal(args) => signal::run(args, out),
        Benchmark::Tailor(args) => tailor::run(args, out),
    }
}
