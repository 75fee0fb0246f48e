//! Which of a run's CPUs are there.
//!
//! A request lane that is offline serves no request, and the kernel's tracepoints are silent there:
//! its slot would say busy for ever. From a batch lane that goes offline the kernel moves the batch
//! anywhere.

use std::fs;

use elfen_rt::signal::lane::{BATCH_OFFLINE, REQUEST_OFFLINE};

use super::event::Event;
use crate::cpulist::{self, CpuSet};

/// The CPUs that are online; `None` where sysfs does not tell, and nothing is known to have gone.
pub(crate) fn online() -> Option<Online> {
    let list = fs::read_to_string("/sys/devices/system/cpu/online").ok()?;
    let spans = cpulist::spans(list.trim()).ok()?;
    Some(Online(spans.into_iter().flat_map(cpulist::Span::cpus).collect()))
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Online(pub(crate) CpuSet);

impl Online {
    pub(super) fn cpus(&self) -> &CpuSet {
        &self.0
    }

    /// What the lane page says of a (batch, request) lane.
    pub(crate) fn bits_of(&self, (batch, request): (u32, u32)) -> u64 {
        let gone = |cpu, bit| if self.0.contains(cpu) { 0 } else { bit };
        gone(request, REQUEST_OFFLINE) | gone(batch, BATCH_OFFLINE)
    }
}

/// What the keeper knew at its last look.
#[derive(Debug)]
pub(super) struct Hotplug {
    before: Option<Online>,
    stopped: bool,
}

/// What has changed since that look.
#[derive(Debug)]
pub(super) struct Change {
    pub(super) online: Online,
    /// The batch lanes that are left, if any are.
    pub(super) lanes: Option<CpuSet>,
    /// Whether the batch has to be stopped, or to go on.
    pub(super) event: Option<Event>,
}

impl Hotplug {
    /// For a front that takes over from a killed keeper: `stopped` if that keeper had stopped the
    /// batch.
    pub(super) fn after(stopped: bool) -> Self {
        Self { before: None, stopped }
    }

    /// Whether the batch stands still because it has no lane.
    pub(super) fn has_stopped_it(&self) -> bool {
        self.stopped
    }

    /// `None` if nothing has changed.
    pub(super) fn look(&mut self, online: &Online, assigned: &[(u32, u32)]) -> Option<Change> {
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

    /// Goal: a batch is never left without a lane of its own. Method: two pairs
    /// whose CPUs go and come back.
    #[test]
    fn lanes_that_go_and_come_back() {
        const LANES: [(u32, u32); 2] = [(1, 0), (3, 2)];
        let mut hotplug = Hotplug::after(false);
        let mut look = |cpus: &[u32]| hotplug.look(&online_are(cpus), &LANES);
        let lanes =
            |change: &Change| change.lanes.as_ref().map(|set| set.iter().collect::<Vec<_>>());
        let first = look(&[0, 1, 2, 3]).unwrap();
        assert_eq!((lanes(&first), first.event), (Some(vec![1, 3]), None));
        assert!(look(&[0, 1, 2, 3]).is_none(), "nothing has changed");
        let fewer = look(&[0, 1, 2]).unwrap();
        assert_eq!((lanes(&fewer), fewer.event), (Some(vec![1]), None));
        assert_eq!(LANES.map(|lane| fewer.online.bits_of(lane)), [0, BATCH_OFFLINE]);
        let none = look(&[0]).unwrap();
        assert_eq!((lanes(&none), none.event), (None, Some(Event::LostLanes)));
        let other = look(&[0, 2]).unwrap();
        assert_eq!((lanes(&other), other.event), (None, None), "it is stopped already");
        let back = look(&[3]).unwrap();
        assert_eq!((lanes(&back), back.event), (Some(vec![3]), Some(Event::HasLanes)));
        let mut successor = Hotplug::after(true);
        let change = successor.look(&online_are(&[1]), &LANES).unwrap();
        assert_eq!(change.event, Some(Event::HasLanes), "its predecessor had stopped the batch");
        let bits = LANES.map(|lane| back.online.bits_of(lane));
        assert_eq!(bits, [BATCH_OFFLINE | REQUEST_OFFLINE, REQUEST_OFFLINE]);
    }

    #[test]
    fn this_machine_says_what_it_has() {
        let online = online().expect("sysfs is there");
        assert!(!online.0.is_empty());
    }
}
