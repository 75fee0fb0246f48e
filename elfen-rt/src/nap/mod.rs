//! Naps: a batch thread gives its lane to the sibling without giving up the thread.
//!
//! | nap | needs | waits |
//! | --- | --- | --- |
//! | [`Kind::Device`] | the nanonap module | in the kernel, by MWAIT with preemption off |
//! | [`Kind::Umwait`] | an Intel CPU with WAITPKG | by UMWAIT on the request lane's own slot |
//! | [`Kind::Mwaitx`] | an AMD CPU with MWAITX | by MWAITX on the same |
//! | [`Kind::Block`] | checks, and `elfen run` with eBPF, which wakes it | asleep: see [`block`] |
//! | [`Kind::Spin`] | nothing | by PAUSE; gives the sibling little |
//!
//! All follow [`protocol`]: arm, re-check, wait; and all are bounded, because the writer that
//! should wake a thread may have died. What a thread does between two naps is not decided here: see
//! `policy`.

pub mod block;
pub mod device;
pub mod line;
pub mod protocol;
mod woken;

use core::fmt;
use core::sync::atomic::AtomicU32;

use crate::clock::monotonic_ns;
use crate::nanonap::DeviceError;
use crate::signal::task::TaskSlot;
use block::Block;
use device::Device;
use line::{Monitorx, Pause, Waitpkg};
pub use woken::Woken;

/// The ways to nap, in the order in which [`Nap::auto`] tries them. The discriminants are the ABI.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum Kind {
    Device = 1,
    Umwait,
    Mwaitx,
    Block,
    Spin,
}

impl Kind {
    pub const ALL: [Self; 5] = [Self::Device, Self::Umwait, Self::Mwaitx, Self::Block, Self::Spin];

    /// `None` for a word that is no kind: the page is another process's.
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

/// Why a way to nap is not to be had.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Missing {
    Device(DeviceError),
    /// The module is there, and the CPU has no MONITOR/MWAIT that works.
    DeviceCannotWait,
    /// CPUID does not show the instructions; a hypervisor may hide them.
    Instructions(&'static str),
    /// Outside of a run that was started for it, there is no waker for a thread that blocks.
    NobodyWakes,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device(error) => error.fmt(f),
            Self::DeviceCannotWait => {
                f.write_str("the nanonap module finds no MONITOR/MWAIT that works on this CPU")
            }
            Self::Instructions(names) => write!(f, "this CPU shows no {names}"),
            Self::NobodyWakes => f.write_str("only `elfen run --nap block` wakes who blocks"),
        }
    }
}

impl core::error::Error for Missing {}

/// A way to nap that works here.
#[derive(Debug)]
pub enum Nap {
    Device(Device),
    Umwait(Waitpkg),
    Mwaitx(Monitorx),
    /// Only where a waker calls [`block::wake`] when the request lane idles.
    Block,
    Spin,
}

impl Nap {
    pub fn open(kind: Kind) -> Result<Self, Missing> {
        match kind {
            Kind::Device => {
                let device = Device::open().map_err(Missing::Device)?;
                if device.can_wait() {
                    Ok(Self::Device(device))
                } else {
                    Err(Missing::DeviceCannotWait)
                }
            }
            Kind::Umwait => Waitpkg::detect()
                .map(Self::Umwait)
                .ok_or(Missing::Instructions("UMONITOR/UMWAIT (WAITPKG)")),
            Kind::Mwaitx => {
                Monitorx::detect().map(Self::Mwaitx).ok_or(Missing::Instructions("MONITORX/MWAITX"))
            }
            Kind::Block => Err(Missing::NobodyWakes),
            Kind::Spin => Ok(Self::Spin),
        }
    }

    /// The first of [`Kind::ALL`] that works here; the last always does.
    pub fn auto() -> Self {
        Kind::ALL.into_iter().find_map(|kind| Self::open(kind).ok()).unwrap_or(Self::Spin)
    }

    pub fn kind(&self) -> Kind {
        match self {
            Self::Device(_) => Kind::Device,
            Self::Umwait(_) => Kind::Umwait,
            Self::Mwaitx(_) => Kind::Mwaitx,
            Self::Block => Kind::Block,
            Self::Spin => Kind::Spin,
        }
    }

    /// Gives the lane away until `request_cpu` idles. `slot` says whether it does, in the task map
    /// that the caller reads; the device looks at its own. A thread that blocks waits for `wakes`
    /// to change.
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

    fn here() -> impl Iterator<Item = Nap> {
        // The device does not look at a page of our own.
        let others = |kind: &Kind| *kind != Kind::Device;
        Kind::ALL.into_iter().filter(others).filter_map(|kind| Nap::open(kind).ok())
    }

    #[test]
    fn every_machine_has_a_nap_and_says_why_not_the_others() {
        let mut found = std::vec::Vec::new();
        for kind in Kind::ALL {
            match Nap::open(kind) {
                Ok(nap) => {
                    assert_eq!(nap.kind(), kind);
                    found.push(kind);
                }
                Err(missing) => assert!(!std::format!("{missing}").is_empty()),
            }
        }
        assert_eq!(found.last(), Some(&Kind::Spin));
        assert_eq!(Nap::auto().kind(), found[0], "the first that works");
    }

    /// Goal: each nap ends as it says. Method: an idle lane, a lane that stays busy, and one that
    /// idles while the thread naps; with every nap of this machine that can be told what to watch.
    #[test]
    fn naps_end_when_the_lane_idles_or_their_bound_passes() {
        for nap in here() {
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
