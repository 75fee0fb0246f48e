//! HTTP from clients of `elfen-hedge`, and the requests that it would forward to servers.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| elfen_hedge::fuzzed::connection(bytes));
