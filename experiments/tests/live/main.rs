//! `elfen demo`, `elfen experiment` and `elfen calibrate`, with real children.

mod demo;
mod experiment;
mod ladder;
mod own;
mod place;
