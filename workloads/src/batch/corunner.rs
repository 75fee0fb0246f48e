//! The two co-runners of the thesis's section 5.2: how much a batch thread disturbs that takes
//! almost nothing of the core.
//!
//! Their instructions are written out, so that their IPC is known without a counter. `stall` blocks
//! on memory with a non-temporal store and a fence each round (IPC about 0.01); `spin` is an empty
//! loop in which each instruction waits for the one before (IPC 1). Neither touches the caches.

use super::{Program, Work, Wrong, mix};
use std::arch::asm;

const STORES: u64 = 8_000;
/// What is left when the last round stores it; divides `STORES`.
const STORES_A_ROUND: u64 = 8;
const STEPS: u64 = 4_000_000;
/// Additions in one round of the empty loop; divides `STEPS`.
const STEPS_A_ROUND: u64 = 16;
const _: () = assert!(STORES.is_multiple_of(STORES_A_ROUND));
const _: () = assert!(STEPS.is_multiple_of(STEPS_A_ROUND));

/// A cache line that nobody else uses.
#[repr(align(64))]
#[derive(Debug)]
struct Line([u64; 8]);

#[derive(Debug)]
pub(super) struct Stall {
    seed: u64,
    line: Box<Line>,
}

impl Stall {
    pub(super) fn new(seed: u64) -> Self {
        Self { seed, line: Box::new(Line([0; 8])) }
    }
}

impl Program for Stall {
    fn work(&self) -> Work {
        Work { amount: STORES, unit: "stores" }
    }

    fn iterate(&mut self) -> Result<u64, Wrong> {
        let line = self.line.0.as_mut_ptr();
        // SAFETY: the line is ours, mutably, and the stores stay within its first word. `left`
        // starts at a multiple of the stores in a round, so it meets zero and the loop ends.
        unsafe {
            asm!(
                "2:",
                ".rept 8",
                "movnti qword ptr [{line}], {left}",
                "mfence",
                ".endr",
                "sub {left}, 8",
                "jnz 2b",
                line = in(reg) line,
                left = inout(reg) STORES => _,
                options(nostack),
            );
        }
        if self.line.0[0] == STORES_A_ROUND {
            Ok(mix(self.seed ^ self.line.0[0]))
        } else {
            Err(Wrong("the last store did not reach memory"))
        }
    }
}

#[derive(Debug)]
pub(super) struct Spin {
    seed: u64,
}

impl Spin {
    pub(super) fn new(seed: u64) -> Self {
        Self { seed }
    }
}

impl Program for Spin {
    fn work(&self) -> Work {
        Work { amount: STEPS, unit: "steps" }
    }

    fn iterate(&mut self) -> Result<u64, Wrong> {
        let mut left = STEPS;
        // Additions of a register: newer cores fold constants away before they execute.
        //
        // SAFETY: only the two registers and the flags are touched; `left` starts at a multiple of
        // the additions in a round, so it meets zero and the loop ends.
        unsafe {
            asm!(
                "2:",
                ".rept 16",
                "add {left}, {minus_one}",
                ".endr",
                "jnz 2b",
                left = inout(reg) left,
                minus_one = in(reg) -1_i64,
                options(nomem, nostack),
            );
        }
        Ok(mix(self.seed ^ left))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: both end, and return what their work leaves. Method: one iteration, against the last
    /// stored count and the empty counter.
    #[test]
    fn corunners_end() {
        assert_eq!(Stall::new(3).iterate().expect("memory holds"), mix(3 ^ 8));
        assert_eq!(Spin::new(3).iterate().expect("nothing to check"), mix(3));
    }
}
