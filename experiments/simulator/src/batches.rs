//! Batch programs and lanes as the thesis has them: the model's defaults.
//!
//! The thesis prints few numbers on interference. What follows from those it does print stands
//! here; everything else is a parameter.

use super::pair::{Batch, Looks, Signal};

/// A batch program by name.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    pub name: &'static str,
    pub request_slowdown_milli: u64,
    pub batch_slowdown_milli: u64,
}

pub const KINDS: [Kind; 2] = [
    // A real program beside a request.
    Kind {
        name: "typical",
        // Figure 5.10(c): a core is used 1.75 times at 600 RPS on seven cores where a request is
        // nearly always shared. With 5.8 ms a request alone, that is a factor of 1.51. Section 5.6
        // has 30 to 50 % from others.
        request_slowdown_milli: 1500,
        // Not published.
        batch_slowdown_milli: 1500,
    },
    // A program of IPC 0.01, which does next to nothing.
    Kind { name: "pause", request_slowdown_milli: PAUSE_MILLI, batch_slowdown_milli: 1000 },
];

/// A request beside a program of IPC 0.01, in thousandths. Section 5.2: with it, p99 at 40 RPS is
/// what it is at 100 RPS without; and PAUSE has "a similar IPC".
const PAUSE_MILLI: u64 = 1370;

/// How a lane naps, by the name that `elfen run --nap` has for it.
#[derive(Clone, Copy, Debug)]
pub struct Nap {
    pub name: &'static str,
    pub sleep_ns: u64,
    pub wake_ns: u64,
    pub slowdown_milli: u64,
}

/// Times are cycles at 2 GHz from section 5.3.2. That a request beside a lane in MWAIT has the core
/// to itself is what "releases its hardware resources" there says; nobody has measured it here.
pub const NAPS: [Nap; 4] = [
    // nanonap: 3285 cycles to sleep, 1438 to wake.
    Nap { name: "device", sleep_ns: 1643, wake_ns: 719, slowdown_milli: 1000 },
    // MWAIT without the way into the kernel, 2443 and 1036, for want of numbers of their own.
    Nap { name: "umwait", sleep_ns: 1222, wake_ns: 518, slowdown_milli: 1000 },
    Nap { name: "mwaitx", sleep_ns: 1222, wake_ns: 518, slowdown_milli: 1000 },
    // A lane that PAUSEs never falls asleep, and never gives its core away.
    Nap { name: "spin", sleep_ns: 0, wake_ns: 518, slowdown_milli: PAUSE_MILLI },
];

/// The one that is called so.
pub fn nap(name: &str) -> Option<Nap> {
    NAPS.into_iter().find(|nap| nap.name == name)
}

/// A check every microsecond, as in a program of small functions. An assumption.
pub const CHECKS: Looks = Looks::Checks { every_ns: 1000 };

/// `elfen run` for a program without checks, unless told otherwise.
pub const GUARD: Looks = Looks::Guard { every_ns: 500_000 };

impl Kind {
    /// The program as the thesis had it: with checks in its code, on a lane with nanonap.
    pub fn batch(&self) -> Batch {
        self.on(&NAPS[0], CHECKS)
    }

    pub fn on(&self, nap: &Nap, looks: Looks) -> Batch {
        Batch {
            request_slowdown_milli: self.request_slowdown_milli,
            batch_slowdown_milli: self.batch_slowdown_milli,
            nap_slowdown_milli: nap.slowdown_milli,
            looks,
            signal: Signal::Service,
            sleep_ns: nap.sleep_ns,
            wake_ns: nap.wake_ns,
            ipc_after_ns: 0,
        }
    }
}
