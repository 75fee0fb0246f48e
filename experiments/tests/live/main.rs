//! Tests of `elfen demo`, `elfen lab experiment`, `calibrate` and `ladder` with real processes.

mod demo;
mod experiment;
mod ladder;
mod own;
mod sandbox;
