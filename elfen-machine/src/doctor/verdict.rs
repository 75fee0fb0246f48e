//! Whether borrow-idle can run here: whether each group that it needs has a mechanism that works.

use super::finding::{Check, Enough, Group, Status};

#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize)]
pub struct Verdict {
    pub missing: Vec<&'static str>,
    /// The next step; empty if nothing is missing.
    pub next: String,
    /// The only programs or requests that it works for; empty if it works for all.
    pub only: Vec<&'static str>,
}

/// In the order in which to solve them.
const NEEDS: [(Group, &str); 4] = [
    (Group::Lanes, "a pair of lanes"),
    (Group::Signals, "a signal"),
    (Group::Naps, "a nap"),
    (Group::Injection, "an injection"),
];

impl Verdict {
    pub fn of(checks: &[Check]) -> Self {
        let mut verdict = Self { missing: Vec::new(), next: String::new(), only: Vec::new() };
        for (group, what) in NEEDS {
            let of_use = |check: &&Check| check.group == group && check.enough != Enough::No;
            let works = |check: &&Check| check.finding.status != Status::No;
            let mut working = checks.iter().filter(of_use).filter(works).peekable();
            if working.peek().is_none() {
                let first = checks.iter().find(of_use).filter(|_| verdict.missing.is_empty());
                verdict.next.extend(first.map(|check| check.finding.fix.as_str()));
                verdict.missing.push(what);
                continue;
            }
            let conditions: Vec<_> = working.map(|check| check.enough).collect();
            if let (false, Some(Enough::If(only))) =
                (conditions.contains(&Enough::Yes), conditions.first())
            {
                verdict.only.push(only);
            }
        }
        verdict
    }

    pub fn ok(&self) -> bool {
        self.missing.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Finding;

    fn fix(group: Group) -> String {
        format!("fix {group:?}")
    }

    fn check(group: Group, enough: Enough, status: Status) -> Check {
        let fix = if status == Status::Yes { String::new() } else { fix(group) };
        Check { group, name: "it", enough, finding: Finding { status, why: "so".into(), fix } }
    }

    /// Goal: borrow-idle runs exactly if each of its needs is met. Method: every combination of the
    /// four groups' results, among checks that must not count.
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

    /// Goal: a condition is named if nothing works without it. Method: the two kinds of mechanism,
    /// each working and not.
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
