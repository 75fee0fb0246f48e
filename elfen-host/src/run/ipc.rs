//! The IPC of request lanes, for `dynamic-budget`: from counters to the lane page,
//! where every check finds it.
//!
//! A guard looks at the counters whenever it looks at its lane, so checks need no descriptors and
//! no arithmetic. The figure is that of the lane over its latest 100,000 cycles or more. It goes
//! with the window's beginning and end, so that a policy can leave out an IPC that was measured, in
//! part or whole, in another request: see [`elfen_rt::signal::lane::LaneSlot::ipc_milli`].

use std::sync::atomic::Ordering::{Acquire, Relaxed};

use elfen_kernel::counters::{self, Counted, Counters};
use elfen_rt::signal::service::ServiceSlot;

/// Where counts come from.
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
    /// Hardware counters if there are any; else those of the service, which is
    /// `None` if none was named.
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

/// Fewer are over so soon that the figure would be that of a few cache misses.
const WINDOW_CYCLES: u64 = 100_000;

/// An IPC, and the stretch of time that it is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Window {
    pub(crate) ipc_milli: u64,
    pub(crate) since_ns: u64,
    pub(crate) until_ns: u64,
}

/// From counts to an IPC, window by window.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    before: Option<Counted>,
}

impl Meter {
    /// Instructions per 1000 cycles of the window that ends with these
    /// counts; `None` while it lasts.
    pub(crate) fn window(&mut self, now: Counted) -> Option<Window> {
        let before = self.before.get_or_insert(now);
        let cycles = now.cycles.checked_sub(before.cycles);
        let instructions = now.instructions.checked_sub(before.instructions);
        let Some((cycles, instructions)) = cycles.zip(instructions) else {
            // Another service, whose counts begin anew.
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
    fn a_window_has_its_own_ipc() {
        let mut meter = Meter::default();
        assert_eq!(ipc(&mut meter, at(5_000_000, 1_000_000)), None, "nothing to compare with");
        assert_eq!(ipc(&mut meter, at(5_050_000, 1_099_999)), None, "too short");
        let window = Window { ipc_milli: 750, since_ns: 1_000_000, until_ns: 1_200_000 };
        assert_eq!(meter.window(at(5_150_000, 1_200_000)), Some(window), "counted from the first");
        assert_eq!(ipc(&mut meter, at(5_150_000, 1_300_000)), Some(0));
        assert_eq!(ipc(&mut meter, at(7_150_000, 2_300_000)), Some(2000));
    }

    #[test]
    fn counts_that_begin_anew_begin_a_window() {
        let mut meter = Meter::default();
        meter.window(at(5_000_000, 5_000_000));
        assert_eq!(ipc(&mut meter, at(100, 200)), None);
        assert_eq!(ipc(&mut meter, at(150_100, 100_200)), Some(1500));
        assert_eq!(ipc(&mut meter, at(100, 900_000)), None, "instructions alone");
        assert_eq!(ipc(&mut meter, at(u64::MAX, u64::MAX)), Some(1000), "no overflow");
    }
}
