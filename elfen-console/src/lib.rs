//! How commands communicate: results, warnings, failures, tables, durations, and the terminal.
//!
//! A command writes only its result to the output that it is given, so that `--json` yields one
//! object. Warnings go to stderr. A command ends with an exit status or a [`failure::Failure`].
//! This crate knows nothing of lanes, batches or experiments, so that all commands can use it.

pub mod command;
pub mod duration;
pub mod failure;
pub mod generate;
pub mod output;
pub mod page;
pub mod paragraph;
pub mod programs;
pub mod shell;
pub mod table;
pub mod terminal;
pub mod usage;
