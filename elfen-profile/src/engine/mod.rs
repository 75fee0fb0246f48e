//! What all ways to use the code cache need: memory that host and program share, the code of a
//! program's files, and what the events of its threads tell. Traced programs and shadows also share
//! the address space ([`space`]) and the system calls of stopped threads ([`thread`]).

pub(crate) mod callers;
pub(crate) mod near;
pub(crate) mod objects;
pub(crate) mod paths;
pub(crate) mod region;
pub(crate) mod regions;
pub(crate) mod rule_tally;
pub(crate) mod shares;
pub(crate) mod space;
pub(crate) mod streams;
pub(crate) mod tally;
pub(crate) mod thread;
pub(crate) mod trace;
pub(crate) mod trace_recorder;
pub(crate) mod unwind;
pub(crate) mod values;
pub(crate) mod walk;
