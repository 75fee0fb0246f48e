//! Checks which parts of Elfen can run on this machine, and what prevents the others.
//!
//! Each check is a pure function of what was read through `Source` and of the kernel's [`Answers`],
//! so a recording of any machine gives the same report as that machine. There is one table for each
//! group, in the order of the report; a new mechanism is one line in it. The subcommand prints the
//! report.

pub mod answers;
mod conflicts;
mod fences;
mod finding;
mod idle;
mod injection;
mod irqs;
mod lanes;
mod naps;
mod permission;
pub mod probe;
mod shim;
mod signals;
mod tailor;
pub mod verdict;

pub use finding::{Check, Enough, Finding, Group, Machine, Status};

use finding::Mechanism;

const GROUPS: [(Group, &[Mechanism]); 8] = [
    (Group::Lanes, lanes::MECHANISMS),
    (Group::Signals, signals::MECHANISMS),
    (Group::Naps, naps::MECHANISMS),
    (Group::Injection, injection::MECHANISMS),
    (Group::Fences, fences::MECHANISMS),
    (Group::Shim, shim::MECHANISMS),
    (Group::Tailor, tailor::MECHANISMS),
    (Group::Conflicts, conflicts::MECHANISMS),
];

/// The whole report, group by group.
pub fn examine(machine: &Machine<'_>) -> Vec<Check> {
    let group = |(group, mechanisms): (Group, &'static [Mechanism])| {
        mechanisms.iter().map(move |mechanism| mechanism.check(group, machine))
    };
    GROUPS.into_iter().flat_map(group).collect()
}
