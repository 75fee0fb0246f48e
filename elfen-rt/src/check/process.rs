//! A process's view of its run: the channels and the batch lanes.
//!
//! The first check of any thread makes it. It is never taken down, because threads run checks until
//! the process ends. The lanes lie in a mapping of their own: this code must not use the program's
//! allocator.

use core::mem::size_of;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};

use super::once::{Made, Once};
use crate::clock::monotonic_ns;
use crate::inherit::Run;
use crate::lane::{Lane, ServiceCache};
use crate::nap::{Nap, NapKind};
use crate::pages::Pages;
use crate::signal::lane::LaneSlot;
use crate::signal::page::SLOTS_MAX;

/// The channels and batch lanes that this process inherited.
#[derive(Debug)]
pub(super) struct Process {
    run: Run,
    views: Views,
    /// How threads of the program nap: like the run, if a program thread can nap that way.
    nap: Nap,
    /// The kernel has stopped writing the task map, so its contents are ignored.
    frozen: AtomicBool,
}

static PROCESS: Once<Process> = Once::new();

/// Opens the run's way to nap, or the best one that works in this process.
fn nap_of(run: &Run) -> Nap {
    // All pages of a daemon hold the same setting.
    let slot = run.pages().find_map(|pages| pages.control.slot(0));
    let word = slot.map_or(0, |slot| slot.nap.load(Relaxed));
    let first = |kinds: &[NapKind]| kinds.iter().find_map(|&kind| Nap::open(kind).ok());
    let nap = match NapKind::from_word(word) {
        Some(NapKind::Block) => Some(Nap::Block),
        Some(NapKind::Spin) => Some(Nap::Spin),
        Some(kind @ NapKind::Device) => first(&[kind, NapKind::Umwait, NapKind::Mwaitx]),
        Some(NapKind::Umwait | NapKind::Mwaitx) | None => {
            first(&[NapKind::Umwait, NapKind::Mwaitx])
        }
    };
    nap.unwrap_or(Nap::Spin)
}

impl Process {
    /// The view of the run that this process inherited; `Never` if it inherited none.
    pub(super) fn own() -> Made<'static, Self> {
        PROCESS.get_or_make(|| {
            let run = Run::inherited()?;
            let views = Views::of(&run)?;
            let nap = nap_of(&run);
            for pages in run.pages() {
                let slots = pages.lanes.slots();
                slots.for_each(|slot| slot.check_nap.store(nap.kind() as u64, Relaxed));
            }
            Some(Self { run, views, nap, frozen: AtomicBool::new(false) })
        })
    }

    /// The batch lane on this CPU. `None` if the CPU is not a batch lane, or if neither a task map
    /// nor a service shows its request lane.
    pub(super) fn lane(&'static self, cpu: u32) -> Option<Lane<'static>> {
        let index = self.views.index_of(cpu)?;
        let view = self.views.view(index)?;
        // Relaxed: written before the process was published.
        let request_cpu = view.request_cpu.load(Relaxed);
        let tasks = self.run.tasks.as_ref().filter(|_| !self.frozen.load(Relaxed));
        let tasks = tasks.filter(|map| map.slot(request_cpu).is_some());
        let pages = self.pages_of(view)?;
        let service = pages.service.as_ref();
        if tasks.is_none() && service.is_none() {
            return None;
        }
        let slot = pages.lanes.slot(view.slot.load(Relaxed))?;
        let control = pages.control.slot(0)?;
        let service_cache = &view.service_cache;
        let inputs = &slot.inputs;
        Some(Lane {
            batch_cpu: cpu,
            request_cpu,
            tasks,
            service,
            control,
            slot,
            inputs,
            service_cache,
        })
    }

    fn pages_of(&self, view: &View) -> Option<&Pages> {
        self.run.pages().nth(view.pages.load(Relaxed) as usize)
    }

    pub(super) fn nap(&self) -> &Nap {
        &self.nap
    }

    /// How many batch lanes the run has.
    pub(super) fn lanes(&self) -> u32 {
        self.views.count
    }

    /// The request lane's word of a run with a single batch lane, for threads on other CPUs. Where
    /// checks do not detect a move, such a thread still takes the slow path after it moves back.
    pub(super) fn only_word(&'static self) -> Option<&'static AtomicU64> {
        if self.lanes() != 1 {
            return None;
        }
        let only = self.run.pages().find_map(|pages| pages.lanes.slot(0))?;
        tested_word(&self.lane(u32::try_from(only.batch_cpu.load(Relaxed)).ok()?)?)
    }

    /// How often `cpu` has switched; `None` without a task map.
    pub(super) fn switches(&self, cpu: u32) -> Option<u64> {
        self.run.tasks.as_ref()?.slot(cpu).map(|slot| slot.switches.load(Relaxed))
    }

    pub(super) fn freeze(&self) {
        self.frozen.store(true, Relaxed);
    }
}

/// The word that the fast path of a check tests: it is 0 while the request lane idles. On a
/// service's page it is the running request, because a queue without a running request lasts only
/// until a worker takes from it. `None` while no service serves there.
pub(super) fn tested_word(lane: &Lane<'static>) -> Option<&'static AtomicU64> {
    match lane.request() {
        Some(slot) => Some(&slot.task),
        None => lane.service(monotonic_ns()).map(|slot| &slot.running_request),
    }
}

/// A table from CPUs to batch lanes, and this process's view of each lane.
#[derive(Debug)]
struct Views {
    table: NonNull<Table>,
    count: u32,
}

/// Zeroed memory is an empty table.
#[repr(C)]
struct Table {
    /// The index of the CPU's view plus 1; 0 if the CPU is not a batch lane.
    view_of_cpu: [AtomicU32; SLOTS_MAX as usize],
    // The views follow.
}

/// Zeroed memory is a view that no thread has used.
#[repr(C, align(64))]
struct View {
    request_cpu: AtomicU32,
    /// The index among the process's pages, and the index of the slot in them.
    pages: AtomicU32,
    slot: AtomicU32,
    service_cache: ServiceCache,
}

// SAFETY: the table is a mapping that belongs to the process, and it holds atomics only.
unsafe impl Send for Views {}
// SAFETY: see above.
unsafe impl Sync for Views {}

const TABLE_BYTES: usize = size_of::<Table>();
const _: () = assert!(TABLE_BYTES.is_multiple_of(align_of::<View>()));

impl Views {
    fn of(run: &Run) -> Option<Self> {
        // Each page has at most SLOTS_MAX slots.
        let count = run.pages().map(|pages| pages.lanes.slot_count()).sum::<u32>();
        let len = TABLE_BYTES + size_of::<View>() * count as usize;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: the kernel chooses the address, so no mapping of the program's is replaced.
        let base = unsafe { libc::mmap(ptr::null_mut(), len, protection, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return None;
        }
        let views = Self { table: NonNull::new(base.cast())?, count };
        let mut index = 0;
        for (at, pages) in (0..).zip(run.pages()) {
            for (slot_at, slot) in (0..).zip(pages.lanes.slots()) {
                views.assign(index, [at, slot_at], slot);
                index += 1;
            }
        }
        Some(views)
    }

    /// Copies a lane's CPUs from its page, because other processes may change the page later.
    fn assign(&self, index: u32, [pages, slot_at]: [u32; 2], slot: &LaneSlot) {
        let cpus = [&slot.batch_cpu, &slot.request_cpu].map(|cpu| cpu.load(Relaxed));
        let [Ok(batch), Ok(request)] = cpus.map(u32::try_from) else { return };
        let (Some(entry), Some(view)) = (self.entry(batch), self.view(index)) else { return };
        view.request_cpu.store(request, Relaxed);
        view.pages.store(pages, Relaxed);
        view.slot.store(slot_at, Relaxed);
        entry.store(index + 1, Relaxed);
    }

    fn entry(&self, cpu: u32) -> Option<&'static AtomicU32> {
        // SAFETY: `of` mapped the table, nothing unmaps it, and it consists of atomics only.
        let table: &'static Table = unsafe { self.table.as_ref() };
        table.view_of_cpu.get(cpu as usize)
    }

    fn index_of(&self, cpu: u32) -> Option<u32> {
        self.entry(cpu)?.load(Relaxed).checked_sub(1)
    }

    fn view(&self, index: u32) -> Option<&'static View> {
        if index >= self.count {
            return None;
        }
        let offset = TABLE_BYTES + size_of::<View>() * index as usize;
        // SAFETY: `of` mapped `count` views behind the table, and `index` is below that.
        let view: NonNull<View> = unsafe { self.table.byte_add(offset) }.cast();
        // SAFETY: nothing unmaps the view, it is aligned by the assertion above, and zeroed memory
        // is a valid View.
        Some(unsafe { view.as_ref() })
    }
}
