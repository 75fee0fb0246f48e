//! A program's ELF file, as inspected before the start.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| elfen_instrument::fuzzed::file(bytes));
