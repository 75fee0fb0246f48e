//! Another process's memory, from outside: what is mapped where, its bytes, and a few system calls
//! made in its name.
//!
//! It is for descendants of `elfen run`, and for what `elfen shim --share` is told to. What is read
//! is input: a program can map and write what it likes.

mod calls;
mod group;
mod maps;
mod memory;

pub use calls::{Seized, TouchError, let_late_ones_go};
pub use group::{Event, Group};
pub use maps::{Mapping, mappings};
pub use memory::Memory;
