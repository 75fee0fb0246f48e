//! The lanes that `elfen run` has lent to a batch, where shadows run next to a service.
//!
//! The guard of a lane occupies it while requests run, and ranks above all of SCHED_IDLE in its
//! cgroup. So shadows are in the cgroup of the batch. That also keeps their time and memory out of
//! the limits of the program.

use elfen_machine::affinity;
use elfen_machine::cgroup::{Group, Hierarchies};
use elfen_machine::cpulist::CpuSet;
use elfen_run::batches::trusted_runs;

/// Lanes for shadows.
#[derive(Debug)]
pub(super) struct Lent {
    pub(super) lanes: CpuSet,
    group: Group,
    /// The process of the batch.
    batch: u32,
}

impl Lent {
    /// The lanes of a batch that runs now, if this process may use them.
    pub(super) fn find() -> Option<Self> {
        let allowed = affinity::allowed().ok()?;
        trusted_runs().ok()?.iter().find_map(|run| {
            let lanes = run.batch_lanes().into_iter().filter_map(|lane| u32::try_from(lane).ok());
            let lanes: CpuSet = lanes.filter(|&lane| allowed.contains(lane)).collect();
            let hierarchies = Hierarchies::read().ok()?;
            let group = Group::new(&hierarchies, hierarchies.cgroup_of(run.pid).ok()?);
            (!lanes.is_empty()).then_some(Self { lanes, group, batch: run.pid })
        })
    }

    /// Moves a shadow to the cgroup of the batch.
    pub(super) fn take(&self, shadow: u32) -> Result<(), String> {
        if self.group.holds(shadow).unwrap_or(false) {
            return Ok(());
        }
        let batch = self.batch;
        self.group.add_process(shadow).map_err(|error| {
            format!("shadows are not in the cgroup of the batch, process {batch}: {error}")
        })
    }
}
