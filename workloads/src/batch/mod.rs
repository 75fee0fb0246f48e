//! The common part of `elfen-batch` and `elfen-batch-c`: repeats one iteration of a program, counts
//! the work, and verifies the result.
//!
//! All iterations with the same seed do the same work and must return the same checksum, however
//! often they are interrupted. So a run on borrowed time can be compared with a run on an idle
//! machine.
//!
//! The programs are in their binaries. The Rust programs have checks in their source, and a binary
//! with checks is recognized by them. The C programs are checked through their `-pg` entries
//! instead, so no code with checks may get into their binary.

mod c;
mod program;
mod repeat;

pub use c::{FLUSH_WORDS, Kind, MicroInC};
pub use program::{EmulatedCore, Program, Work, Wrong, checksum, mix};
pub use repeat::{Repetition, run};
