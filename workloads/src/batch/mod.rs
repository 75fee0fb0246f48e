//! What `elfen-batch` and `elfen-batch-c` share: a program repeats one iteration, and what it did
//! is counted and checked.
//!
//! Every iteration of a seed does the same work and must return the same checksum, so that borrowed
//! work can be compared with work alone, however often it was stopped in between.
//!
//! The programs themselves are in their binaries. Those in Rust have a check in their source, and a
//! binary that has one is known by it: nothing of it may reach the binary of the programs in C,
//! which are checked through their `-pg` entries instead.

mod c;
mod program;
mod repeat;

pub use c::{FLUSH_WORDS, Kind, MicroInC};
pub use program::{EmulatedCore, Program, Work, Wrong, checksum, mix};
pub use repeat::{Repetition, run};
