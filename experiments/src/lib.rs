//! Does Elfen keep the SLO, and what does it buy?
//!
//! `simulator` is a model of SMT cores that runs the very policies of `elfen-rt`, with a planner on
//! top of it, and held against what the thesis published; [`live`] measures real processes and
//! [`record`] is what that leaves behind; [`expected`] is what the model says of a live run;
//! [`report`] draws both; `bench` measures Elfen's own parts. [`cmd`] reads the arguments of all
//! these and prints the results.

mod bench;
pub mod cmd;
#[deny(unsafe_code)]
pub mod expected;
pub mod faults;
#[deny(unsafe_code)]
pub mod live;
#[deny(unsafe_code)]
pub mod record;
#[deny(unsafe_code)]
pub mod report;
