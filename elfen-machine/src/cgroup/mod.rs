//! Cgroups, by the kernel's own files: makes, confines, ranks and freezes them, and reads what
//! holds.
//!
//! One path can exist in several hierarchies. On version 1, CPU shares, CPUs and the freezer each
//! have their own; on version 2 there is only one. [`Group`] is a path in all of them, so that code
//! outside of this folder needs not distinguish versions.

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

pub(crate) use hierarchies::path_in;
