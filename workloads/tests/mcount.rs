//! The C programs call `mcount` at each entry, where an injected check can be attached. This binary
//! defines an `mcount` that counts its calls.

// Links the C programs, which are part of the crate.
use workloads as _;

use std::arch::global_asm;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

static CALLS: AtomicU64 = AtomicU64::new(0);

// `mcount` is called in the middle of a function's entry, so it must preserve every register.
global_asm!(
    ".globl mcount",
    "mcount:",
    "lock inc qword ptr [rip + {calls}]",
    "ret",
    calls = sym CALLS,
);

// SAFETY: as declared in c/micro.h. All arguments are valid.
unsafe extern "C" {
    safe fn elfen_micro_loop(seed: u64, calls: u64) -> u64;
    safe fn elfen_micro_matrix(seed: u64, calls: u64) -> u64;
}

/// Goal: every call of the empty function and of the product calls `mcount`, and so does the
/// function with the loop. Method: the number of calls, before and after.
#[test]
fn every_entry_asks_mcount() {
    for program in [elfen_micro_loop, elfen_micro_matrix] {
        let before = CALLS.load(Relaxed);
        program(1, 1_000);
        assert_eq!(CALLS.load(Relaxed) - before, 1_001);
    }
}
