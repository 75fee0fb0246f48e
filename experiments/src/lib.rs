//! Measures and simulates whether Elfen keeps a service's SLO, and how much batch work it gains.
//!
//! - The crate `simulator` is a model of SMT cores that runs the policies of `elfen-rt`. It has a
//!   planner, and a comparison with the published numbers of the thesis.
//! - [`live`] measures real processes. [`record`] is the format of its results.
//! - [`expected`] predicts live runs with the model.
//! - [`report`] draws figures of simulations and of live runs.
//! - [`faults`] tests the explanations of `elfen tailor` with known faults.
//! - `profile` repeats the experiments of papers on profiles.
//! - `bench` measures the cost of Elfen's own parts.
//! - [`cmd`] parses the arguments of all commands and prints their results.

mod bench;
pub mod cmd;
#[deny(unsafe_code)]
pub mod expected;
pub mod faults;
#[deny(unsafe_code)]
pub mod live;
#[deny(unsafe_code)]
mod profile;
#[deny(unsafe_code)]
pub mod record;
#[deny(unsafe_code)]
pub mod report;
