//! What operators' commands do on a machine.
//!
//! What it looks like and what of it may be used ([`topology`], [`lanes`], [`doctor`]), running a
//! batch on its lanes ([`run`]), and finding what others run there ([`services`], [`metrics`]).
//! [`args`] are the options that several commands share. Printing is left to the commands.

pub mod affinity;
pub mod args;
pub mod cgroup;
pub mod cpulist;
pub mod cpuset;
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
