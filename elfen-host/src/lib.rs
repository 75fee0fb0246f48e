//! Elfen on one machine, as the operators' commands use it.
//!
//! It describes the machine ([`topology`], [`lanes`], [`doctor`]), runs batches on its lanes
//! ([`run`]), enforces fences ([`daemon`], [`fence`], [`cgroup`]), and finds services and their
//! metrics ([`services`], [`metrics`]). [`args`] are the options that several commands share. The
//! commands themselves print.

pub mod affinity;
pub mod args;
pub mod cgroup;
pub mod cpulist;
pub mod daemon;
pub mod doctor;
pub mod fence;
pub mod hsperf;
pub mod lanes;
pub mod mapped;
pub mod metrics;
pub mod pair;
mod pidfd;
pub mod process;
pub mod run;
mod segment;
pub mod services;
pub mod source;
pub mod systemd;
pub mod topology;
pub mod watches;
