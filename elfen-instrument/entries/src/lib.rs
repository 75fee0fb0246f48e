//! Machine code at function entries and returns: what `-fpatchable-function-entry` and
//! `-mfunction-return=thunk-extern` leave there, and what is written over it (checks and function
//! tags).
//!
//! This crate maps bytes to bytes: no unsafe code, no allocation, no I/O. The preload library
//! applies it to its own process, and the inspector to files. So both agree on what can be patched.

#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

mod code;
mod frames;
mod functions;
mod go;
mod nops;

pub use code::{
    CHECK_BYTES, Check, Code, Entry, JUMP_BYTES, RETURN, Tag, call_through, jump, lower_half,
};
pub use frames::{Frame, frame, visit_frames};
pub use functions::FunctionStarts;
pub use go::GoFunctions;
pub use nops::{nop_run, padding_nops};

/// The section in which compilers list the addresses of their NOPs.
pub const SECTION: &str = "__patchable_function_entries";

/// The section of the `ret` in `libelfen_return.a`.
pub const RETURN_SECTION: &str = "elfen_return";

/// `endbr64`, which precedes the NOPs if control-flow protection is on.
const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];

/// Whether the code of a function begins at `address`, so that code written there runs on every
/// call and is not entered in its middle. `before` holds the four preceding bytes.
///
/// NOPs *before* the entry (the second number of the option) do not count, because no thread
/// executes them.
pub fn is_entry(address: u64, before: [u8; 4], starts: &FunctionStarts<'_>) -> bool {
    match starts.start_of(address) {
        Some(start) if start == address => true,
        Some(start) => start.checked_add(4) == Some(address) && before == ENDBR64,
        None => false,
    }
}
