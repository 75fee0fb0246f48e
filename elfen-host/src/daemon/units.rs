//! Where the cgroups of the settings' units are.
//!
//! systemd is asked once for a unit, and again when the cgroup that it had is gone: a question is
//! two processes, and who asks has fences to see to. What a pattern means is asked at each look, as
//! units come.

use std::collections::BTreeMap;

use super::settings::Which;
use crate::cgroup::{CgroupPath, Group, Hierarchies};
use crate::systemd;

#[derive(Debug, Default)]
pub(super) struct Units {
    known: BTreeMap<String, CgroupPath>,
}

impl Units {
    /// The cgroups that are meant, each with its unit.
    pub(super) fn find(
        &mut self,
        which: &Which,
        hierarchies: &Hierarchies,
    ) -> Result<Vec<(Option<String>, CgroupPath)>, systemd::Error> {
        let unit = match which {
            Which::Cgroup(path) => return Ok(vec![(None, path.clone())]),
            Which::Unit(unit) => unit,
        };
        if let Some(path) = self.known.remove(unit)
            && Group::new(hierarchies, path.clone()).exists()
        {
            self.known.insert(unit.clone(), path.clone());
            return Ok(vec![(Some(unit.clone()), path)]);
        }
        let found = systemd::cgroups_of(unit)?;
        let its_own = found.iter().filter(|(name, _)| name == unit);
        self.known.extend(its_own.cloned());
        Ok(found.into_iter().map(|(unit, path)| (Some(unit), path)).collect())
    }
}
