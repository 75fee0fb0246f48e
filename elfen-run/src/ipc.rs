//! The IPC of request lanes, for `dynamic-budget`: from counters to the lane page.
//!
//! A guard reads the counters whenever it polls its lane, so threads with checks need no
//! descriptors and no arithmetic. The IPC is that of the lane over its latest 100,000 cycles or
//! more. It is published with the beginning and end of that window, so that a policy can ignore an
//! IPC that was measured, even in part, during another request: see
//! [`elfen_rt::signal::lane::LaneSlot::ipc_milli`].

use std::sync::atomic::Ordering::{Acquire, Relaxed};

use elfen_kernel::counters::{self, Counted, Counters};
use elfen_rt::signal::service::ServiceSlot;

/// The source of instruction and cycle counts.
#[derive(Debug)]
pub enum Counts {
    /// The request lanes' own hardware counters.
    Hardware(Counters),
    /// The counts that the service publishes.
    Published,
}

#[derive(Debug, thiserror::Error)]
#[error("{hardware}, and {service}")]
pub struct NoCounts {
    hardware: counters::Error,
    service: &'static str,
}

impl Counts {
    /// Opens hardware counters if possible; otherwise uses the counts of the service, which is
    /// `None` if no service was named.
    pub fn open<'a>(
        requests: &[u32],
        service: Option<impl Iterator<Item = &'a ServiceSlot>>,
    ) -> Result<Self, NoCounts> {
        let hardware = match Counters::open(requests) {
            Ok(counters) => return Ok(Self::Hardware(counters)),
            Err(error) => error,
        };
        match service.map(|mut slots| slots.any(|slot| published(slot).is_some())) {
            Some(true) => Ok(Self::Published),
            Some(false) => Err(NoCounts { hardware, service: "the service publishes none" }),
            None => Err(NoCounts { hardware, service: "no service was named" }),
        }
    }

    pub fn name(&self) -> &'static str {
        match self {
            Self::Hardware(_) => "hardware",
            Self::Published => "service",
        }
    }

    pub fn read(&self, request: u32, service: Option<&ServiceSlot>) -> Option<Counted> {
        match self {
            Self::Hardware(counters) => counters.read(request),
            Self::Published => service.and_then(published),
        }
    }
}

fn published(slot: &ServiceSlot) -> Option<Counted> {
    // Acquire: pairs with the release in `Worker::count`.
    let cycles = slot.cycles.load(Acquire);
    let [instructions, at_ns] =
        [&slot.instructions, &slot.counted_at_ns].map(|word| word.load(Relaxed));
    (cycles != 0).then_some(Counted { instructions, cycles, at_ns })
}

/// A shorter window ends so soon that a few cache misses would determine its IPC.
const WINDOW_CYCLES: u64 = 100_000;

/// An IPC, and the time over which it was measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Window {
    pub(crate) ipc_milli: u64,
    pub(crate) since_ns: u64,
    pub(crate) until_ns: u64,
}

/// Turns counts into an IPC for each window.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    before: Option<Counted>,
}

impl Meter {
    /// Ends a window with these counts, and returns its instructions per 1000 cycles. `None` if the
    /// window is still too short.
    pub(crate) fn window(&mut self, now: Counted) -> Option<Window> {
        let before = self.before.get_or_insert(now);
        let cycles = now.cycles.checked_sub(before.cycles);
        let instructions = now.instructions.checked_sub(before.instructions);
        let Some((cycles, instructions)) = cycles.zip(instructions) else {
            // Another service, whose counts start from 0.
            *before = now;
            return None;
        };
        if cycles < WINDOW_CYCLES {
            return None;
        }
        let since_ns = std::mem::replace(before, now).at_ns;
        let ipc_milli = u64::try_from(u128::from(instructions) * 1000 / u128::from(cycles)).ok()?;
        Some(Window { ipc_milli, since_ns, until_ns: now.at_ns })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(instructions: u64, cycles: u64) -> Counted {
        Counted { instructions, cycles, at_ns: cycles }
    }

    fn ipc(meter: &mut Meter, now: Counted) -> Option<u64> {
        meter.window(now).map(|window| window.ipc_milli)
    }

    #[test]
    fn each_window_has_its_own_ipc() {
        let mut meter = Meter::default();
        assert_eq!(ipc(&mut meter, at(5_000_000, 1_000_000)), None, "nothing to compare with");
        assert_eq!(ipc(&mut meter, at(5_050_000, 1_099_999)), None, "too short");
        let window = Window { ipc_milli: 750, since_ns: 1_000_000, until_ns: 1_200_000 };
        assert_eq!(meter.window(at(5_150_000, 1_200_000)), Some(window), "counted from the first");
        assert_eq!(ipc(&mut meter, at(5_150_000, 1_300_000)), Some(0));
        assert_eq!(ipc(&mut meter, at(7_150_000, 2_300_000)), Some(2000));
    }

    #[test]
    fn counts_that_restart_begin_a_new_window() {
        let mut meter = Meter::default();
        meter.window(at(5_000_000, 5_000_000));
        assert_eq!(ipc(&mut meter, at(100, 200)), None);
        assert_eq!(ipc(&mut meter, at(150_100, 100_200)), Some(1500));
        assert_eq!(ipc(&mut meter, at(100, 900_000)), None, "only the instructions restarted");
        assert_eq!(ipc(&mut meter, at(u64::MAX, u64::MAX)), Some(1000), "no overflow");
    }
}
