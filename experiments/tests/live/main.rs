//! Tests of the commands that start real processes: `elfen demo`, and `elfen lab` with
//! `experiment`, `calibrate`, `ladder`, `check` and `inject`.

mod check;
mod demo;
mod experiment;
mod ladder;
mod own;
mod sandbox;
