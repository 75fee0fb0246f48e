//! Naps: a batch thread leaves the core's resources to the sibling without leaving its CPU.
//!
//! | nap | needs | waits |
//! | --- | --- | --- |
//! | [`NapKind::Device`] | the nanonap module | in the kernel, by MWAIT with preemption off |
//! | [`NapKind::Umwait`] | an Intel CPU with WAITPKG | by UMWAIT on the request lane's own slot |
//! | [`NapKind::Mwaitx`] | an AMD CPU with MWAITX | by MWAITX on the same |
//! | [`NapKind::Block`] | checks, and `elfen run` with eBPF as the waker | asleep: see [`block`] |
//! | [`NapKind::Spin`] | nothing | by PAUSE, which gives the sibling little |
//!
//! All naps follow [`protocol`]: arm, re-check, wait. All are bounded, because the writer that
//! should wake a thread may have died. Module `policy` decides when a thread naps.

pub mod block;
pub mod device;
pub mod line;
pub mod protocol;

use core::fmt;
use core::sync::atomic::AtomicU32;

use crate::clock::monotonic_ns;
use crate::nanonap::DeviceError;
use crate::signal::task::TaskSlot;
use block::Block;
use device::Device;
use line::{Monitorx, Pause, Waitpkg};
pub use protocol::Woken;

/// The ways to nap, in the order in which [`Nap::auto`] tries them. The discriminants are part of
/// the ABI.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum NapKind {
    Device = 1,
    Umwait,
    Mwaitx,
    Block,
    Spin,
}

impl NapKind {
    pub const ALL: [Self; 5] = [Self::Device, Self::Umwait, Self::Mwaitx, Self::Block, Self::Spin];

    /// `None` for an invalid word: other processes write the page.
    pub fn from_word(word: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|&kind| kind as u64 == word)
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Umwait => "umwait",
            Self::Mwaitx => "mwaitx",
            Self::Block => "block",
            Self::Spin => "spin",
        }
    }
}

/// Why a way to nap is not available.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Missing {
    Device(DeviceError),
    /// The module is loaded, but the CPU has no MONITOR/MWAIT that works.
    DeviceCannotWait,
    /// CPUID does not show the instructions; a hypervisor may hide them.
    Instructions(&'static str),
    /// Only `elfen run --nap block` starts a waker for threads that block.
    NoWaker,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device(error) => error.fmt(f),
            Self::DeviceCannotWait => {
                f.write_str("the nanonap module finds no MONITOR/MWAIT that works on this CPU")
            }
            Self::Instructions(names) => write!(f, "this CPU shows no {names}"),
            Self::NoWaker => f.write_str("only `elfen run --nap block` wakes threads that block"),
        }
    }
}

impl core::error::Error for Missing {}

/// A way to nap that works on this machine.
#[derive(Debug)]
pub enum Nap {
    Device(Device),
    Umwait(Waitpkg),
    Mwaitx(Monitorx),
    /// Needs a waker that calls [`block::wake`] when the request lane idles.
    Block,
    Spin,
}

impl Nap {
    pub fn open(kind: NapKind) -> Result<Self, Missing> {
        match kind {
            NapKind::Device => {
                let device = Device::open().map_err(Missing::Device)?;
                if device.can_wait() {
                    Ok(Self::Device(device))
                } else {
                    Err(Missing::DeviceCannotWait)
                }
            }
            NapKind::Umwait => Waitpkg::detect()
                .map(Self::Umwait)
                .ok_or(Missing::Instructions("UMONITOR/UMWAIT (WAITPKG)")),
            NapKind::Mwaitx => {
                Monitorx::detect().map(Self::Mwaitx).ok_or(Missing::Instructions("MONITORX/MWAITX"))
            }
            NapKind::Block => Err(Missing::NoWaker),
            NapKind::Spin => Ok(Self::Spin),
        }
    }

    /// The first of [`NapKind::ALL`] that works here. The last one always works.
    pub fn auto() -> Self {
        NapKind::ALL.into_iter().find_map(|kind| Self::open(kind).ok()).unwrap_or(Self::Spin)
    }

    pub fn kind(&self) -> NapKind {
        match self {
            Self::Device(_) => NapKind::Device,
            Self::Umwait(_) => NapKind::Umwait,
            Self::Mwaitx(_) => NapKind::Mwaitx,
            Self::Block => NapKind::Block,
            Self::Spin => NapKind::Spin,
        }
    }

    /// Naps until `request_cpu` idles. `slot` is that CPU's slot in the task map that the caller
    /// reads; the device reads its own map. A thread that blocks waits for `wakes` to change.
    pub fn nap(
        &self,
        request_cpu: u32,
        slot: &TaskSlot,
        wakes: &AtomicU32,
        bound_ns: u64,
    ) -> Woken {
        let end_ns = monotonic_ns().saturating_add(bound_ns);
        let left_ns = || end_ns.saturating_sub(monotonic_ns());
        let busy = || slot.is_busy();
        let line = &slot.task;
        match self {
            Self::Device(device) => device.nap(request_cpu, bound_ns),
            Self::Umwait(has) => protocol::nap(&has.on(line), busy, left_ns),
            Self::Mwaitx(has) => protocol::nap(&has.on(line), busy, left_ns),
            Self::Block => protocol::nap(&Block::on(wakes), busy, left_ns),
            Self::Spin => protocol::nap(&Pause, busy, left_ns),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Memory;
    use crate::signal::page::Page;
    use core::sync::atomic::Ordering::Relaxed;
    use std::sync::Arc;

    fn task_page() -> Page<TaskSlot> {
        let bytes = Page::<TaskSlot>::bytes(1);
        let memory = Memory::create_segment(libc::IPC_PRIVATE, bytes, 0o600).unwrap();
        memory.remove_name().unwrap();
        Page::format(memory, 1, 0, &[0; 32]).unwrap()
    }

    fn naps_on_a_page() -> impl Iterator<Item = Nap> {
        // The device reads the module's map, and not the test's page.
        let others = |kind: &NapKind| *kind != NapKind::Device;
        NapKind::ALL.into_iter().filter(others).filter_map(|kind| Nap::open(kind).ok())
    }

    #[test]
    fn every_machine_has_a_nap_and_a_reason_for_each_missing_one() {
        let mut found = std::vec::Vec::new();
        for kind in NapKind::ALL {
            match Nap::open(kind) {
                Ok(nap) => {
                    assert_eq!(nap.kind(), kind);
                    found.push(kind);
                }
                Err(missing) => assert!(!std::format!("{missing}").is_empty()),
            }
        }
        assert_eq!(found.last(), Some(&NapKind::Spin));
        assert_eq!(Nap::auto().kind(), found[0], "the first that works");
    }

    /// Goal: each nap returns the reason for its end. Method: an idle lane, a lane that stays busy,
    /// and a lane that idles during the nap, with every nap of this machine that monitors a given
    /// word.
    #[test]
    fn naps_end_when_the_lane_idles_or_their_bound_passes() {
        for nap in naps_on_a_page() {
            let wakes = AtomicU32::new(0);
            let page = Arc::new(task_page());
            let slot = page.slot(0).unwrap();
            assert_eq!(nap.nap(0, slot, &wakes, u64::MAX), Woken::Idle, "{nap:?}: it idled before");
            slot.task.store(1 << 32 | 1, Relaxed);
            assert_eq!(nap.nap(0, slot, &wakes, 100_000), Woken::Bound, "{nap:?}");
            let idler = {
                let page = page.clone();
                std::thread::spawn(move || {
                    std::thread::sleep(std::time::Duration::from_millis(2));
                    page.slot(0).unwrap().task.store(0, Relaxed);
                })
            };
            assert_eq!(nap.nap(0, slot, &wakes, u64::MAX), Woken::Idle, "{nap:?}");
            idler.join().unwrap();
        }
    }
}
