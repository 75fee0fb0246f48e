//! The batches that run on this machine, found by their control pages.
//!
//! No registry could become stale. The kernel lists its segments; a segment that this
//! user may map and that holds a control page is a run. Other users' runs are not visible. Each set
//! of lanes that elfend lends counts as one more batch; it gives their pages to root and to group
//! elfen.

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
use elfen_machine::fence::status::{Answer, Request, WantedSettings, ask};
use elfen_machine::segment::{segments, text_of};

/// What keeps a batch on its lanes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Level {
    /// elfend enforces the guarantees of a cgroup.
    Fence,
    /// The batch's affinity and scheduling class, which the supervisor restores once a second.
    Affinity,
}

impl Level {
    pub fn name(self) -> &'static str {
        match self {
            Self::Fence => "fence",
            Self::Affinity => "affinity",
        }
    }
}

/// One running batch.
#[derive(Debug)]
pub struct Batch {
    pub pid: u32,
    pub program: String,
    pub supervisor: Identity,
    pub control: Page<ControlSlot>,
    pub lanes: Page<LaneSlot>,
    route: SettingsRoute,
}

/// How the batch's settings can be changed.
#[derive(Debug)]
enum SettingsRoute {
    Segment(i32),
    Daemon(PathBuf),
}

impl Batch {
    /// Requests other settings, which the supervisor applies within a tenth of a second. An error
    /// of kind `PermissionDenied` means that only another user may change them.
    pub fn request_settings(&self, settings: &Settings) -> io::Result<()> {
        let denied = || io::Error::from(io::ErrorKind::PermissionDenied);
        match &self.route {
            SettingsRoute::Segment(id) => {
                let memory = Memory::attach_id(*id, Access::Write).map_err(|_| denied())?;
                let page: Page<ControlSlot> = Page::open(memory).map_err(io::Error::other)?;
                let slot = page.slot(1).ok_or(io::ErrorKind::Unsupported)?;
                slot.publish(settings);
                Ok(())
            }
            SettingsRoute::Daemon(socket) => {
                let page = self.program.clone();
                match ask(socket, &Request::Set { page, wanted: WantedSettings::from(settings) })? {
                    Answer::Set => Ok(()),
                    Answer::Refused { why, .. } if nix::unistd::geteuid().is_root() => {
                        Err(io::Error::other(why))
                    }
                    _ => Err(denied()),
                }
            }
        }
    }

    /// The settings in force; `None` in the middle of a change.
    pub fn settings(&self) -> Option<Settings> {
        self.control.slot(0)?.settings().map(|(_, settings)| settings)
    }

    /// Whether these lanes are lent next to `service`: by elfend, or by a run that reads its page.
    pub fn is_lent_next_to(&self, service: &str) -> bool {
        let segment = self.control.slot(0).map_or(0, |slot| slot.service_segment.load(Relaxed));
        let segment = segment.checked_sub(1).and_then(|id| i32::try_from(id).ok());
        let page = segment.and_then(Service::of_segment);
        let is_elfends = matches!(self.route, SettingsRoute::Daemon(_));
        page.is_some_and(|page| page.name == service)
            || is_elfends && self.program == lent_page_name(service)
    }

    /// Batches on lanes of elfend are in a fence.
    pub fn level(&self) -> Level {
        match self.route {
            SettingsRoute::Daemon(_) => Level::Fence,
            SettingsRoute::Segment(_) => Level::Affinity,
        }
    }

    /// All request lanes. Several batch lanes can have the same one.
    pub fn request_lanes(&self) -> BTreeSet<u64> {
        self.lanes.slots().map(|slot| slot.request_cpu.load(Relaxed)).collect()
    }

    /// All batch lanes.
    pub fn batch_lanes(&self) -> BTreeSet<u64> {
        self.lanes.slots().map(|slot| slot.batch_cpu.load(Relaxed)).collect()
    }

    fn of_segment(segment: i32) -> Option<Self> {
        let control: Page<ControlSlot> =
            Page::open(Memory::attach_id(segment, Access::Read).ok()?).ok()?;
        let lanes = control.slot(0)?.lanes_segment.load(Relaxed);
        let lanes = Memory::attach_id(i32::try_from(lanes).ok()?, Access::Read);
        Self::of(control, Page::open(lanes.ok()?).ok()?, SettingsRoute::Segment(segment))
    }

    fn of(control: Page<ControlSlot>, lanes: Page<LaneSlot>, route: SettingsRoute) -> Option<Self> {
        let slot = control.slot(0)?;
        let supervisor = Identity::from_word(slot.supervisor.load(Relaxed))?;
        if supervisor.liveness() == Liveness::Dead {
            return None;
        }
        let batch = Identity::from_word(slot.batch.load(Relaxed))?;
        Some(Self {
            pid: batch.pid().unsigned_abs(),
            program: text_of(&control.name()),
            supervisor,
            control,
            lanes,
            route,
        })
    }
}

/// elfend's name for the lanes that it lends next to a service, cut to the length of a page's name.
pub fn lent_page_name(service: &str) -> String {
    let mut name = format!("elfend:{service}");
    name.truncate(name.floor_char_boundary(NAME_BYTES - 1));
    name
}

/// All batches of `elfen run` that this user may see, by process id.
pub fn runs() -> io::Result<Vec<Batch>> {
    runs_by(|_| true)
}

/// The batches of `elfen run` that this user or root has started.
pub fn trusted_runs() -> io::Result<Vec<Batch>> {
    let own = nix::unistd::geteuid().as_raw();
    runs_by(|creator| creator == 0 || creator == own)
}

fn runs_by(is_wanted: impl Fn(u32) -> bool) -> io::Result<Vec<Batch>> {
    let bytes = Page::<ControlSlot>::bytes(super::channels::CONTROL_SLOTS);
    let controls = segments()?
        .into_iter()
        .filter(|segment| segment.bytes == bytes && is_wanted(segment.creator));
    let mut found: Vec<Batch> =
        controls.filter_map(|segment| Batch::of_segment(segment.id)).collect();
    found.sort_by_key(|batch| batch.pid);
    Ok(found)
}

/// All runs, and the lanes of elfend if it answers at `socket` and gives their pages to us.
pub fn batches(socket: &Path) -> io::Result<Vec<Batch>> {
    let mut found = runs()?;
    let answer = pages::request_pages(socket.as_os_str().as_bytes(), Access::Read);
    let lent = answer.into_iter().flat_map(|answer| answer.pages).flatten();
    let route = || SettingsRoute::Daemon(socket.to_owned());
    found.extend(lent.filter_map(|pages| Batch::of(pages.control, pages.lanes, route())));
    found.sort_by_key(|batch| batch.pid);
    Ok(found)
}
