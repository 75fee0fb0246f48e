//! The workloads that every measurement of Elfen stands on, as a library so that all of it can be
//! tested.
//!
//! [`search`] is the service to protect, [`load`] the open-loop generator that asks, [`batch`] are
//! the programs that borrow. Each binary in `src/bin` is little more than a call into its module
//! here.

pub mod batch;
pub mod beside;
pub mod load;
mod process;
pub mod search;
pub mod text;
pub mod units;
