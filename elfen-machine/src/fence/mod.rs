//! Fences: cgroups that borrow lanes, and their guarantees.
//!
//! The kernel confines a fence to its batch lanes, at the lowest rank, and guards outside of the
//! fence occupy these lanes. Programs run in a fence without any change. [`guarantees`] checks and
//! repairs a fence. [`rank`] compares the ranks of cgroups. [`state`] records fences in a folder,
//! so that `elfen pause` can freeze them without the daemon. [`status`] holds requests to the
//! daemon.

pub mod guarantees;
pub mod rank;
pub mod state;
pub mod status;
