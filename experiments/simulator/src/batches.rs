//! The thesis's batch programs and naps: the defaults of the model.
//!
//! The thesis prints few numbers on interference. The constants here follow from those; everything
//! else is a parameter.

use super::pair::{Batch, Polling, Signal};

/// A batch program by name.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    pub name: &'static str,
    pub request_slowdown_milli: u64,
    pub batch_slowdown_milli: u64,
}

pub const KINDS: [Kind; 2] = [
    // A real program.
    Kind {
        name: "typical",
        // Figure 5.10(c): the utilisation of a core is 1.75 at 600 RPS on seven cores, where almost
        // every request is shared. At 5.8 ms per request alone, that is a factor of 1.51. Section
        // 5.6 cites 30 to 50 %.
        request_slowdown_milli: 1500,
        // Not published.
        batch_slowdown_milli: 1500,
    },
    // A program of IPC 0.01, which does almost nothing.
    Kind { name: "pause", request_slowdown_milli: PAUSE_MILLI, batch_slowdown_milli: 1000 },
];

/// The slowdown of a request next to a program of IPC 0.01, in thousandths. Section 5.2: with it,
/// p99 at 40 RPS is that at 100 RPS without; and PAUSE has "a similar IPC".
const PAUSE_MILLI: u64 = 1370;

/// A kind of nap, by its name in `elfen run --nap`.
#[derive(Clone, Copy, Debug)]
pub struct Nap {
    pub name: &'static str,
    pub sleep_ns: u64,
    pub wake_ns: u64,
    pub slowdown_milli: u64,
}

/// Times are from cycles at 2 GHz in section 5.3.2. That a request next to a lane in MWAIT has the
/// core to itself follows from "releases its hardware resources" there; it was not measured here.
pub const NAPS: [Nap; 4] = [
    // nanonap: 3285 cycles to sleep, 1438 to wake.
    Nap { name: "device", sleep_ns: 1643, wake_ns: 719, slowdown_milli: 1000 },
    // No numbers are published for these, so they have those of MWAIT without the system call: 2443
    // and 1036 cycles.
    Nap { name: "umwait", sleep_ns: 1222, wake_ns: 518, slowdown_milli: 1000 },
    Nap { name: "mwaitx", sleep_ns: 1222, wake_ns: 518, slowdown_milli: 1000 },
    // A lane that executes PAUSE never sleeps, and never releases its share of the core.
    Nap { name: "spin", sleep_ns: 0, wake_ns: 518, slowdown_milli: PAUSE_MILLI },
];

/// The nap of this name.
pub fn nap(name: &str) -> Option<Nap> {
    NAPS.into_iter().find(|nap| nap.name == name)
}

/// A check every microsecond, as in a program of small functions. This is an assumption.
pub const CHECKS: Polling = Polling::Checks { every_ns: 1000 };

/// The default guard of `elfen run` for a program without checks.
pub const GUARD: Polling = Polling::Guard { every_ns: 500_000 };

impl Kind {
    /// The program as in the thesis: with checks in its code, on a lane with nanonap.
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
