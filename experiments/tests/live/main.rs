//! Tests of the commands of the laboratory that start real processes: `elfen demo`, `elfen lab
//! experiment`, `calibrate`, `ladder`, `check` and `inject`.

mod check;
mod demo;
mod experiment;
mod ladder;
mod own;
mod sandbox;
