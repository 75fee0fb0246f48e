//! Naps in the kernel, by the nanonap module.
//!
//! The module counts switches itself, so this code reads only the module's task map, even if the
//! caller uses another map.

use core::sync::atomic::Ordering::{Acquire, Relaxed};

use super::protocol::Woken;
use crate::nanonap::{DeviceError, Ended, Nanonap, WaitKind};
use crate::signal::page::Page;
use crate::signal::task::TaskSlot;

/// The open device and its task map.
#[derive(Debug)]
pub struct Device {
    module: Nanonap,
    page: Page<TaskSlot>,
}

impl Device {
    pub fn open() -> Result<Self, DeviceError> {
        let module = Nanonap::open()?;
        Ok(Self { page: Page::open(module.map()?)?, module })
    }

    pub fn module(&self) -> &Nanonap {
        &self.module
    }

    pub fn can_wait(&self) -> bool {
        self.module.wait_kind() != WaitKind::None
    }

    /// How many CPUs the module's task map has room for.
    pub fn cpus(&self) -> u32 {
        self.page.slot_count()
    }

    /// A CPU's slot in the module's own task map.
    #[inline]
    pub fn slot(&self, cpu: u32) -> Option<&TaskSlot> {
        self.page.slot(cpu)
    }

    /// Whether `request_cpu` wakes the lane that the caller runs on. Tries the shortest nap, which
    /// the module refuses on any other lane.
    pub fn ties(&self, request_cpu: u32) -> bool {
        self.module.nap(request_cpu, 0, 1) != Ended::Refused
    }

    /// Naps until `request_cpu` idles. The module arms, re-checks and waits. It is given the switch
    /// count after which an idle moment ends the nap.
    pub fn nap(&self, request_cpu: u32, bound_ns: u64) -> Woken {
        let Some(slot) = self.slot(request_cpu) else { return Woken::Elsewhere };
        // Acquire: loads the count before the task, so that a switch after the count is not taken
        // for an earlier one.
        let seen_switches = slot.switches.load(Acquire);
        if slot.task.load(Relaxed) == 0 {
            return Woken::Idle;
        }
        match self.module.nap(request_cpu, seen_switches, bound_ns) {
            Ended::Idle => Woken::Idle,
            Ended::Bound => Woken::Bound,
            Ended::Wanted => Woken::Wanted,
            Ended::Refused => Woken::Elsewhere,
        }
    }

    /// Like [`Device::nap`], in a program that may have closed our descriptor.
    pub fn nap_if_open(&self, request_cpu: u32, bound_ns: u64) -> Woken {
        if self.module.is_still_open() { self.nap(request_cpu, bound_ns) } else { Woken::Elsewhere }
    }
}
