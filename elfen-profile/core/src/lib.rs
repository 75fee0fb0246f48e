//! A model of an out-of-order core, and the samples that ProfileMe's hardware would take there.
//!
//! ```text
//! Trace  ----------------------->  Pipeline  ---- each fetched instruction ---->  Sampler
//! blocks, the way through them,    Machine        times, events, history          samples, pairs
//! addresses                                                   |                       |
//!                                                             v                       v
//!                                                           Truth  <--- compared ---  Estimates
//! ```
//!
//! [`pipeline`] goes through a trace once, in the order of fetch, and calculates when each
//! instruction reaches each stage. Instructions that are fetched after a wrong prediction are part
//! of that: they are sampled, and abort.
//!
//! This crate has no unsafe code, and no I/O but the reading and writing of a trace ([`elftrace`]).

#![forbid(unsafe_code)]

pub mod branch_paths;
mod cache;
pub mod elftrace;
pub mod estimate;
pub mod instruction;
pub mod machine;
pub mod pair_metric;
pub mod pipeline;
pub mod predictor;
pub mod sample;
pub mod skid;
pub mod synthetic;
pub mod trace;
pub mod truth;
pub mod window;

pub use cache::{Caches, Lookup};
