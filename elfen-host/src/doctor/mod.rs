//! What of Elfen can run on this machine, and what stands in its way.
//!
//! Each check is a pure function of what was read through `Source` and of the kernel's [`Answers`],
//! so that a recording of any machine gives the same report as the machine. They stand in one table
//! a group, in the order in which they are reported; a mechanism that comes into this version is
//! one line there. What is printed of them is the subcommand's business.

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
