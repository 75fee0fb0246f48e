//! Memory of a program that is taken for a Java virtual machine.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: ([u16; 16], u16, &[u8])| {
    let (offsets, ip, memory) = input;
    elfen_instrument::fuzzed::hotspot(offsets, ip, memory);
});
