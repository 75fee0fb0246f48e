//! The C programs ask `mcount` at each entry, which is where an injected check goes. This binary
//! has an
//! `mcount` of its own, which counts.

// The C programs are linked with the crate.
use workloads as _;

use std::arch::global_asm;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

static CALLS: AtomicU64 = AtomicU64::new(0);

// Called in the middle of a function's entry: it must leave every register as it was.
global_asm!(
    ".globl mcount",
    "mcount:",
    "lock inc qword ptr [rip + {calls}]",
    "ret",
    calls = sym CALLS,
);

// SAFETY: as declared in c/micro.h; any arguments will do.
unsafe extern "C" {
    safe fn elfen_micro_loop(seed: u64, calls: u64) -> u64;
    safe fn elfen_micro_matrix(seed: u64, calls: u64) -> u64;
}

/// Goal: every call of the empty function and of the product passes `mcount`, and so do the
/// functions that call them. Method: counts of calls, before and after.
#[test]
fn every_entry_asks_mcount() {
    for program in [elfen_micro_loop, elfen_micro_matrix] {
        let before = CALLS.load(Relaxed);
        program(1, 1_000);
        assert_eq!(CALLS.load(Relaxed) - before, 1_001);
    }
}
