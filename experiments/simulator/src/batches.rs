//! The thesis's batch programs and naps, with the default costs of the model.
//!
//! The thesis prints few numbers on interference. The constants in this file are derived from them.
//! Every other value is a parameter.

use super::pair::{Batch, Polling, Signal};

/// A batch program of the model, and how it and a request slow each other.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    pub name: &'static str,
    pub request_slowdown_milli: u64,
    pub batch_slowdown_milli: u64,
}

pub const KINDS: [Kind; 2] = [
    // An ordinary program.
    Kind {
        name: "typical",
        // Figure 5.10(c): a core has a utilisation of 1.75 at 600 RPS on seven cores, where almost
        // every request shares its core. A request takes 5.8 ms alone, so sharing slows it by a
        // factor of 1.51. Section 5.6 cites a slowdown of 30 to 50 %.
        request_slowdown_milli: 1500,
        // Not published; the same factor is assumed.
        batch_slowdown_milli: 1500,
    },
    // A program with an IPC of 0.01.
    Kind { name: "pause", request_slowdown_milli: PAUSE_MILLI, batch_slowdown_milli: 1000 },
];

/// The slowdown of a request next to a program with an IPC of 0.01, in thousandths. In section 5.2,
/// p99 at 40 RPS next to this program equals p99 at 100 RPS without it. The section gives PAUSE "a
/// similar IPC".
const PAUSE_MILLI: u64 = 1370;

/// A kind of nap, by its name in `elfen run --nap`.
#[derive(Clone, Copy, Debug)]
pub struct Nap {
    pub name: &'static str,
    pub sleep_ns: u64,
    pub wake_ns: u64,
    pub slowdown_milli: u64,
}

/// The times are computed from the cycles of section 5.3.2 at 2 GHz. A request next to a lane in
/// MWAIT has a slowdown of 1, because the section says that MWAIT "releases its hardware
/// resources". We have not measured this.
pub const NAPS: [Nap; 4] = [
    // nanonap: 3285 cycles to sleep, 1438 to wake.
    Nap { name: "device", sleep_ns: 1643, wake_ns: 719, slowdown_milli: 1000 },
    // No numbers are published for these two. They use the numbers of MWAIT without the system
    // call: 2443 and 1036 cycles.
    Nap { name: "umwait", sleep_ns: 1222, wake_ns: 518, slowdown_milli: 1000 },
    Nap { name: "mwaitx", sleep_ns: 1222, wake_ns: 518, slowdown_milli: 1000 },
    // A lane that executes PAUSE never sleeps and never releases its share of the core.
    Nap { name: "spin", sleep_ns: 0, wake_ns: 518, slowdown_milli: PAUSE_MILLI },
];

/// Returns the nap with this name.
pub fn nap(name: &str) -> Option<Nap> {
    NAPS.into_iter().find(|nap| nap.name == name)
}

/// A check every microsecond, as in a program of small functions. This is an assumption.
pub const CHECKS: Polling = Polling::Checks { every_ns: 1000 };

/// A poll every 500 us: the default guard of `elfen run` for a program without checks.
pub const GUARD: Polling = Polling::Guard { every_ns: 500_000 };

impl Kind {
    /// Returns the batch program of the thesis: it has checks in its code, and its lane naps with
    /// nanonap.
    pub fn batch(&self) -> Batch {
        self.on(&NAPS[0], CHECKS)
    }

    pub fn on(&self, nap: &Nap, polling: Polling) -> Batch {
        Batch {
            request_slowdown_milli: self.request_slowdown_milli,
            batch_slowdown_milli: self.batch_slowdown_milli,
            nap_slowdown_milli: nap.slowdown_milli,
            polling,
            signal: Signal::Service,
            sleep_ns: nap.sleep_ns,
            wake_ns: nap.wake_ns,
            ipc_after_ns: 0,
        }
    }
}
