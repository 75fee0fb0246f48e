//! Where the cgroups of the settings' units are.
//!
//! A question to systemd is two processes, and who asks has fences to see to. So it is asked for
//! units whose cgroups are not there, or not any more; and now and then what else a pattern means,
//! as units come.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::settings::Which;
use crate::cgroup::{CgroupPath, Group, Hierarchies};
use crate::systemd;

/// For how long a pattern is what it was, while all of that is there.
const HOLDS: Duration = Duration::from_secs(5);

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
    /// The cgroups that are meant, each with its unit.
    pub(super) fn find(
        &mut self,
        which: &Which,
        hierarchies: &Hierarchies,
    ) -> Result<Vec<(Option<String>, CgroupPath)>, systemd::Error> {
        let named = match which {
            Which::Cgroup(path) => return Ok(vec![(None, path.clone())]),
            Which::Unit(named) => named,
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
        let found = self.answers.get(named).into_iter().flat_map(|answer| &answer.found);
        Ok(found.map(|(unit, path)| (Some(unit.clone()), path.clone())).collect())
    }
}
