//! How checks get into batch programs, and which ways a given program allows.
//!
//! | way | what the program needs | what checks |
//! | --- | --- | --- |
//! | [`Inject::Inline`] | `elfen_rt::check!()` or `elfen_check()` in its source | its own code |
//! | [`Inject::Patch`] | NOPs: `-fpatchable-function-entry=43` | code written over the NOPs |
//! | [`Inject::Fentry`] | `-pg -mfentry` | a hook of the preload library |
//! | [`Inject::Mcount`] | `-pg` | a hook of the preload library |
//! | [`Inject::Cyg`] | `-finstrument-functions` | a hook of the preload library |
//! | [`Inject::Live`] | nothing | code that is written into the running program: [`live`] |
//! | [`Inject::Guard`] | nothing | no code in the program: a guard thread of `elfen run` |
//!
//! This crate inspects files ([`inspect`]) and patches running programs from outside ([`live`] and
//! [`remote`]). Three sibling crates do the rest:
//!
//! - `elfen-preload` is the library that runs inside a program from its start.
//! - `elfen-entries` reads and writes the machine code at function entries, without I/O.
//! - `elfen-rewrite` decides where a check fits into code that was not built for checks.

mod elf;
mod file;
#[cfg(fuzzing)]
pub mod fuzzed;
mod library;
pub mod live;
pub mod process;
mod program;
pub mod remote;

pub use elfen_entries::{RETURN_SECTION, SECTION as ENTRIES_SECTION};
pub use library::{LIBRARY, LibraryError, find_library, preload};
pub use program::{Compiler, Inject, Plan, Program, Reason, best, inspect};
