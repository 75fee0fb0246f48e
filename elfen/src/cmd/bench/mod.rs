//! `elfen bench`: what Elfen's parts cost on this machine. One file a benchmark.

mod check;
mod guard;
mod nap;
mod overlap;
mod reaction;
mod service;
mod signal;

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;

use elfen_instrument::Inject;
use elfen_rt::signal::control::Settings;
use serde::Serialize;

use super::failure::Failure;
use super::lane_args::LaneArgs;
use super::run::{NapName, refuse};
use super::table;
use crate::bench::distribution::Distribution;
use crate::host::run::Order;
use crate::host::run::channels::{Channels, VARIABLE, Wanted};
use crate::host::run::looks::Looks;

const EXAMPLES: &str = "\
Examples:
  elfen bench check               what each kind of check adds to a call
  elfen bench nap                 how long a lane takes to sleep and to wake
  sudo elfen bench overlap        how long a batch runs next to requests
  sudo elfen bench signal         how late the task map is, and what it costs
  elfen bench service --json      what publishing a request costs, for scripts";

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
    Guard(guard::Args),
    Nap(nap::Args),
    Overlap(overlap::Args),
    Reaction(reaction::Args),
    Service(service::Args),
    Signal(signal::Args),
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    match &args.benchmark {
        Benchmark::Check(args) => check::run(args, out),
        Benchmark::Guard(args) => guard::run(args, out),
        Benchmark::Nap(args) => nap::run(args, out),
        Benchmark::Overlap(args) => overlap::run(args, out),
        Benchmark::Reaction(args) => reaction::run(args, out),
        Benchmark::Service(args) => service::run(args, out),
        Benchmark::Signal(args) => signal::run(args, out),
    }
}

/// What a benchmark's batch goes by.
enum Signals<'a> {
    Tasks,
    /// The page of this service.
    Service(&'a str),
}

/// The channels of a borrow-idle run whose batch is this process itself: its checks find them.
fn run_here(
    lanes: &LaneArgs,
    nap: NapName,
    looks: Looks,
    signals: Signals<'_>,
) -> Result<(Order, Arc<Channels>), Failure> {
    let (nap, alarm) = nap.open()?;
    let order = Order {
        pairs: vec![lanes.first_pair()?],
        settings: Settings::BORROW_IDLE,
        slo: None,
        inject: Inject::Guard,
        library: None,
        nap: Arc::new(nap),
        alarm: alarm.map(Arc::new),
        looks,
        program: OsString::from("bench"),
        arguments: Vec::new(),
    };
    let (wanted, service) = match signals {
        Signals::Tasks => (Wanted::Tasks, None),
        Signals::Service(name) => (Wanted::Service, Some(name)),
    };
    let channels = Channels::open(&order, wanted, service).map_err(|error| refuse(&error))?;
    let inheritance = channels.inheritance().map_err(|error| refuse(&error))?;
    // SAFETY: between two measurements this process has one thread.
    unsafe { std::env::set_var(VARIABLE, inheritance) };
    Ok((order, Arc::new(channels)))
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
    super::print(out, json, report, || table(rows))?;
    Ok(ExitCode::SUCCESS)
}
