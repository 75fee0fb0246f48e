//! Checks which parts of Elfen can run on this machine, and what prevents the others.
//!
//! `facts` reads and tries what checks need, all of it through `Source`, so a recording of any
//! machine gives the same report as that machine. `checks.txt` is the table of checks, and says
//! which facts mean what. The subcommand prints the report.

mod attempts;
mod check;
mod facts;
mod table;

pub use check::{Check, Enough, Finding, Group, Machine, NEEDS, Status, Verdict, alternatives};

use crate::source::SourceError;

/// The whole report, group by group. Fails only for a recording that lacks the result of an
/// attempt.
pub fn examine(machine: &Machine<'_>) -> Result<Vec<Check>, SourceError> {
    Ok(table::judge_all(&facts::Facts::of(machine)?))
}
