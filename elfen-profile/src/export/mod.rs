//! Profiles for other tools.

pub(crate) mod bolt;
pub(crate) mod callgrind;
pub(crate) mod firefox;
pub(crate) mod folded;
pub(crate) mod pprof;
