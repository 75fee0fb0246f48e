//! Tables of an object that a program has mapped.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u32, &[u8])| elfen_instrument::fuzzed::object(input.1, input.0.into()));
