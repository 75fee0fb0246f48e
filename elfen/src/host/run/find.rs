//! The batches that run on this machine, found by the control pages they keep.
//!
//! There is no registry to go stale: the kernel lists its segments, and one that we may map and that holds a control page is
//! a run. Other users' runs are theirs.

use std::fs;
use std::io;
use std::sync::atomic::Ordering::Relaxed;

use elfen_rt::memory::{Access, Memory};
use elfen_rt::process::{Identity, Liveness};
use elfen_rt::signal::control::ControlSlot;
use elfen_rt::signal::lane::LaneSlot;
use elfen_rt::signal::page::Page;

pub(crate) const SEGMENTS: &str = "/proc/sysvipc/shm";

/// One running batch.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) pid: u32,
    pub(crate) program: String,
    pub(crate) keeper: Identity,
    pub(crate) control: Page<ControlSlot>,
    pub(crate) lanes: Page<LaneSlot>,
    segment: i32,
}

impl Batch {
    /// The control page once more, for writing what is wanted.
    pub(crate) fn writable(&self) -> Option<Page<ControlSlot>> {
        Page::open(Memory::attach_id(self.segment, Access::Write).ok()?).ok()
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
        let name = control.name();
        let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
        Some(Self {
            pid: batch.pid().unsigned_abs(),
            program: String::from_utf8_lossy(name).into_owned(),
            keeper,
            lanes,
            segment,
            control,
        })
    }
}

/// All batches that we may see, by process id.
pub(crate) fn batches() -> io::Result<Vec<Batch>> {
    let list = fs::read_to_string(SEGMENTS)?;
    let size = Page::<ControlSlot>::bytes(super::channels::CONTROL_SLOTS);
    let segment = |line: &str| {
        let mut fields = line.split_whitespace().skip(1);
        let (id, found) = (fields.next()?.parse().ok()?, fields.nth(1)?.parse::<usize>().ok()?);
        (found == size).then_some(id)
    };
    let mut found: Vec<Batch> = list.lines().filter_map(segment).filter_map(Batch::open).collect();
    found.sort_by_key(|batch| batch.pid);
    Ok(found)
}
