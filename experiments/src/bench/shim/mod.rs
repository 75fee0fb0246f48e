//! What observing by `elfen shim` gives, and what it costs: how often a word can be read, what the
//! observed pays, whether double-time error finds the wrong rates, and whether a recording agrees
//! with the observed's own account.
//!
//! All of it depends on how far apart the two lanes are, which in a virtual machine changes under
//! us: it is measured before and after, and a far machine is waited for.

mod cost;
mod dte;
mod rates;
mod stage;
mod truth;

use std::thread;
use std::time::Duration;

use elfen_console::duration::number;
use elfen_shim::round_trip;
use serde::Serialize;

use stage::on_lane;

pub(crate) use cost::Cost;
pub(crate) use dte::Dte;
pub(crate) use rates::Rate;
pub(crate) use stage::{Error, Lanes};
pub(crate) use truth::{Size, Truth};

/// Lanes further apart than this are waited for.
const NEAR_TICKS: u64 = 400;
const WAITS: u32 = 10;
const WAIT: Duration = Duration::from_secs(1);

/// Everything that was measured.
#[derive(Debug, Serialize)]
pub(crate) struct Measured {
    pub(crate) clock_step_ticks: u64,
    pub(crate) ticks_per_us: f64,
    pub(crate) line_round_trip_ticks: u64,
    pub(crate) rates: Vec<Rate>,
    pub(crate) costs: Vec<Cost>,
    pub(crate) truth: Vec<Truth>,
    pub(crate) sizes: Vec<Size>,
    pub(crate) dte: Vec<Dte>,
    /// Whether the lanes were far apart, before or after.
    pub(crate) disturbed: bool,
}

pub(crate) fn measure(lanes: Lanes) -> Result<Measured, Error> {
    let before = near(lanes)?;
    let rates = rates::measure(lanes)?;
    let dte = dte::measure(lanes, before)?;
    let (truth, sizes) = truth::measure(lanes)?;
    let costs = on_lane(lanes.on, || cost::measure(lanes))?;
    let after = on_lane(lanes.from, || Ok(round_trip::ticks(lanes.on)))?;
    Ok(Measured {
        clock_step_ticks: lanes.clock.step_ticks,
        ticks_per_us: number(lanes.clock.ticks_per_second) / 1e6,
        line_round_trip_ticks: before,
        rates,
        costs,
        truth,
        sizes,
        dte,
        disturbed: before > NEAR_TICKS || after.is_none_or(|after| after > NEAR_TICKS),
    })
}

/// The round trip of a line, once it is short, or when that was waited for in vain.
fn near(lanes: Lanes) -> Result<u64, Error> {
    let mut least = None;
    for _ in 0..WAITS {
        let now = on_lane(lanes.from, || Ok(round_trip::ticks(lanes.on)))?;
        least = [least, now].into_iter().flatten().min();
        if now.is_some_and(|ticks| ticks <= NEAR_TICKS) {
            break;
        }
        thread::sleep(WAIT);
    }
    least.ok_or(Error::NoRoundTrip)
}
