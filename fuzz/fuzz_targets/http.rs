//! What clients of `elfen-hedge` send, and what servers would get of it.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| elfen_hedge::fuzzed::connection(bytes));
