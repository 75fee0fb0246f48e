//! Whether borrow-idle can run here: one thing that is enough from every group that it needs.

use super::{Check, Group, Status};

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Verdict {
    pub(crate) missing: Vec<&'static str>,
    /// The one next step; empty if nothing is missing.
    pub(crate) next: String,
}

/// In the order in which to see to them.
const NEEDS: [(Group, &str); 4] = [
    (Group::Lanes, "a pair of lanes"),
    (Group::Signals, "a signal"),
    (Group::Naps, "a nap"),
    (Group::Injection, "a way to get checks into a program"),
];

impl Verdict {
    pub(crate) fn of(checks: &[Check]) -> Self {
        let enough = |group| checks.iter().filter(move |c| c.group == group && c.enough);
        let lacks = |&(group, _): &(Group, &str)| {
            !enough(group).any(|check| check.finding.status != Status::No)
        };
        let missing: Vec<_> = NEEDS.into_iter().filter(lacks).collect();
        let first = missing.first().and_then(|&(group, _)| enough(group).next());
        Self {
            next: first.map_or_else(String::new, |check| check.finding.fix.clone()),
            missing: missing.into_iter().map(|(_, what)| what).collect(),
        }
    }

    pub(crate) fn ok(&self) -> bool {
        self.missing.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::doctor::Finding;

    fn fix(group: Group) -> String {
        format!("fix {group:?}")
    }

    fn check(group: Group, enough: bool, status: Status) -> Check {
        let fix = if status == Status::Yes { String::new() } else { fix(group) };
        Check { group, name: "it", enough, finding: Finding { status, why: "so".into(), fix } }
    }

    /// Goal: borrow-idle runs exactly if each of its needs is met. Method: every combination of
    /// what the four groups can say, among checks that must not count.
    #[test]
    fn needs_one_of_each() {
        let statuses = [Status::Yes, Status::No, Status::Warn];
        for combination in 0..81 {
            let said = [1, 3, 9, 27].map(|place| statuses[combination / place % 3]);
            let mut checks = vec![check(Group::Conflicts, false, Status::Warn)];
            for ((group, _), status) in NEEDS.into_iter().zip(said) {
                checks.push(check(group, false, Status::Yes));
                checks.push(check(group, true, Status::No));
                checks.push(check(group, true, status));
            }
            let lacking: Vec<_> =
                NEEDS.iter().zip(said).filter(|(_, said)| *said == Status::No).collect();
            let verdict = Verdict::of(&checks);
            let expected: Vec<&str> = lacking.iter().map(|((_, what), _)| *what).collect();
            assert_eq!((verdict.ok(), &verdict.missing), (lacking.is_empty(), &expected));
            let next = lacking.first().map_or(String::new(), |((group, _), _)| fix(*group));
            assert_eq!(verdict.next, next);
        }
    }
}
