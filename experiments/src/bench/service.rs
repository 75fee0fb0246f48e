//! What publishing a request costs the service: one begin and end, and the two clock readings it
//! can't do without.

use std::hint::black_box;

use elfen_console::duration::number;
use elfen_rt::clock::monotonic_ns;
use elfen_rt::service::{ClaimError, Service};
use elfen_rt::signal::service::OpenError;

use super::distribution::Distribution;

const BATCHES: u32 = 500;
const PAIRS_A_BATCH: u32 = 2_000;

#[derive(Debug)]
pub(crate) struct Cost {
    pub(crate) begin_end_ns: Distribution,
    pub(crate) two_clock_reads_ns: Distribution,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Claim(#[from] ClaimError),
}

/// Measures on a page of this process alone, which is gone afterwards.
pub(crate) fn measure() -> Result<Cost, Error> {
    let service = Service::open(&format!("bench-{}", std::process::id()), 1)?;
    let mut worker = service.claim(0, 0)?;
    let (mut pairs, mut clocks) = (Vec::new(), Vec::new());
    for _ in 0..BATCHES {
        pairs.push(per_round(|round| {
            worker.begin(u64::from(round) + 1);
            worker.end();
        }));
        clocks.push(per_round(|_| {
            black_box(monotonic_ns());
            black_box(monotonic_ns());
        }));
    }
    drop(worker);
    // No other process knows the name; if the removal fails, the page goes with the machine's next
    // restart.
    service.remove().map_err(OpenError::Memory)?;
    let distribution =
        |values| Distribution::of(values).unwrap_or_else(|| unreachable!("not empty"));
    Ok(Cost { begin_end_ns: distribution(pairs), two_clock_reads_ns: distribution(clocks) })
}

fn per_round(mut round: impl FnMut(u32)) -> f64 {
    let start = monotonic_ns();
    (0..PAIRS_A_BATCH).for_each(&mut round);
    number(monotonic_ns() - start) / f64::from(PAIRS_A_BATCH)
}
