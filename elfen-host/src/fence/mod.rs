//! Fences: cgroups that are lent, and what must hold of them.
//!
//! A fence is a cgroup that the kernel keeps on batch lanes and below everything else, while guards
//! that stand outside of it hold its lanes. Whatever is put into it is lent, and needs nothing.
//! [`guarantees`] says whether that holds, [`rank`] what ranks below what, and [`state`] is what a
//! machine's fences leave in a folder, so that they can be stopped by who knows nothing else.

pub mod guarantees;
pub mod rank;
pub mod state;
pub mod status;
