//! Does Elfen keep the SLO, and what does it buy?
//!
//! [`simulate`] is a model of SMT cores that runs the very policies of `elfen-rt`; [`plan`] asks it
//! for the budget that is safe and for what that is worth; [`thesis`] holds it against what the
//! thesis published; [`live`] measures real processes and [`record`] is what that leaves behind;
//! [`report`] draws both. The `elfen` command reads the arguments and prints the results.

#![deny(unsafe_code)]

pub mod live;
pub mod plan;
pub mod record;
pub mod report;
pub mod simulate;
pub mod thesis;
