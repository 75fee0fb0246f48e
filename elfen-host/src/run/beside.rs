//! Batch processes that do not rank below their guards any more.
//!
//! SCHED_IDLE ranks a thread below others of its own cgroup. One that starts a cgroup of its own,
//! as a container does, shares a held lane with the guard by their cgroups' weights, whatever its
//! class is. No run can undo that; a fence does. So each such process is found, and told once.

use std::collections::BTreeSet;

use crate::cgroup::{CgroupPath, Error, Group, Hierarchies};
use crate::fence::rank::parting;

#[derive(Debug)]
pub(super) struct Beside {
    /// The guards' own place; `None` where the kernel ranks no cgroups.
    own: Option<(Hierarchies, CgroupPath)>,
    known: BTreeSet<u32>,
}

impl Beside {
    pub(super) fn guards_of_this_process() -> Self {
        let own = Hierarchies::read().and_then(|hierarchies| {
            let home = hierarchies.home_of(std::process::id())?;
            Ok((hierarchies, home))
        });
        Self { own: own.ok(), known: BTreeSet::new() }
    }

    /// Those that rank beside their guard, and were not known to.
    pub(super) fn new_ones(&mut self, processes: &[u32]) -> Vec<u32> {
        let Some((hierarchies, home)) = &self.own else { return Vec::new() };
        let is_beside = |process: u32| -> Result<bool, Error> {
            let place = hierarchies.home_of(process)?;
            let Some(child) = parting(home, &place).to_fence else { return Ok(false) };
            Ok(!Group::new(hierarchies, child).rank()?.idle)
        };
        // One that has ended is nowhere.
        let mut beside: BTreeSet<u32> = processes.iter().copied().collect();
        beside.retain(|process| is_beside(*process).unwrap_or(false));
        let new = beside.difference(&self.known).copied().collect();
        self.known = beside;
        new
    }
}
