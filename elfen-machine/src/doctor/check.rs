//! The input and the results of checks, and the verdict on all of them.

use crate::cpulist::CpuSet;
use crate::lanes::Lanes;
use crate::pair::Pair;
use crate::source::Source;
use crate::topology::Topology;

/// The input of all checks.
#[derive(Debug)]
pub struct Machine<'a> {
    pub source: &'a Source,
    pub topology: &'a Topology,
    pub lanes: &'a Lanes,
    pub by_hand: bool,
}

impl Machine<'_> {
    pub(super) fn request_lanes(&self) -> CpuSet {
        self.lanes.pairs.iter().map(|pair| pair.request).collect()
    }

    pub(super) fn all_lanes(&self) -> CpuSet {
        self.lanes.pairs.iter().flat_map(Pair::lanes).collect()
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Group {
    Lanes,
    Signals,
    Naps,
    Checks,
    Fences,
    Shim,
    Tailor,
    Profile,
    Conflicts,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    Yes,
    No,
    /// The feature works, but not as well as it could; or the check cannot tell.
    Warn,
}

/// The result of a check.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize)]
pub struct Finding {
    pub status: Status,
    pub why: String,
    /// How to reach status `Yes`; empty if the status is `Yes`.
    pub fix: String,
}

/// Whether this check, if it works, gives borrow-idle what it needs of the check's group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Enough {
    No,
    Yes,
    /// Enough only under this condition on the program or the service, which no check can decide.
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

impl Check {
    pub fn works(&self) -> bool {
        self.finding.status != Status::No
    }
}

/// Whether borrow-idle can run here: whether each group in [`NEEDS`] has a check that works and is
/// enough.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize)]
pub struct Verdict {
    pub missing: Vec<&'static str>,
    /// The next step; empty if nothing is missing.
    pub next: String,
    /// The conditions under which borrow-idle works; empty if it works for all programs and
    /// requests.
    pub only: Vec<&'static str>,
}

/// What borrow-idle needs, in the order in which a user should solve missing needs.
pub const NEEDS: [(Group, &str); 4] = [
    (Group::Lanes, "a pair of lanes"),
    (Group::Signals, "a source of signals"),
    (Group::Naps, "a nap"),
    (Group::Checks, "checks"),
];

/// The checks of a group of which at least one must work.
pub fn alternatives(checks: &[Check], group: Group) -> impl Iterator<Item = &Check> {
    checks.iter().filter(move |check| check.group == group && check.enough != Enough::No)
}

impl Verdict {
    pub fn of(checks: &[Check]) -> Self {
        let mut verdict = Self { missing: Vec::new(), next: String::new(), only: Vec::new() };
        for (group, what) in NEEDS {
            let working = alternatives(checks, group).filter(|check| check.works());
            let conditions: Vec<_> = working.map(|check| check.enough).collect();
            match conditions.first() {
                None => {
                    let first = alternatives(checks, group).next();
                    let first = first.filter(|_| verdict.missing.is_empty());
                    verdict.next.extend(first.map(|check| check.finding.fix.as_str()));
                    verdict.missing.push(what);
                }
                Some(Enough::If(only)) if !conditions.contains(&Enough::Yes) => {
                    verdict.only.push(only)
                }
                Some(_) => {}
            }
        }
        verdict
    }

    pub fn ok(&self) -> bool {
        self.missing.is_empty()
    }

    /// Whether a user has to know of this check: it warns, or borrow-idle lacks what it would give.
    /// Other checks that do not work have an alternative that does, or belong to an extra.
    pub fn is_problem(&self, check: &Check) -> bool {
        let lacks = |(group, what): &(Group, &str)| {
            *group == check.group && check.enough != Enough::No && self.missing.contains(what)
        };
        match check.finding.status {
            Status::Yes => false,
            // Its fix refers to another check, which is listed.
            Status::Warn => !check.finding.fix.starts_with("see "),
            Status::No => NEEDS.iter().any(lacks),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fix(group: Group) -> String {
        format!("fix {group:?}")
    }

    fn check(group: Group, enough: Enough, status: Status) -> Check {
        let fix = if status == Status::Yes { String::new() } else { fix(group) };
        Check { group, name: "it", enough, finding: Finding { status, why: "so".into(), fix } }
    }

    /// Goal: the verdict is positive exactly if each need is met. Method: every combination of
    /// results of the four groups, next to checks that must not count.
    #[test]
    fn borrow_idle_needs_one_mechanism_of_each_group() {
        let statuses = [Status::Yes, Status::No, Status::Warn];
        for combination in 0..81 {
            let said = [1, 3, 9, 27].map(|place| statuses[combination / place % 3]);
            let mut checks = vec![check(Group::Conflicts, Enough::No, Status::Warn)];
            for ((group, _), status) in NEEDS.into_iter().zip(said) {
                checks.push(check(group, Enough::No, Status::Yes));
                checks.push(check(group, Enough::If("no"), Status::No));
                checks.push(check(group, Enough::Yes, status));
            }
            let lacking: Vec<_> =
                NEEDS.iter().zip(said).filter(|(_, said)| *said == Status::No).collect();
            let verdict = Verdict::of(&checks);
            let expected: Vec<&str> = lacking.iter().map(|((_, what), _)| *what).collect();
            assert_eq!((verdict.ok(), &verdict.missing), (lacking.is_empty(), &expected));
            let next = lacking.first().map_or(String::new(), |((group, _), _)| fix(*group));
            assert_eq!(verdict.next, next);
            assert_eq!(verdict.only, Vec::<&str>::new());
        }
    }

    /// Goal: the verdict names a condition only if no unconditional mechanism works. Method: one
    /// mechanism with a condition and one without, each with every status.
    #[test]
    fn a_condition_holds_where_nothing_else_works() {
        for (without, with, only) in [
            (Status::Yes, Status::Yes, None),
            (Status::Warn, Status::Yes, None),
            (Status::Yes, Status::No, None),
            (Status::No, Status::Yes, Some("for some")),
            (Status::No, Status::Warn, Some("for some")),
            (Status::No, Status::No, None),
        ] {
            let mut checks: Vec<Check> = NEEDS
                .into_iter()
                .filter(|(group, _)| *group != Group::Signals)
                .map(|(group, _)| check(group, Enough::Yes, Status::Yes))
                .collect();
            checks.push(check(Group::Signals, Enough::If("for some"), with));
            checks.push(check(Group::Signals, Enough::Yes, without));
            let verdict = Verdict::of(&checks);
            assert_eq!(verdict.only, Vec::from_iter(only));
            assert_eq!(verdict.ok(), without != Status::No || with != Status::No);
        }
    }
}
