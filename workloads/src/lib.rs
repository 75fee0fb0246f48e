//! The workloads that every measurement of Elfen stands on, as a library so that all of it can be
//! tested.
//!
//! [`load`] is the open-loop generator that asks; [`batch`] are the programs that borrow. Each
//! binary in `src/bin` is one call into its module here.

pub mod batch;
mod command;
mod interrupt;
pub mod load;
mod text;
mod units;
