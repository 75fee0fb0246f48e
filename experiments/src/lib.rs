//! Does Elfen keep the SLO, and what does it buy?
//!
//! [`simulate`] is a model of SMT cores that runs the very policies of `elfen-rt`; [`plan`] asks it
//! for the budget that is safe and for what that is worth; [`thesis`] holds it against what the
//! thesis published. The `elfen` command reads the arguments and prints the results.

#![forbid(unsafe_code)]

pub mod plan;
pub mod simulate;
pub mod thesis;
