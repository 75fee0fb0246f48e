//! The batches that run on this machine, found by the control pages they keep.
//!
//! There is no registry to go stale: the kernel lists its segments, and one that we may map and
//! that holds a control page is a run. Other users' runs are theirs.

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::Ordering::Relaxed;

use elfen_rt::memory::{Access, Memory};
use elfen_rt::process::{Identity, Liveness};
use elfen_rt::signal::control::{ControlSlot, Settings};
use elfen_rt::signal::lane::LaneSlot;
use elfen_rt::signal::page::Page;

use crate::segment::{segments, text_of};

/// One running batch.
#[derive(Debug)]
pub struct Batch {
    pub pid: u32,
    pub program: String,
    pub keeper: Identity,
    pub control: Page<ControlSlot>,
    pub lanes: Page<LaneSlot>,
    segment: i32,
}

impl Batch {
    /// The control page once more, for writing the settings that are wanted.
    pub fn writable(&self) -> Option<Page<ControlSlot>> {
        Page::open(Memory::attach_id(self.segment, Access::Write).ok()?).ok()
    }

    /// The settings that hold; `None` while the keeper is in the middle of a change.
    pub fn settings(&self) -> Option<Settings> {
        self.control.slot(0)?.settings().map(|(_, settings)| settings)
    }

    /// Every request lane once: several batch lanes can have the same.
    pub fn request_lanes(&self) -> BTreeSet<u64> {
        self.lanes.slots().map(|slot| slot.request_cpu.load(Relaxed)).collect()
    }

    fn open(segment: i32) -> Option<Self> {
        let control: Page<ControlSlot> =
            Page::open(Memory::attach_id(segment, Access::Read).ok()?).ok()?;
        let slot = control.slot(0)?;
        let keeper = Identity::from_word(slot.keeper.load(Relaxed))?;
        if keeper.liveness() == Liveness::Dead {
            return None;
        }
        let batch = Identity::from_word(slot.batch.load(Relaxed))?;
        let lanes = i32::try_from(slot.lanes_segment.load(Relaxed)).ok()?;
        let lanes = Page::open(Memory::attach_id(lanes, Access::Read).ok()?).ok()?;
        Some(Self {
            pid: batch.pid().unsigned_abs(),
            program: text_of(&control.name()),
            keeper,
            lanes,
            segment,
            control,
        })
    }
}

/// All batches that we may see, by process id.
pub fn batches() -> io::Result<Vec<Batch>> {
    let bytes = Page::<ControlSlot>::bytes(super::channels::CONTROL_SLOTS);
    let controls = segments()?.into_iter().filter(|segment| segment.bytes == bytes);
    let mut found: Vec<Batch> = controls.filter_map(|segment| Batch::open(segment.id)).collect();
    found.sort_by_key(|batch| batch.pid);
    Ok(found)
}
