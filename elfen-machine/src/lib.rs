//! Facts about a machine, and how to change where its processes run.
//!
//! [`topology`], [`lanes`] and [`pair`] tell which CPUs share a core and which can be lent. A
//! recorded machine can replace the real one ([`source`]). [`process`], [`affinity`], [`placement`]
//! and [`cgroup`] read and change where processes run. [`fence`] has records of fences and requests
//! to elfend. [`samplers`] finds the devices that sample instructions. [`doctor`] reports which
//! parts of Elfen work here, and why others do not.

pub mod accounts;
pub mod affinity;
pub mod cgroup;
pub mod cpulist;
pub mod doctor;
pub mod fence;
pub mod hsperf;
pub mod lane_args;
pub mod lanes;
pub mod mapped;
pub mod pair;
pub mod pidfd;
pub mod placement;
pub mod process;
pub mod samplers;
pub mod segment;
pub mod source;
pub mod systemd;
pub mod topology;
