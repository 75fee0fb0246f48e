//! What each program here asks of its own process: where a thread runs, how many connections may be
//! open, how long a listening queue is, and to end with a report.

pub(crate) mod affinity;
pub(crate) mod descriptors;
pub(crate) mod interrupt;
pub(crate) mod listener;
