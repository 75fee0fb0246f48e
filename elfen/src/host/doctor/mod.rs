//! What of Elfen can run on this machine, and what stands in its way.
//!
//! Each check is a pure function of what was read through `Source` and of the kernel's [`Answers`],
//! so that a recording of any machine gives the same report as the machine. They stand in one table
//! a group, in the order in which they are reported; a mechanism that comes into this version is
//! one line there. What is printed of them is the subcommand's business.

pub(crate) mod answers;
mod conflicts;
mod idle;
mod injection;
mod irqs;
mod lanes;
mod naps;
mod permission;
pub(crate) mod probe;
mod signals;
pub(crate) mod verdict;

use answers::Answers;

use super::cpulist::CpuSet;
use super::lanes::Lanes;
use super::source::{Source, SourceError};
use super::topology::Topology;

/// All that a check may look at.
#[derive(Debug)]
pub(crate) struct Machine<'a> {
    pub(crate) source: &'a Source,
    pub(crate) topology: &'a Topology,
    pub(crate) lanes: &'a Lanes,
    pub(crate) by_hand: bool,
    pub(crate) answers: &'a Answers,
}

impl Machine<'_> {
    fn request_lanes(&self) -> CpuSet {
        self.lanes.pairs.iter().map(|pair| pair.request).collect()
    }

    fn all_lanes(&self) -> CpuSet {
        self.lanes.pairs.iter().flat_map(super::pair::Pair::lanes).collect()
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Group {
    Lanes,
    Signals,
    Naps,
    Injection,
    Conflicts,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Status {
    Yes,
    No,
    /// It works, and not as well as it could; or nobody can tell.
    Warn,
}

/// What a check found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Finding {
    pub(crate) status: Status,
    pub(crate) why: String,
    /// What would make it yes; empty if it is.
    pub(crate) fix: String,
}

impl Finding {
    fn yes(why: impl Into<String>) -> Self {
        Self { status: Status::Yes, why: why.into(), fix: String::new() }
    }

    fn no(why: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { status: Status::No, why: why.into(), fix: fix.into() }
    }

    fn warn(why: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { status: Status::Warn, why: why.into(), fix: fix.into() }
    }
}

/// Whether borrow-idle needs nothing else of a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Enough {
    No,
    Yes,
    /// Under a condition on what is run, which no machine can answer.
    If(&'static str),
}

/// One line of the report.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Check {
    pub(crate) group: Group,
    pub(crate) name: &'static str,
    pub(crate) enough: Enough,
    pub(crate) finding: Finding,
}

enum Examine {
    By(fn(&Machine<'_>) -> Result<Finding, SourceError>),
    /// What it will be.
    NotInThisVersion(&'static str),
}

/// A line of a group's table.
struct Mechanism {
    /// Short and stable: scripts look for it.
    name: &'static str,
    enough: Enough,
    examine: Examine,
}

impl Mechanism {
    fn check(&self, group: Group, machine: &Machine<'_>) -> Check {
        let finding = match self.examine {
            Examine::By(examine) => examine(machine).unwrap_or_else(|error| unreadable(&error)),
            Examine::NotInThisVersion(what) => {
                Finding::no(format!("not in this version: {what}"), "use a version that has it")
            }
        };
        Check { group, name: self.name, enough: self.enough, finding }
    }
}

/// `request lane 0`, `request lanes 0,2`.
fn request(lanes: &CpuSet) -> String {
    let plural = if lanes.len() == 1 { "" } else { "s" };
    format!("request lane{plural} {lanes}")
}

fn unreadable(error: &SourceError) -> Finding {
    Finding::warn(error.to_string(), "make it readable for this user, or run this as root")
}

const GROUPS: [(Group, &[Mechanism]); 5] = [
    (Group::Lanes, lanes::MECHANISMS),
    (Group::Signals, signals::MECHANISMS),
    (Group::Naps, naps::MECHANISMS),
    (Group::Injection, injection::MECHANISMS),
    (Group::Conflicts, conflicts::MECHANISMS),
];

/// The whole report, group by group.
pub(crate) fn examine(machine: &Machine<'_>) -> Vec<Check> {
    let group = |(group, mechanisms): (Group, &'static [Mechanism])| {
        mechanisms.iter().map(move |mechanism| mechanism.check(group, machine))
    };
    GROUPS.into_iter().flat_map(group).collect()
}
