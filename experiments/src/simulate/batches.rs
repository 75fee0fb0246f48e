//! Batch programs and lanes as the thesis has them: the model's defaults.
//!
//! The thesis prints few numbers on interference. What follows from those it does print stands
//! here; everything else is a parameter.

use super::pair::Batch;

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
    Kind {
        name: "pause",
        // Section 5.2: with it, p99 at 40 RPS is what it is at 100 RPS without.
        request_slowdown_milli: 1370,
        batch_slowdown_milli: 1000,
    },
];

impl Kind {
    /// The program on a lane whose naps are the thesis's: 3285 cycles to sleep and 1438 to wake at
    /// 2 GHz (section 5.3.2). A check every microsecond is an assumption.
    pub fn batch(&self) -> Batch {
        Batch {
            request_slowdown_milli: self.request_slowdown_milli,
            batch_slowdown_milli: self.batch_slowdown_milli,
            check_ns: 1000,
            sleep_ns: 1643,
            wake_ns: 719,
        }
    }
}
