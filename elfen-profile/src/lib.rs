//! Profiles of programs: which edges, calls and instructions ran, and how often.
//!
//! [`everything`] runs a whole program in a code cache ([`elfen_stream`]) under ptrace(2), and
//! counts all of it exactly. It slows the program down several times. It is the yardstick for
//! sampled profiles.
//!
//! [`precise`] reads samples of single instructions from processors that take them.
//!
//! A [`profile::Profile`] holds counts by file and offset, so that profiles of several processes
//! can be added. [`cmd`] has the commands.

mod annotate;
pub mod bursts;
mod classes;
pub mod cmd;
mod compare;
pub mod control;
mod core_report;
mod diff;
pub mod elfprof;
mod engine;
pub mod everything;
mod export;
pub mod fuzzed;
pub mod hot_streams;
mod instructions;
mod lines;
pub mod overlap;
mod paths;
mod pipeline_picture;
pub mod precise;
mod precise_report;
pub mod profile;
mod program;
pub mod recording;
mod report;
pub mod rule_sums;
pub mod rules;
mod sample_table;
mod samples;
pub mod shadows;
mod signals;
mod source_lines;
mod stacks;
pub mod streams;
mod sums;
mod symbols;
mod values;
