//! The tables in which functions are looked up: `.eh_frame_hdr`, `.eh_frame`, and Go's.
#![no_main]

use elfen_entries::{FunctionStarts, GoFunctions, frame, visit_frames};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u64, u64, &[u8])| {
    let (base, address, bytes) = input;
    if let Some(starts) = FunctionStarts::parse(bytes, base) {
        let _all = starts.all().take(1 << 12).count();
        let _found = (starts.start_of(address), starts.frame_of(address), starts.count());
    }
    let _one = frame(bytes, base, address);
    visit_frames(bytes, base, |_| ());
    if let Some(functions) = GoFunctions::parse(bytes) {
        let _all = functions.all().take(1 << 12).count();
        let _found = (functions.bounds_of(address), functions.count());
    }
});
