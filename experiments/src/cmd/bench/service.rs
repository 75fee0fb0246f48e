//! `elfen lab bench service`: what a service pays for publishing a request.

use std::io::Write;
use std::process::ExitCode;

use elfen_console::failure::{Failure, Status};
use serde::Serialize;

use super::rows::{print, row};
use crate::bench::distribution::Distribution;
use crate::bench::service::{self, Cost};

const EXAMPLE: &str = "\
Example:
  elfen lab bench service --json | jq .begin_end_ns.median";

/// Measure what publishing a request costs a service
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Args {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    begin_end_ns: Distribution,
    two_clock_reads_ns: Distribution,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let Cost { begin_end_ns, two_clock_reads_ns } = service::measure().map_err(|error| {
        let fix = "see `ipcs -l` for the limits of shared memory";
        Failure::new(Status::Failed, "measuring the service's page", error, fix)
    })?;
    let rows = [
        row("begin and end of a request", "ns", &begin_end_ns),
        row("two readings of the clock", "ns", &two_clock_reads_ns),
    ];
    print(out, args.json, &Report { begin_end_ns, two_clock_reads_ns }, &rows)
}
