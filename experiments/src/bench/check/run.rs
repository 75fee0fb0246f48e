//! The run that the measured programs belong to: a request lane that idles for ever, and their own
//! lane.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering::Relaxed;

use elfen_rt::inherit::Inherited;
use elfen_rt::memory::{Memory, MemoryError};
use elfen_rt::process::pid_namespace;
use elfen_rt::service::Service;
use elfen_rt::signal::control::{ControlSlot, Settings};
use elfen_rt::signal::lane::{LaneSlot, LaneState};
use elfen_rt::signal::page::{Page, SLOTS_MAX, Slot};

use super::error::Error;
use super::kind::{Kind, Library};

/// CPUs that no machine has: no task runs there but in our pages.
const NO_CPUS: [u32; 3] = [SLOTS_MAX - 1, SLOTS_MAX - 2, SLOTS_MAX - 3];

pub(super) struct Run {
    /// Pages with one batch lane and with two; the second lane is on no CPU.
    lanes: [Page<LaneSlot>; 2],
    control: Page<ControlSlot>,
    service: Service,
    pub(super) cpu: u32,
    ours: PathBuf,
    returning: PathBuf,
}

impl Run {
    /// A run whose batch lane is `cpu`.
    pub(super) fn new(cpu: u32, ours: PathBuf, returning: PathBuf) -> Result<Self, Error> {
        let channels = |error: &dyn std::fmt::Display| Error::Channels(error.to_string());
        let name = format!("bench-check-{}", std::process::id());
        let service = Service::open(&name, 2).map_err(|error| channels(&error))?;
        for (slot, request) in (0..).zip([NO_CPUS[0], NO_CPUS[1]]) {
            // Held for as long as the page: a lane that no worker has claimed is looked at again
            // and again.
            let worker = service.claim(slot, request).map_err(|error| channels(&error))?;
            std::mem::forget(worker);
        }
        let page = |lanes| page::<LaneSlot>(lanes).map_err(|error| channels(&error));
        let lanes = [page(1)?, page(2)?];
        for page in &lanes {
            let assigned = [(cpu, NO_CPUS[0]), (NO_CPUS[2], NO_CPUS[1])];
            page.slots()
                .zip(assigned)
                .for_each(|(slot, (batch, request))| slot.assign(batch, request));
        }
        let control = self::page::<ControlSlot>(1).map_err(|error| channels(&error))?;
        if let Some(slot) = control.slot(0) {
            slot.publish(&Settings::BORROW_IDLE);
        }
        Ok(Self { lanes, control, service, cpu, ours, returning })
    }

    /// Makes `command` start its program with this kind of checks.
    pub(super) fn prepare(&self, command: &mut Command, kind: Option<&Kind>) {
        command.env_remove("ELFEN_RUN").env_remove("LD_PRELOAD");
        let Some(kind) = kind else { return };
        command.env("LD_PRELOAD", self.library(kind.library));
        if kind.library == Library::Ours {
            let page = self.page(kind);
            // Off: the program's first check says that it runs.
            page.slots().for_each(|slot| slot.enter(LaneState::Off, 0));
            let inherited = Inherited {
                lanes: id(page.memory()),
                control: id(self.control.memory()),
                tasks: None,
                service: self.service.page().memory().segment_id(),
            };
            command.env("ELFEN_RUN", inherited.to_string());
        }
    }

    /// Whether the program has checked since `prepare`.
    pub(super) fn was_checked(&self, kind: &Kind) -> bool {
        let state = self.page(kind).slot(0).map(|slot| slot.state.load(Relaxed));
        kind.library == Library::Returning || state == Some(LaneState::Running as u64)
    }

    fn page(&self, kind: &Kind) -> &Page<LaneSlot> {
        if kind.lanes == 1 { &self.lanes[0] } else { &self.lanes[1] }
    }

    fn library(&self, library: Library) -> &Path {
        match library {
            Library::Ours => &self.ours,
            Library::Returning => &self.returning,
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // No other process knows the name; if the removal fails, the page goes with the machine's
        // next restart.
        let _removed = self.service.page().memory().remove_name();
    }
}

/// A page that goes with the last process that maps it.
fn page<S: Slot>(slots: u32) -> Result<Page<S>, MemoryError> {
    let memory = Memory::create_segment(libc::IPC_PRIVATE, Page::<S>::bytes(slots), 0o600)?;
    memory.remove_name()?;
    Page::format(memory, slots, pid_namespace(), &[0; 32]).map_err(|_| MemoryError::Size)
}

fn id(memory: &Memory) -> i32 {
    memory.segment_id().unwrap_or_else(|| unreachable!("made as a segment"))
}
