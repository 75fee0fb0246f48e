//! Batch processes that no longer rank below their guards.
//!
//! SCHED_IDLE ranks a thread below others of its own cgroup only. A process that starts a cgroup of
//! its own, as a container does, shares an occupied lane with the guard by the weights of their
//! cgroups, whatever its class is. A run cannot change that; a fence can. So the supervisor reports
//! each such process once.

use std::collections::BTreeSet;

use crate::cgroup::{CgroupPath, Error, Group, Hierarchies};
use crate::fence::rank::parting;

#[derive(Debug)]
pub(super) struct UnrankedProcesses {
    /// The cgroup of the guards; `None` where the kernel ranks no cgroups.
    own: Option<(Hierarchies, CgroupPath)>,
    known: BTreeSet<u32>,
}

impl UnrankedProcesses {
    pub(super) fn next_to_this_process() -> Self {
        let own = Hierarchies::read().and_then(|hierarchies| {
            let home = hierarchies.cgroup_of(std::process::id())?;
            Ok((hierarchies, home))
        });
        Self { own: own.ok(), known: BTreeSet::new() }
    }

    /// The processes that rank next to their guard, and did not at the last call.
    pub(super) fn find_new(&mut self, processes: &[u32]) -> Vec<u32> {
        let Some((hierarchies, home)) = &self.own else { return Vec::new() };
        let is_beside = |process: u32| -> Result<bool, Error> {
            let place = hierarchies.cgroup_of(process)?;
            let Some(child) = parting(home, &place).to_fence else { return Ok(false) };
            Ok(!Group::new(hierarchies, child).rank()?.idle)
        };
        // A process that has ended is in no cgroup.
        let mut beside: BTreeSet<u32> = processes.iter().copied().collect();
        beside.retain(|process| is_beside(*process).unwrap_or(false));
        let new = beside.difference(&self.known).copied().collect();
        self.known = beside;
        new
    }
}
