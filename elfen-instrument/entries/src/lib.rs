//! What `-fpatchable-function-entry` and `-mfunction-return=thunk-extern` leave in a program, and
//! what is written there: checks, and words that say which function runs.
//!
//! Bytes in, bytes out: no unsafe, no allocation, no input or output. The preload library
//! applies it to the program that it is loaded into, and the inspector to files, so both
//! agree on what can be patched.

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
pub use frames::{Frame, frame, frames};
pub use functions::FunctionStarts;
pub use go::GoFunctions;
pub use nops::{nop_run, padding_nops};

/// The section in which compilers list the addresses of the NOPs they left.
pub const SECTION: &str = "__patchable_function_entries";

/// The section that `libelfen_return.a` puts its `ret` into.
pub const RETURN_SECTION: &str = "elfen_return";

/// `endbr64`: where control-flow protection is on, the NOPs come after it.
const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];

/// Whether `address` is where a function's own code begins, so that code written there runs on
/// every call, and nothing jumps into the middle of it. `before` are the four bytes in front.
///
/// NOPs asked for *before* the entry (the second number of the option) are not: no thread executes
/// them.
pub fn is_entry(address: u64, before: [u8; 4], starts: &FunctionStarts<'_>) -> bool {
    match starts.start_of(address) {
        Some(start) if start == address => true,
        Some(start) => start.checked_add(4) == Some(address) && before == ENDBR64,
        None => false,
    }
}
