//! Fences: cgroups that lanes are lent to, and the guarantees that hold for them.
//!
//! The kernel keeps a fence on its batch lanes and below everything else, while guards outside of
//! it hold these lanes. Processes need nothing to run in a fence. [`guarantees`] checks and repairs
//! a fence, [`rank`] says which cgroup ranks below which, and [`state`] records fences in a folder,
//! from which `elfen pause` can freeze them without the daemon.

pub mod guarantees;
pub mod rank;
pub mod state;
pub mod status;
