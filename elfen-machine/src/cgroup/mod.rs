//! Creates, confines, ranks and freezes cgroups through the kernel's own files, and reads their
//! state.
//!
//! One path can exist in several hierarchies. On version 1, CPU shares, CPU lists and the freezer
//! have a hierarchy each. On version 2 there is one hierarchy. A [`Group`] is one path in all of
//! them, so other code does not distinguish versions.

mod file;
mod freezer;
mod group;
mod hierarchies;
mod path;

pub use file::Error;
pub use freezer::Freezer;
pub use group::{Group, Rank};
pub use hierarchies::{Hierarchies, Version, folders_of};
pub use path::CgroupPath;

pub(crate) use hierarchies::path_in;
