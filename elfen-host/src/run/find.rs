//! The batches that run on this machine, found by the control pages they keep.
//!
//! There is no registry to go stale: the kernel lists its segments, and one that we may map and
//! that holds a control page is a run. Other users' runs are theirs. The lanes that elfend lends
//! count as one more each; it hands their pages to root and to group elfen.

use std::collections::BTreeSet;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;

use elfen_rt::memory::{Access, Memory};
use elfen_rt::pages;
use elfen_rt::process::{Identity, Liveness};
use elfen_rt::signal::control::{ControlSlot, Settings};
use elfen_rt::signal::lane::LaneSlot;
use elfen_rt::signal::page::{NAME_BYTES, Page};

use super::channels::Service;
use super::level::Level;
use crate::fence::status::{Answer, Request, Wanted, ask};
use crate::segment::{segments, text_of};

/// One running batch.
#[derive(Debug)]
pub struct Batch {
    pub pid: u32,
    pub program: String,
    pub keeper: Identity,
    pub control: Page<ControlSlot>,
    pub lanes: Page<LaneSlot>,
    way: Way,
}

/// By which others can change its settings.
#[derive(Debug)]
enum Way {
    Segment(i32),
    Daemon(PathBuf),
}

impl Batch {
    /// Wishes for other settings, which the keeper takes over within a moment. An error of kind
    /// `PermissionDenied`: they are another user's to change.
    pub fn want(&self, settings: &Settings) -> io::Result<()> {
        let denied = || io::Error::from(io::ErrorKind::PermissionDenied);
        match &self.way {
            Way::Segment(id) => {
                let memory = Memory::attach_id(*id, Access::Write).map_err(|_| denied())?;
                let page: Page<ControlSlot> = Page::open(memory).map_err(io::Error::other)?;
                let slot = page.slot(1).ok_or(io::ErrorKind::Unsupported)?;
                slot.publish(settings);
                Ok(())
            }
            Way::Daemon(socket) => {
                let page = self.program.clone();
                match ask(socket, &Request::Set { page, wanted: Wanted::from(settings) })? {
                    Answer::Set => Ok(()),
                    Answer::Refused { why, .. } if nix::unistd::geteuid().is_root() => {
                        Err(io::Error::other(why))
                    }
                    _ => Err(denied()),
                }
            }
        }
    }

    /// The settings that hold; `None` while the keeper is in the middle of a change.
    pub fn settings(&self) -> Option<Settings> {
        self.control.slot(0)?.settings().map(|(_, settings)| settings)
    }

    /// Whether it is what is lent beside a service, by elfend or by a run that goes by its page.
    pub fn is_beside(&self, service: &str) -> bool {
        let segment = self.control.slot(0).map_or(0, |slot| slot.service_segment.load(Relaxed));
        let segment = segment.checked_sub(1).and_then(|id| i32::try_from(id).ok());
        let page = segment.and_then(Service::of_segment);
        let is_elfends = matches!(self.way, Way::Daemon(_));
        page.is_some_and(|page| page.name == service)
            || is_elfends && self.program == lent_beside(service)
    }

    /// What is on lanes of elfend's is in a fence.
    pub fn level(&self) -> Level {
        match self.way {
            Way::Daemon(_) => Level::Fence,
            Way::Segment(_) => Level::Affinity,
        }
    }

    /// Every request lane once: several batch lanes can have the same.
    pub fn request_lanes(&self) -> BTreeSet<u64> {
        self.lanes.slots().map(|slot| slot.request_cpu.load(Relaxed)).collect()
    }

    fn of_segment(segment: i32) -> Option<Self> {
        let control: Page<ControlSlot> =
            Page::open(Memory::attach_id(segment, Access::Read).ok()?).ok()?;
        let lanes = control.slot(0)?.lanes_segment.load(Relaxed);
        let lanes = Memory::attach_id(i32::try_from(lanes).ok()?, Access::Read);
        Self::of(control, Page::open(lanes.ok()?).ok()?, Way::Segment(segment))
    }

    fn of(control: Page<ControlSlot>, lanes: Page<LaneSlot>, way: Way) -> Option<Self> {
        let slot = control.slot(0)?;
        let keeper = Identity::from_word(slot.supervisor.load(Relaxed))?;
        if keeper.liveness() == Liveness::Dead {
            return None;
        }
        let batch = Identity::from_word(slot.batch.load(Relaxed))?;
        Some(Self {
            pid: batch.pid().unsigned_abs(),
            program: text_of(&control.name()),
            keeper,
            control,
            lanes,
            way,
        })
    }
}

/// What elfend calls the lanes that it lends beside a service, as far as a page's name goes.
pub(crate) fn lent_beside(service: &str) -> String {
    let mut name = format!("elfend:{service}");
    name.truncate(name.floor_char_boundary(NAME_BYTES - 1));
    name
}

/// All batches of `elfen run` that we may see, by process id.
pub fn runs() -> io::Result<Vec<Batch>> {
    let bytes = Page::<ControlSlot>::bytes(super::channels::CONTROL_SLOTS);
    let controls = segments()?.into_iter().filter(|segment| segment.bytes == bytes);
    let mut found: Vec<Batch> =
        controls.filter_map(|segment| Batch::of_segment(segment.id)).collect();
    found.sort_by_key(|batch| batch.pid);
    Ok(found)
}

/// The same, and what elfend lends, if it answers at `socket` and hands it to us.
pub fn batches(socket: &Path) -> io::Result<Vec<Batch>> {
    let mut found = runs()?;
    let answer = pages::request_pages(socket.as_os_str().as_bytes(), Access::Read);
    let lent = answer.into_iter().flat_map(|answer| answer.pages).flatten();
    let way = || Way::Daemon(socket.to_owned());
    found.extend(lent.filter_map(|pages| Batch::of(pages.control, pages.lanes, way())));
    found.sort_by_key(|batch| batch.pid);
    Ok(found)
}
