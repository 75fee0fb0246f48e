//! Checks for programs that run already: where one fits near an address at which a batch thread was
//! interrupted, and what has to be written for it.
//!
//! ```text
//! Missed <-- Patched::propose(ip) --> Change --> applied by whoever holds every lane of the batch
//!              |        |     |
//!     object.rs: the    |   arena.rs: trampolines, and the pages that their checks look at,
//!     function's bytes  |   mapped into the process at its first touch
//!                elfen-rewrite: the place, and its code
//! ```
//!
//! Of a Java virtual machine, `hotspot.rs` finds the methods that it has compiled.
//!
//! Nothing is believed of a process but what its memory holds when it is looked at: each write is
//! held against the bytes that were decoded, and a function that can't be read whole is left alone.

mod arena;
mod change;
mod counts;
mod dense;
mod functions;
#[cfg(fuzzing)]
pub(crate) mod fuzzed;
mod hotspot;
mod missed;
mod notices;
mod object;
mod patched;
mod several;
mod status;
mod symbols;

pub use arena::{LaneAt, Pages};
pub use change::Change;
pub use counts::SiteCounts;
pub use missed::Missed;
pub use patched::{Patched, StoppedAt};
pub use status::{FILTERED, ProgramId, is_filtered};
