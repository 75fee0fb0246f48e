//! Records of perf_event_open(2), and samples of instructions as processors write them.
#![no_main]

use elfen_profile::fuzzed;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u64, &[u8])| fuzzed::samples(input.1, input.0));
