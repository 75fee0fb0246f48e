//! Which of a run's CPUs are online.
//!
//! An offline request lane serves no request, and the kernel's tracepoints are silent there, so its
//! slot might say busy for ever. From a batch lane that goes offline, the kernel moves the batch to
//! any other CPU.

use std::fs;

use elfen_rt::signal::lane::{BATCH_OFFLINE, REQUEST_OFFLINE};

use super::event::Event;
use elfen_machine::cpulist::{self, CpuSet};

/// The CPUs that are online. `None` where sysfs does not list them; then none counts as offline.
pub fn online() -> Option<Online> {
    let list = fs::read_to_string("/sys/devices/system/cpu/online").ok()?;
    let spans = cpulist::spans(list.trim()).ok()?;
    Some(Online(spans.into_iter().flat_map(cpulist::Span::cpus).collect()))
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Online(pub CpuSet);

impl Online {
    pub(super) fn cpus(&self) -> &CpuSet {
        &self.0
    }

    /// The hotplug bits of a (batch, request) pair in the lane page.
    pub fn bits_of(&self, (batch, request): (u32, u32)) -> u64 {
        let gone = |cpu, bit| if self.0.contains(cpu) { 0 } else { bit };
        gone(request, REQUEST_OFFLINE) | gone(batch, BATCH_OFFLINE)
    }
}

/// The state at the supervisor's last check.
#[derive(Debug)]
pub(super) struct Hotplug {
    before: Option<Online>,
    stopped: bool,
}

/// What has changed since that check.
#[derive(Debug)]
pub(super) struct Change {
    pub(super) online: Online,
    /// The batch lanes that are online, if any are.
    pub(super) lanes: Option<CpuSet>,
    /// Whether the batch has to be stopped or continued.
    pub(super) event: Option<Event>,
}

impl Hotplug {
    /// For a successor of a supervisor that was killed. `stopped`: that supervisor had stopped the
    /// batch.
    pub(super) fn after(stopped: bool) -> Self {
        Self { before: None, stopped }
    }

    /// Whether the batch is stopped because it has no lane.
    pub(super) fn has_stopped_batch(&self) -> bool {
        self.stopped
    }

    /// Compares with the last check; `None` if nothing has changed.
    pub(super) fn update(&mut self, online: &Online, assigned: &[(u32, u32)]) -> Option<Change> {
        if self.before.as_ref() == Some(online) {
            return None;
        }
        self.before = Some(online.clone());
        let lanes: CpuSet = assigned
            .iter()
            .map(|&(batch, _)| batch)
            .filter(|&cpu| online.0.contains(cpu))
            .collect();
        let lost = lanes.is_empty();
        let event = match (lost, self.stopped) {
            (true, false) => Some(Event::LostLanes),
            (false, true) => Some(Event::HasLanes),
            _ => None,
        };
        self.stopped = lost;
        Some(Change { online: online.clone(), lanes: (!lost).then_some(lanes), event })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn online_are(cpus: &[u32]) -> Online {
        Online(cpus.iter().copied().collect())
    }

    /// Goal: a batch without a lane is stopped. Method: two pairs whose CPUs go offline and come
    /// back.
    #[test]
    fn a_batch_follows_its_lanes_and_stops_without_any() {
        const LANES: [(u32, u32); 2] = [(1, 0), (3, 2)];
        let mut hotplug = Hotplug::after(false);
        let mut update = |cpus: &[u32]| hotplug.update(&online_are(cpus), &LANES);
        let lanes =
            |change: &Change| change.lanes.as_ref().map(|set| set.iter().collect::<Vec<_>>());
        let first = update(&[0, 1, 2, 3]).unwrap();
        assert_eq!((lanes(&first), first.event), (Some(vec![1, 3]), None));
        assert!(update(&[0, 1, 2, 3]).is_none(), "nothing has changed");
        let fewer = update(&[0, 1, 2]).unwrap();
        assert_eq!((lanes(&fewer), fewer.event), (Some(vec![1]), None));
        assert_eq!(LANES.map(|lane| fewer.online.bits_of(lane)), [0, BATCH_OFFLINE]);
        let none = update(&[0]).unwrap();
        assert_eq!((lanes(&none), none.event), (None, Some(Event::LostLanes)));
        let other = update(&[0, 2]).unwrap();
        assert_eq!((lanes(&other), other.event), (None, None), "already stopped");
        let back = update(&[3]).unwrap();
        assert_eq!((lanes(&back), back.event), (Some(vec![3]), Some(Event::HasLanes)));
        let mut successor = Hotplug::after(true);
        let change = successor.update(&online_are(&[1]), &LANES).unwrap();
        assert_eq!(change.event, Some(Event::HasLanes), "its predecessor had stopped the batch");
        let bits = LANES.map(|lane| back.online.bits_of(lane));
        assert_eq!(bits, [BATCH_OFFLINE | REQUEST_OFFLINE, REQUEST_OFFLINE]);
    }

    #[test]
    fn sysfs_lists_the_cpus_of_this_machine() {
        let online = online().expect("sysfs is there");
        assert!(!online.0.is_empty());
    }
}
