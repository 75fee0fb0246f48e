//! This machine: what it looks like, and what of it may be used.

pub(crate) mod affinity;
pub(crate) mod cpulist;
pub(crate) mod cpuset;
pub(crate) mod doctor;
pub(crate) mod lanes;
pub(crate) mod metrics;
pub(crate) mod pair;
pub(crate) mod process;
pub(crate) mod run;
mod segment;
pub(crate) mod serve;
pub(crate) mod services;
pub(crate) mod settings;
pub(crate) mod source;
pub(crate) mod terminal;
pub(crate) mod topology;
