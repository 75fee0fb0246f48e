//! How commands speak, whatever they do.
//!
//! A command writes its result to what it is handed (and nothing else there, so that `--json` is
//! one object), warnings to stderr, and ends with an exit status or a [`failure::Failure`]. Nothing
//! here knows of lanes, batches or experiments, so that all commands can share it.

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
