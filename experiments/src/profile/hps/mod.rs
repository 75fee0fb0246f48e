//! The evaluation of the paper on Hybrid Profiling Support, with programs of this machine.
//!
//! Each program runs once in the code cache of `elfen profile`, with all events. So one exact
//! stream of instructions goes through many sets of productions at the same time: one that counts
//! everything, and one for each burst length, frequency and kind of interval.

pub(crate) mod cost;
pub(crate) mod programs;
pub(crate) mod published;
pub(crate) mod study;
