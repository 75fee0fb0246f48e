//! How checks get into batch programs, and which ways a given program allows.
//!
//! | way | what the program needs | what checks |
//! | --- | --- | --- |
//! | [`CheckMethod::Inline`] | `elfen_rt::check!()` or `elfen_check()` in its source | own code |
//! | [`CheckMethod::Patch`] | NOPs: `-fpatchable-function-entry=43` | code written over the NOPs |
//! | [`CheckMethod::Fentry`] | `-pg -mfentry` | a hook of the preload library |
//! | [`CheckMethod::Mcount`] | `-pg` | a hook of the preload library |
//! | [`CheckMethod::Cyg`] | `-finstrument-functions` | a hook of the preload library |
//! | [`CheckMethod::Live`] | nothing | code that is written into the running program: [`live`] |
//! | [`CheckMethod::Guard`] | nothing | no code in the program: a guard thread of `elfen run` |
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
pub mod symbols;

pub use elfen_entries::{RETURN_SECTION, SECTION as ENTRIES_SECTION};
pub use library::{LIBRARY, LibraryError, find_library, preload};
pub use program::{
    CheckMethod, Compiler, Plan, Program, Reason, best, file_of, gains_rights, inspect,
};
