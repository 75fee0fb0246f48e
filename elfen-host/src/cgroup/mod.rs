//! Cgroups as the kernel's own files: made, kept on CPUs, ranked, frozen, and asked what holds.
//!
//! One path can lie in several hierarchies: on version 1 the CPU's shares, the CPUs and the freezer
//! each have one of their own; on version 2 all three are one. [`Group`] is that path in all of
//! those it takes, so that nothing above this folder asks for versions.

mod file;
mod freezer;
mod group;
mod hierarchies;
mod path;

pub use file::Error;
pub use freezer::Freezer;
pub use group::{Group, Rank};
pub use hierarchies::{Hierarchies, Version};
pub use path::CgroupPath;
