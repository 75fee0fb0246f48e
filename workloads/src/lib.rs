//! The workloads of all measurements of Elfen. They are a library so that tests can call their
//! code.
//!
//! [`search`] is the service, [`load`] the open-loop load generator, and [`batch`] the common part
//! of the batch programs. Most binaries in `src/bin` only call their module.

pub mod batch;
pub mod beside;
pub mod load;
mod process;
pub mod search;
pub mod text;
pub mod units;
