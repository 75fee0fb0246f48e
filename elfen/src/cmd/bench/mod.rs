//! `elfen bench`: what Elfen's parts cost on this machine. One file a benchmark.

mod check;
mod nap;
mod reaction;
mod service;
mod signal;

use std::io::Write;
use std::process::ExitCode;

use serde::Serialize;

use super::failure::Failure;
use super::table;
use crate::bench::distribution::Distribution;

const EXAMPLES: &str = "\
Examples:
  elfen bench check                    what each kind of check adds to a call
  elfen bench nap                      how long a lane takes to fall asleep and to wake
  sudo elfen bench signal              how late the task map is, and what it costs
  elfen bench service --json           what publishing a request costs, for scripts";

/// Measure what Elfen's parts cost on this machine
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    benchmark: Benchmark,
}

#[derive(clap::Subcommand, Debug)]
enum Benchmark {
    Check(check::Args),
    Nap(nap::Args),
    Reaction(reaction::Args),
    Service(service::Args),
    Signal(signal::Args),
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    match &args.benchmark {
        Benchmark::Check(args) => check::run(args, out),
        Benchmark::Nap(args) => nap::run(args, out),
        Benchmark::Reaction(args) => reaction::run(args, out),
        Benchmark::Service(args) => service::run(args, out),
        Benchmark::Signal(args) => signal::run(args, out),
    }
}

/// One line of a benchmark's table.
fn row(what: &str, unit: &str, distribution: &Distribution) -> Vec<String> {
    let Distribution { median, p99, max, n } = distribution;
    let cells = [what, unit].map(str::to_owned).into_iter();
    cells
        .chain([median, p99, max].map(|value| format!("{value:.1}")))
        .chain([n.to_string()])
        .collect()
}

fn table(rows: &[Vec<String>]) -> String {
    table::lines(&["what", "unit", "median", "p99", "max", "n"], rows)
}

/// Prints a benchmark's result: one JSON object, or the table.
fn print(
    out: &mut dyn Write,
    json: bool,
    report: &impl Serialize,
    rows: &[Vec<String>],
) -> Result<ExitCode, Failure> {
    if json {
        super::print_json(out, report)?;
    } else {
        out.write_all(table(rows).as_bytes()).map_err(Failure::output)?;
    }
    Ok(ExitCode::SUCCESS)
}
