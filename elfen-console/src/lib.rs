//! How commands communicate: results, warnings, failures, tables, durations, and the terminal.
//!
//! A command writes only its result to the given output, so `--json` prints exactly one object.
//! Warnings go to stderr. A command ends with an exit status or a [`failure::Failure`]. This crate
//! does not depend on other parts of Elfen, so that all commands can use it.

pub mod command;
pub mod duration;
pub mod failure;
pub mod generate;
pub mod output;
pub mod page;
pub mod paragraph;
pub mod programs;
pub mod reference;
pub mod shell;
pub mod table;
pub mod terminal;
pub mod usage;
