//! `elfen lab bench service`: what publishing a request costs a service. Baseline: the two readings
//! of the clock that it cannot do without.

use std::hint::black_box;

use elfen_console::duration;
use elfen_rt::clock::monotonic_ns;
use elfen_rt::service::{Service, Worker};
use elfen_rt::signal::service::OpenError;

use super::{BenchError, Column, Hear, Report, Row, Scenario, Values, label, metric, row, runs};

const PAIRS_A_BATCH: u32 = 2_000;

const EXAMPLE: &str = "\
Example:
  elfen lab bench service --json | jq '.costs[0].ns.median'";

/// Measure what publishing a request costs a service
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Args {
    /// Rounds, of 2000 requests each
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = runs())]
    runs: usize,
}

pub(crate) fn run(args: &Args, hear: Hear<'_>) -> Result<Report, BenchError> {
    let service = Service::open(&format!("bench-{}", std::process::id()), 1)?;
    let mut publishing = Publishing { worker: service.claim(0, 0)? };
    let table = publishing.table("costs", args.runs, hear)?;
    drop(publishing);
    // No other process knows the name; if the removal fails, the page goes with the machine's next
    // restart.
    service.remove().map_err(OpenError::Memory)?;
    Ok(Report { tables: vec![table], ..Report::default() })
}

struct Publishing<'a> {
    worker: Worker<'a>,
}

impl Scenario for Publishing<'_> {
    const COLUMNS: &'static [Column] =
        &[label("case", "what"), metric("ns", "time", "ns", 1).lower()];

    fn cases(&self) -> Vec<Row> {
        let cases = ["begin and end of a request", "two readings of the clock"];
        cases.map(|case| row!["case" => case]).to_vec()
    }

    fn run(&mut self, case: usize, _: usize, values: &mut Values) -> Result<(), BenchError> {
        let start = monotonic_ns();
        for request in 0..PAIRS_A_BATCH {
            if case == 0 {
                self.worker.begin(u64::from(request) + 1);
                self.worker.end();
            } else {
                black_box(monotonic_ns());
                black_box(monotonic_ns());
            }
        }
        let took = duration::number(monotonic_ns() - start);
        values.add("ns", took / f64::from(PAIRS_A_BATCH));
        Ok(())
    }
}
