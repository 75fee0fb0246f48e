//! What the runs on this machine say of their batch lanes: since when a batch thread naps there.
//!
//! To the kernel a thread that naps at a check of its own runs. Its run knows better, and says so
//! in its lane page. There is no registry of runs: the kernel lists its shared memory segments, and
//! one that may be mapped and holds a lane page is a run's.

use crate::units::Nanos;
use elfen_rt::memory::{Access, Memory};
use elfen_rt::signal::lane::{LaneSlot, LaneState};
use elfen_rt::signal::page::Page;
use parking_lot::RwLock;
use std::fs;
use std::sync::atomic::Ordering::Relaxed;

#[derive(Debug, Default)]
pub(super) struct LanePages {
    /// By segment.
    pages: RwLock<Vec<(i32, Page<LaneSlot>)>>,
}

impl LanePages {
    /// Looks which runs there are now: system calls.
    pub(super) fn refresh(&self) {
        // Without the list there are no runs to be seen, and naps count as running.
        let list = fs::read_to_string("/proc/sysvipc/shm").unwrap_or_default();
        let segments: Vec<Segment> = list.lines().filter_map(Segment::parse).collect();
        let mut pages = self.pages.write();
        // A page that is mapped here alone is of a run that has ended.
        pages.retain(|(id, _)| segments.iter().any(|s| s.id == *id && s.attached > 1));
        for segment in segments.iter().filter(|segment| segment.may_hold_lanes()) {
            let known = pages.iter().any(|(id, _)| *id == segment.id);
            if !known && let Some(page) = open(segment.id) {
                pages.push((segment.id, page));
            }
        }
    }

    /// Since when a batch thread naps on this lane, of the run whose task `runs` there now.
    pub(super) fn napping_since_ns(
        &self,
        batch: u32,
        runs: impl Fn(usize, u64) -> bool,
    ) -> Option<Nanos> {
        self.pages.read().iter().flat_map(|(_, page)| page.slots()).find_map(|slot| {
            let is_lane = slot.batch_cpu.load(Relaxed) == u64::from(batch);
            let (state, since_ns) = slot.state().filter(|_| is_lane)?;
            (state == LaneState::Napping && is_of(slot, &runs)).then_some(since_ns)
        })
    }
}

/// Asks about the account of a lane's run: its index and its claim.
fn is_of(slot: &LaneSlot, runs: impl Fn(usize, u64) -> bool) -> bool {
    let index = usize::try_from(slot.account_index.load(Relaxed));
    index.is_ok_and(|index| runs(index, slot.account_claim.load(Relaxed)))
}

/// `None` for what is no lane page, or nobody's whose word counts.
fn open(id: i32) -> Option<Page<LaneSlot>> {
    let memory = Memory::attach_id(id, Access::Read).ok()?;
    let trusted = memory.owner().is_some_and(|owner| owner.is_ours_or_roots());
    if trusted { Page::open(memory).ok() } else { None }
}

/// A line of the kernel's list: key, id, permissions, size, maker, last user, mappings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segment {
    id: i32,
    bytes: usize,
    attached: u64,
}

impl Segment {
    /// `None` of the heading.
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split_whitespace().skip(1);
        let id = fields.next()?.parse().ok()?;
        let bytes = fields.nth(1)?.parse().ok()?;
        Some(Self { id, bytes, attached: fields.nth(2)?.parse().ok()? })
    }

    /// Whether its size is that of a lane page. Others are not even mapped.
    fn may_hold_lanes(self) -> bool {
        let slots = self.bytes.checked_sub(Page::<LaneSlot>::bytes(0));
        let whole = slots.is_some_and(|slots| slots.is_multiple_of(size_of::<LaneSlot>()));
        whole && self.attached > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::libc::IPC_PRIVATE;

    /// Goal: a run's page is found when it is there, heard about its lane while a thread of that
    /// very run naps, and let go once it is mapped here alone. Method: a page of our own.
    #[test]
    fn naps_of_runs_are_found() {
        let bytes = Page::<LaneSlot>::bytes(2);
        let memory = Memory::create_segment(IPC_PRIVATE, bytes, 0o600).expect("a segment");
        memory.remove_name().expect("it is ours");
        let run: Page<LaneSlot> = Page::format(memory, 2, 0, &[0; 32]).expect("a page");
        let batch = 3_000_001;
        let slot = run.slot(1).expect("it has two");
        slot.assign(batch, 3_000_000);
        slot.account_index.store(2, Relaxed);
        slot.account_claim.store(77, Relaxed);
        let pages = LanePages::default();
        let naps = || pages.napping_since_ns(batch, |index, claim| (index, claim) == (2, 77));
        pages.refresh();
        assert_eq!(naps(), None, "it runs");
        slot.enter(LaneState::Napping, 5_000);
        assert_eq!(naps(), Some(5_000));
        assert_eq!(pages.napping_since_ns(batch, |_, _| false), None, "another run's task runs");
        slot.enter(LaneState::Held, 6_000);
        assert_eq!(naps(), None, "the guard's nap is no running to the kernel");
        slot.enter(LaneState::Napping, 7_000);
        drop(run);
        pages.refresh();
        assert_eq!(naps(), None, "the run is gone");
    }

    /// Goal: the kernel's list is read. Method: its heading and a line.
    #[test]
    fn the_list_is_read() {
        let heading = "       key      shmid perms                  size  cpid  lpid nattch   uid";
        assert_eq!(Segment::parse(heading), None);
        let line = "         0          3  1600                 20352  4242  4243      2     0";
        let segment = Segment::parse(line).expect("a line");
        assert_eq!(segment, Segment { id: 3, bytes: 20_352, attached: 2 });
    }
}
