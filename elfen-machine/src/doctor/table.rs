//! Parses the table of checks, `checks.txt`, and applies its rules to facts.

use elfen_console::failure::without_errno;

use serde::de::DeserializeOwned;
use serde::de::value::{Error, StrDeserializer};

use super::check::{Check, Enough, Finding, Status};
use super::facts::Facts;

const TABLE: &str = include_str!("checks.txt");

/// Applies every check of the table to these facts.
pub(super) fn judge_all(facts: &Facts) -> Vec<Check> {
    entries().map(|entry| entry.judge(facts)).collect()
}

struct Entry {
    head: &'static str,
    rules: Vec<&'static str>,
}

fn entries() -> impl Iterator<Item = Entry> {
    let entry = |block: &'static str| {
        let mut lines = block.lines().filter(|line| !line.starts_with('#'));
        Some(Entry { head: lines.next()?, rules: lines.collect() })
    };
    TABLE.split("\n\n").filter_map(entry)
}

impl Entry {
    fn judge(&self, facts: &Facts) -> Check {
        let mut words = self.head.splitn(4, ' ');
        let mut word = || words.next().unwrap_or_default();
        let (group, name) = (from_name(word()), word());
        let enough = match (word(), word()) {
            ("enough", "") => Enough::Yes,
            ("enough", only) => Enough::If(only),
            _ => Enough::No,
        };
        let finding = self.find(facts).unwrap_or_else(|unreadable| Finding {
            status: Status::Warn,
            why: unreadable,
            fix: "make it readable for this user, or run this as root".to_owned(),
        });
        Check { group, name, enough, finding }
    }

    /// The finding of the first rule whose conditions hold. An error names a file that the rules
    /// need and that cannot be read.
    fn find(&self, facts: &Facts) -> Result<Finding, String> {
        let mut status = None;
        let mut text = String::new();
        for line in &self.rules {
            match (line.strip_prefix("  "), status) {
                (Some(words), Some(_)) => text += &(facts.fill(words)? + "\n"),
                (Some(_), None) => {}
                (None, None) => status = status_if(line, facts)?,
                (None, Some(_)) if text.is_empty() => {}
                (None, Some(_)) => break,
            }
        }
        let (why, fix) = text.split_once("\n> ").unwrap_or((&text, ""));
        let one_line = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let status = status.unwrap_or_else(|| unreachable!("the last rule has no condition"));
        Ok(Finding { status, why: without_errno(&one_line(why)), fix: one_line(fix) })
    }
}

/// The status of a rule if its conditions hold. A rule is `FACT=WORD[|WORD] ... STATUS`.
fn status_if(rule: &'static str, facts: &Facts) -> Result<Option<Status>, String> {
    for word in rule.split(' ') {
        let Some((fact, words)) = word.split_once('=') else {
            return Ok(Some(from_name(word)));
        };
        let found = facts.word(fact)?;
        if !words.split('|').any(|word| word == found) {
            return Ok(None);
        }
    }
    unreachable!("a rule ends with its status: {rule}")
}

/// Parses the name of a group or of a status.
fn from_name<T: DeserializeOwned>(name: &'static str) -> T {
    let found = T::deserialize(StrDeserializer::<Error>::new(name));
    found.unwrap_or_else(|error| unreachable!("the table of checks: {error}"))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::doctor::check::Machine;
    use crate::lanes::by_hand;
    use crate::source::Source;
    use crate::topology::Topology;

    /// Goal: each check has a finding on every machine. Method: check the form of the table. The
    /// last rule of a check has no condition, and a rule with another status than yes has a fix.
    #[test]
    fn each_check_ends_with_a_rule_that_always_holds() {
        assert_eq!(entries().count(), 49);
        for Entry { head, rules } in entries() {
            let last = rules.iter().rev().find(|line| !line.starts_with(' ')).unwrap();
            assert!(["yes", "no", "warn"].contains(last), "{head}: {last}");
            assert!(rules.last().unwrap().starts_with("  "), "{head}");
        }
    }

    /// Goal: a fix that refers to another check names one. Such a check is not a problem of its own
    /// (`Verdict::is_problem`). Method: the word behind `see` in every fix.
    #[test]
    fn references_name_a_check() {
        let name = |entry: &Entry| entry.head.split(' ').nth(1).unwrap().to_owned();
        let names: Vec<String> = entries().map(|entry| name(&entry)).collect();
        for line in entries().flat_map(|entry| entry.rules) {
            let Some(text) = line.strip_prefix("  > see ") else { continue };
            assert!(names.iter().any(|name| text.split(' ').next() == Some(name)), "{line}");
        }
    }

    /// Goal: a user finds each check in the document, and each row there is a check. Method:
    /// compare the table of docs/troubleshooting.md with this one. Both have the same order.
    #[test]
    fn troubleshooting_has_a_row_for_each_check() {
        let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/troubleshooting.md");
        let document = std::fs::read_to_string(document).unwrap();
        let (_, table) = document.split_once("| check | what it means").unwrap();
        let rows = table.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` |"));
        let rows: Vec<&str> = rows.map(|(name, _)| name).collect();
        let names: Vec<&str> = entries().filter_map(|entry| entry.head.split(' ').nth(1)).collect();
        assert_eq!(rows, names);
    }

    /// Goal: no rule names a fact that is never set. Method: look up every name in the table, on a
    /// machine whose devices interrupt the lanes.
    #[test]
    fn every_fact_of_the_table_is_set() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../elfen/tests/doctor/vm.machine");
        let source = Source::open_recording(&file).unwrap();
        let topology = Topology::read(&source).unwrap();
        let lanes = by_hand("0:1", &topology).unwrap();
        let machine =
            Machine { source: &source, topology: &topology, lanes: &lanes, by_hand: true };
        let facts = Facts::of(&machine).unwrap();
        for line in entries().flat_map(|entry| entry.rules) {
            if line.starts_with("  ") {
                facts.fill(line).unwrap();
                continue;
            }
            for (fact, _) in line.split(' ').filter_map(|word| word.split_once('=')) {
                facts.word(fact).unwrap();
            }
        }
    }
}
