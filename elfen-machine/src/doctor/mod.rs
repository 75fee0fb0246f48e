//! Checks which parts of Elfen can run on this machine, and what prevents the others.
//!
//! `facts` reads files and makes attempts, all through `Source`. So a recording gives the same
//! report as the machine on which it was made. `checks.txt` is the table of checks: its rules turn
//! facts into findings. The subcommand prints the report.

mod attempts;
mod check;
mod facts;
mod table;

pub use check::{Check, Enough, Finding, Group, Machine, NEEDS, Status, Verdict, alternatives};

use crate::source::SourceError;

/// All checks, sorted by group. Fails only for a recording that lacks the result of an attempt.
pub fn examine(machine: &Machine<'_>) -> Result<Vec<Check>, SourceError> {
    Ok(table::judge_all(&facts::Facts::of(machine)?))
}
