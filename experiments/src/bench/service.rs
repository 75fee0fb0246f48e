//! `elfen lab bench service`: what publishing a request costs a service. Baseline: the two readings
//! of the clock that publishing always needs.

use std::hint::black_box;

use elfen_console::duration;
use elfen_rt::clock::monotonic_ns;
use elfen_rt::service::Service;
use elfen_rt::signal::service::OpenError;

use super::{BenchError, BenchReport, Column, Progress, cases, label, measure, metric, runs};

const PAIRS_A_BATCH: u32 = 2_000;

const EXAMPLE: &str = "\
Example:
  elfen lab bench service --json | jq '.costs[0].ns.median'";

/// Measure the cost of publishing a request for a service
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLE)]
pub(crate) struct BenchServiceArgs {
    /// Number of rounds, each of 2000 requests
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = runs())]
    runs: usize,
}

pub(crate) fn run(
    args: &BenchServiceArgs,
    progress: Progress<'_>,
) -> Result<BenchReport, BenchError> {
    let service = Service::open(&format!("bench-{}", std::process::id()), 1)?;
    let mut worker = service.claim(0, 0)?;
    let cases = cases("case", ["begin and end of a request", "two readings of the clock"]);
    let table = measure(("costs", COSTS), &cases, args.runs, progress, |case, _, values| {
        let start = monotonic_ns();
        for request in 0..PAIRS_A_BATCH {
            if case == 0 {
                worker.begin(u64::from(request) + 1);
                worker.end();
            } else {
                black_box(monotonic_ns());
                black_box(monotonic_ns());
            }
        }
        let took = duration::number(monotonic_ns() - start);
        values.add("ns", took / f64::from(PAIRS_A_BATCH));
        Ok(())
    })?;
    drop(worker);
    // No other process knows the name. If the removal fails, the page stays until the machine
    // restarts.
    service.remove().map_err(OpenError::Memory)?;
    Ok(table.into())
}

const COSTS: &[Column] = &[label("case", "what"), metric("ns", "time", "ns", 1).lower()];
