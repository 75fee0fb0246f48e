//! The two co-runners of the thesis's section 5.2. They show how much a batch thread disturbs a
//! request although it needs almost nothing of the core.
//!
//! The loops are written in assembly, so that their IPC is known without a counter. `stall` blocks
//! on memory with a non-temporal store and a fence in each round (in the thesis, IPC 0.01). `spin`
//! is an empty loop in which each instruction waits for the previous one (IPC 1). Neither uses the
//! caches.

use elfen_rt::check;
use std::arch::asm;
use workloads::batch::{Program, Work, Wrong, mix};

/// Both run for about a microsecond between two checks.
const STORES_A_STRETCH: u64 = 16;
const STEPS_A_STRETCH: u64 = 4_096;
const STRETCHES_OF_STORES: u64 = 500;
const STRETCHES_OF_STEPS: u64 = 1_000;

/// A cache line that no other data shares.
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
        Work { amount: STORES_A_STRETCH * STRETCHES_OF_STORES, unit: "stores" }
    }

    fn iterate(&mut self) -> Result<u64, Wrong> {
        for _ in 0..STRETCHES_OF_STORES {
            check!();
            self.store();
        }
        if self.line.0[0] == 1 {
            Ok(mix(self.seed ^ self.line.0[0]))
        } else {
            Err(Wrong("the last store did not reach memory"))
        }
    }
}

impl Stall {
    /// Stores a count down to 1 in memory.
    fn store(&mut self) {
        let line = self.line.0.as_mut_ptr();
        // SAFETY: `&mut self` gives exclusive access to the line, and the stores stay within its
        // first word. `left` starts above zero and reaches it, so the loop ends.
        unsafe {
            asm!(
                "2:",
                "movnti qword ptr [{line}], {left}",
                "mfence",
                "dec {left}",
                "jnz 2b",
                line = in(reg) line,
                left = inout(reg) STORES_A_STRETCH => _,
                options(nostack),
            );
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
        Work { amount: STEPS_A_STRETCH * STRETCHES_OF_STEPS, unit: "steps" }
    }

    fn iterate(&mut self) -> Result<u64, Wrong> {
        let mut left = 0;
        for _ in 0..STRETCHES_OF_STEPS {
            check!();
            left |= count_down();
        }
        Ok(mix(self.seed ^ left))
    }
}

/// Counts the steps between two checks down to 0, and returns this 0.
fn count_down() -> u64 {
    let mut left = STEPS_A_STRETCH;
    const { assert!(STEPS_A_STRETCH.is_multiple_of(16)) };
    // The additions use a register because newer cores execute additions of constants at no cost.
    //
    // SAFETY: only the two registers and the flags are changed. `left` starts at a multiple of the
    // 16 additions in a round, so it reaches zero and the loop ends.
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
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: both co-runners end, and their checksums depend on the work. Method: one iteration
    /// each, compared with the last stored count and the final counter.
    #[test]
    fn corunners_end() {
        assert_eq!(Stall::new(3).iterate().expect("memory holds"), mix(3 ^ 1));
        assert_eq!(Spin::new(3).iterate().expect("nothing to check"), mix(3));
    }
}
