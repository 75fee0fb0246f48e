//! What profiling costs by the paper's model.
//!
//! The paper charges one cycle for each replaced instruction, and the instructions of the handler.
//! It simulates a processor; here each instruction takes one cycle, those of the program too.

use elfen_console::duration::number;
use serde::Serialize;

/// Instructions that the unoptimised framework executes at each event: it reads the flag, counts
/// down, and branches. The paper gives 2 to 5.
const FRAMEWORK_INSTRUCTIONS: u64 = 3;
/// And at each profiled instruction: it reads the flag, and branches.
const FLAG_INSTRUCTIONS: u64 = 2;
/// A check of the two-copy baseline on this processor: `dec` of a counter in memory, and a branch.
const CHECK_INSTRUCTIONS: u64 = 2;
const REPLACEMENT_CYCLES: u64 = 1;

/// What a program has executed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Executed {
    pub(crate) instructions: u64,
    pub(crate) calls: u64,
    /// Calls and backward branches.
    pub(crate) events: u64,
    pub(crate) accesses: u64,
}

/// The instructions that a profile is interested in.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Profiled {
    /// Some of the events.
    Events(u64),
    Others(u64),
}

/// The parts of an overhead, each in percent of the program's instructions.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub(crate) struct Overhead {
    /// Deciding when to profile.
    pub(crate) basic_percent: f64,
    /// Looking at the flag, at each instruction that may be profiled.
    pub(crate) checks_percent: f64,
    /// The handlers.
    pub(crate) profiling_percent: f64,
}

impl Overhead {
    pub(crate) fn all(&self) -> f64 {
        self.basic_percent + self.checks_percent + self.profiling_percent
    }
}

impl Executed {
    fn percent(&self, cycles: u64) -> f64 {
        number(cycles) * 100.0 / number(self.instructions.max(1))
    }

    /// Of HPS: counters are part of the processor.
    pub(crate) fn by_hps(&self, collected: u64, handler: u64) -> Overhead {
        Overhead {
            basic_percent: 0.0,
            checks_percent: 0.0,
            profiling_percent: self.percent(collected * (REPLACEMENT_CYCLES + handler)),
        }
    }

    /// Of DISE without conditions: each event and each of the `profiled` instructions is replaced.
    /// The replacement of an event that is profiled too is charged once.
    pub(crate) fn by_dise(&self, profiled: Profiled, collected: u64, handler: u64) -> Overhead {
        let basic = self.events * (REPLACEMENT_CYCLES + FRAMEWORK_INSTRUCTIONS);
        let checks = match profiled {
            Profiled::Events(count) => count * FLAG_INSTRUCTIONS,
            Profiled::Others(count) => count * (REPLACEMENT_CYCLES + FLAG_INSTRUCTIONS),
        };
        Overhead {
            basic_percent: self.percent(basic),
            checks_percent: self.percent(checks),
            profiling_percent: self.percent(collected * handler),
        }
    }

    /// Of two copies of the code: a check at each method entry and backward branch.
    pub(crate) fn by_two_copies(&self, collected: u64, handler: u64) -> Overhead {
        Overhead {
            basic_percent: self.percent(self.events * CHECK_INSTRUCTIONS),
            checks_percent: 0.0,
            profiling_percent: self.percent(collected * handler),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXECUTED: Executed =
        Executed { instructions: 10_000, calls: 200, events: 500, accesses: 4_000 };

    #[test]
    fn each_system_is_charged_for_what_it_executes() {
        let hps = EXECUTED.by_hps(5, 19);
        assert_eq!((hps.basic_percent, hps.profiling_percent), (0.0, 1.0));
        let dise = EXECUTED.by_dise(Profiled::Events(200), 5, 19);
        assert_eq!((dise.basic_percent, dise.checks_percent), (20.0, 4.0));
        assert_eq!(dise.profiling_percent, 0.95);
        assert_eq!(dise.all(), 24.95);
        let streams = EXECUTED.by_dise(Profiled::Others(4_000), 0, 19);
        assert_eq!((streams.basic_percent, streams.checks_percent), (20.0, 120.0));
        let copies = EXECUTED.by_two_copies(5, 19);
        assert_eq!((copies.basic_percent, copies.checks_percent), (10.0, 0.0));
    }
}
