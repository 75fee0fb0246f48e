//! Finds the cgroups that the settings name by units and patterns.
//!
//! A query to systemd starts two processes and takes time, and the daemon has fences to check. So
//! it queries only for units whose cgroups are missing, and every few seconds for new units that
//! match a pattern.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::settings::CgroupSelector;
use elfen_machine::cgroup::{CgroupPath, Group, Hierarchies};
use elfen_machine::systemd;

/// How long the units of a pattern are valid, while all of their cgroups exist.
const HOLDS: Duration = Duration::from_secs(5);

/// A cgroup that the settings name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct FoundCgroup {
    pub(super) path: CgroupPath,
    /// The unit, where systemd owns it.
    pub(super) unit: Option<String>,
    /// Its part of the name behind the fence's own, if the fence has several cgroups.
    pub(super) label: Option<String>,
}

#[derive(Debug, Default)]
pub(super) struct Units {
    answers: BTreeMap<String, Answer>,
}

#[derive(Debug)]
struct Answer {
    found: Vec<(String, CgroupPath)>,
    since: Instant,
}

impl Units {
    /// The cgroups that `which` names.
    pub(super) fn find(
        &mut self,
        which: &CgroupSelector,
        hierarchies: &Hierarchies,
    ) -> Result<Vec<FoundCgroup>, systemd::Error> {
        let named = match which {
            CgroupSelector::Cgroup(path) => {
                return Ok(vec![FoundCgroup { path: path.clone(), unit: None, label: None }]);
            }
            CgroupSelector::Cgroups(pattern) => return Ok(matching(pattern, hierarchies)),
            CgroupSelector::Unit(named) => named,
        };
        let is_there = |path: &CgroupPath| Group::new(hierarchies, path.clone()).exists();
        let holds = |answer: &Answer| {
            let [(unit, _), ..] = &*answer.found else { return false };
            (unit == named || answer.since.elapsed() < HOLDS)
                && answer.found.iter().all(|(_, path)| is_there(path))
        };
        if !self.answers.get(named).is_some_and(holds) {
            self.answers.remove(named);
            let found = systemd::cgroups_of(named)?;
            self.answers.insert(named.clone(), Answer { found, since: Instant::now() });
        }
        let found = self.answers.get(named).map_or(&[][..], |answer| &answer.found);
        let label = |unit: &String| (found.len() > 1).then(|| unit.clone());
        let one = |(unit, path): &(String, CgroupPath)| FoundCgroup {
            path: path.clone(),
            unit: Some(unit.clone()),
            label: label(unit),
        };
        Ok(found.iter().map(one).collect())
    }
}

fn matching(pattern: &CgroupPath, hierarchies: &Hierarchies) -> Vec<FoundCgroup> {
    let parent = pattern.parent();
    let wanted = pattern.parts().last().unwrap_or_default();
    // The three hierarchies of a fence have the same cgroups, so any of them will do.
    let folders = Group::new(hierarchies, parent.clone()).folders();
    let entries = folders.first().and_then(|folder| std::fs::read_dir(folder).ok());
    let folders = entries.into_iter().flatten().flatten();
    let folders = folders.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let names = folders.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|name| matches(wanted, name)).collect();
    names.sort_unstable();
    let one =
        |name: String| FoundCgroup { path: parent.child(&name), unit: None, label: Some(name) };
    names.into_iter().map(one).collect()
}

/// Whether a name matches a pattern, in which a `*` stands for any text.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((before, after)) = pattern.split_once('*') else { return pattern == name };
    let Some(rest) = name.strip_prefix(before) else { return false };
    (0..=rest.len()).filter_map(|at| rest.get(at..)).any(|rest| matches(after, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_any_text() {
        for (pattern, name, is_one) in [
            ("pod*", "pod12", true),
            ("pod*", "pod", true),
            ("pod*", "apod", false),
            ("*a*b", "xaabb", true),
            ("*a*b", "xaabc", false),
            ("a", "a", true),
            ("a", "ab", false),
        ] {
            assert_eq!(matches(pattern, name), is_one, "{pattern} {name}");
        }
    }
}
