//! Access to another process: its mappings, its memory, and system calls made in its name.
//!
//! Used for descendants of `elfen run` and for the targets of `elfen shim --share`. Everything read
//! from such a process is untrusted input: a program can map and write what it likes.

mod calls;
pub mod descriptor;
mod group;
mod memory;
mod paused;
mod tracee;

pub use calls::{Seized, TouchError, find_syscall, release_late_threads};
pub use group::{Event, Group, ended};
pub use memory::{Mapping, Memory, mappings};
pub use paused::Paused;
pub use tracee::{Change, Resume, Tracee};
