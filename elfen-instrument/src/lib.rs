//! How checks get into batch programs, and which ways a program allows.
//!
//! | way | what the program has | who checks |
//! | --- | --- | --- |
//! | [`Inject::Inline`] | `elfen_rt::check!()` or `elfen_check()` in its source | its own code |
//! | [`Inject::Patch`] | room at entries: `-fpatchable-function-entry=43` | code written there |
//! | [`Inject::Fentry`] | `-pg -mfentry` | a hook of the preload library |
//! | [`Inject::Mcount`] | `-pg` | the same |
//! | [`Inject::Cyg`] | `-finstrument-functions` | the same |
//! | [`Inject::Live`] | nothing at all | code that is written into it as it runs: [`live`] |
//! | [`Inject::Guard`] | nothing at all | nobody inside it: `elfen run` guards the lane |
//!
//! This crate looks at files and decides, and brings [`live`] checks into programs that run, from
//! outside ([`remote`]). What runs inside a program from its start is `elfen-preload`, a crate of
//! its own beside this one; what both know of machine code is `elfen-entries`, and where a check
//! can go in code that was not made for it, `elfen-rewrite`.

mod elf;
mod file;
#[cfg(fuzzing)]
pub mod fuzzed;
mod library;
pub mod live;
mod program;
pub mod remote;

pub use elfen_entries::{RETURN_SECTION, SECTION as ENTRIES_SECTION};
pub use library::{LIBRARY, LibraryError, find_library, preload};
pub use program::{Compiler, Inject, Plan, Program, Reason, best, inspect};
