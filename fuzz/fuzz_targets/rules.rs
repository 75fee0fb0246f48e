//! A file of productions: parsed, and applied to instructions.
#![no_main]

use elfen_profile::fuzzed;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (&str, &[u8])| fuzzed::rules(input.0, input.1));
