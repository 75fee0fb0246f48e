//! `elfen demo`, `elfen lab experiment` and `elfen lab calibrate`, with real children.

mod demo;
mod experiment;
mod ladder;
mod own;
mod place;
