//! What a machine is and can do.
//!
//! [`topology`], [`lanes`] and [`pair`] say which CPUs share a core and which may be lent; a
//! recorded machine can stand in for the real one ([`source`]). [`process`], [`affinity`],
//! [`placement`] and [`cgroup`] read and change where processes run. [`fence`] is what is recorded
//! of fences, and how elfend is asked. [`doctor`] says which parts of Elfen work here, and why not.

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
pub mod segment;
pub mod source;
pub mod systemd;
pub mod topology;
