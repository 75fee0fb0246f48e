//! Checks for programs that run already: finds a site near the address where a batch thread was
//! interrupted, and prepares what must be written there.
//!
//! ```text
//! Missed <-- Patched::propose(ip) --> Change --> applied by the thread that holds all batch lanes
//!              |        |     |
//!     object.rs: the    |   arena.rs: trampolines, and the pages that their checks read,
//!     function's bytes  |   mapped into the process when the first check is written
//!                elfen-rewrite: the patch site, and its code
//! ```
//!
//! In a Java virtual machine, `hotspot.rs` finds the compiled methods.
//!
//! All input comes from the memory of the process at the time of reading, and is untrusted. Each
//! write first compares the memory with the bytes that were decoded. A function that cannot be read
//! as a whole is left alone.

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
mod symbols;

pub use arena::{LaneAt, Pages};
pub use change::Change;
pub use counts::SiteCounts;
pub use missed::{FILTERED, Missed};
pub use patched::{Patched, StoppedAt};
