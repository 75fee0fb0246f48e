//! The input and the result of a check.

use super::answers::Answers;
use crate::cpulist::CpuSet;
use crate::lanes::Lanes;
use crate::pair::Pair;
use crate::source::{Source, SourceError};
use crate::topology::Topology;

/// The input of all checks.
#[derive(Debug)]
pub struct Machine<'a> {
    pub source: &'a Source,
    pub topology: &'a Topology,
    pub lanes: &'a Lanes,
    pub by_hand: bool,
    pub answers: &'a Answers,
}

impl Machine<'_> {
    pub(super) fn request_lanes(&self) -> CpuSet {
        self.lanes.pairs.iter().map(|pair| pair.request).collect()
    }

    pub(super) fn all_lanes(&self) -> CpuSet {
        self.lanes.pairs.iter().flat_map(Pair::lanes).collect()
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Group {
    Lanes,
    Signals,
    Naps,
    Injection,
    Fences,
    Shim,
    Tailor,
    Conflicts,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    Yes,
    No,
    /// It works, but not as well as it could; or the check cannot tell.
    Warn,
}

/// What a check found.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize)]
pub struct Finding {
    pub status: Status,
    pub why: String,
    /// How to get to yes; empty if the status is yes.
    pub fix: String,
}

impl Finding {
    pub(super) fn yes(why: impl Into<String>) -> Self {
        Self { status: Status::Yes, why: why.into(), fix: String::new() }
    }

    pub(super) fn no(why: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { status: Status::No, why: why.into(), fix: fix.into() }
    }

    pub(super) fn warn(why: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { status: Status::Warn, why: why.into(), fix: fix.into() }
    }
}

/// Whether this mechanism is enough for borrow-idle to have what it needs of its group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Enough {
    No,
    Yes,
    /// Under a condition on the program or the service, which no check of the machine can decide.
    If(&'static str),
}

/// One line of the report.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize)]
pub struct Check {
    pub group: Group,
    pub name: &'static str,
    #[serde(skip)]
    pub enough: Enough,
    #[serde(flatten)]
    pub finding: Finding,
}

/// A line in the table of a group.
pub(super) struct Mechanism {
    /// Short and stable, because scripts search for it.
    pub(super) name: &'static str,
    pub(super) enough: Enough,
    pub(super) examine: fn(&Machine<'_>) -> Result<Finding, SourceError>,
}

impl Mechanism {
    pub(super) fn check(&self, group: Group, machine: &Machine<'_>) -> Check {
        let finding = (self.examine)(machine).unwrap_or_else(|error| unreadable(&error));
        Check { group, name: self.name, enough: self.enough, finding }
    }
}

/// `request lane 0`, `request lanes 0,2`.
pub(super) fn request(lanes: &CpuSet) -> String {
    let plural = if lanes.len() == 1 { "" } else { "s" };
    format!("request lane{plural} {lanes}")
}

fn unreadable(error: &SourceError) -> Finding {
    Finding::warn(error.to_string(), "make it readable for this user, or run this as root")
}
