//! What a process knows of its run: the channels, and for each batch lane the view that its looks share.
//!
//! Made once, at the first check of any thread, and never taken down: threads look until the process ends. The views lie
//! in a mapping of our own, because this code allocates nothing that the program could notice.

use core::cell::UnsafeCell;
use core::mem::{MaybeUninit, size_of};
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};

use super::once::{Made, Once};
use crate::borrow::{Borrow, Look, Sources};
use crate::inherit::Run;
use crate::nap::{Kind, Nap};
use crate::signal::control::ControlSlot;
use crate::signal::lane::LaneSlot;
use crate::signal::page::SLOTS_MAX;
use crate::signal::service::{ServiceReader, ServiceSlot};

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Process {
    run: Run,
    views: Views,
    /// How threads of the program nap: as the run does, if a thread of the program can. Not by the device: it takes a descriptor,
    /// and descriptors are the program's; the guard of the lane, who takes over when it looks, has it.
    nap: Nap,
    /// The kernel has stopped writing the task map: nothing that it says counts.
    frozen: AtomicBool,
}

static PROCESS: Once<Process> = Once::new();

fn nap_of(run: &Run) -> Nap {
    let word = run.control.slot(0).map_or(0, |slot| slot.nap.load(Relaxed));
    match Kind::from_word(word) {
        Some(Kind::Block) => Nap::Block,
        Some(Kind::Spin) => Nap::Spin,
        Some(Kind::Umwait | Kind::Mwaitx | Kind::Device) | None => {
            let kinds = [Kind::Umwait, Kind::Mwaitx];
            kinds.into_iter().find_map(|kind| Nap::open(kind).ok()).unwrap_or(Nap::Spin)
        }
    }
}

impl Process {
    /// What this process inherited; `Never` if that is nothing.
    pub(super) fn own() -> Made<'static, Self> {
        PROCESS.get_or_make(|| {
            let run = Run::inherited()?;
            let views = Views::of(&run)?;
            let nap = nap_of(&run);
            Some(Self { run, views, nap, frozen: AtomicBool::new(false) })
        })
    }

    /// The batch lane on this CPU, if it is one and anything can be sampled of its request lane.
    pub(super) fn lane(&'static self, cpu: u32) -> Option<Lane> {
        let index = self.views.index_of(cpu)?;
        let view = self.views.view(index)?;
        // Relaxed: written before the process was published.
        let request = view.request_cpu.load(Relaxed);
        let tasks = self.run.tasks.as_ref().and_then(|map| map.slot(request));
        let tasks = tasks.filter(|_| !self.frozen.load(Relaxed));
        let service = self.run.service.as_ref().and_then(|reader| view.service(reader, request));
        if tasks.is_none() && service.is_none() {
            return None;
        }
        let (slot, control) = (self.run.lanes.slot(index)?, self.run.control.slot(0)?);
        Some(Lane { sources: Sources { tasks, service }, control, slot, view })
    }

    pub(super) fn nap(&self) -> &Nap {
        &self.nap
    }

    /// How many batch lanes the run has.
    pub(super) fn lanes(&self) -> u32 {
        self.views.count
    }

    /// With a single batch lane, its request lane's word, for threads that are elsewhere: those whose check doesn't know
    /// that they moved must find the way back.
    pub(super) fn only_word(&'static self) -> Option<&'static AtomicU64> {
        let only = self.run.lanes.slot(0).filter(|_| self.lanes() == 1)?;
        self.lane(u32::try_from(only.batch_cpu.load(Relaxed)).ok()?)?.word()
    }

    /// How often `cpu` has switched; `None` without a task map.
    pub(super) fn switches(&self, cpu: u32) -> Option<u64> {
        self.run.tasks.as_ref()?.slot(cpu).map(|slot| slot.switches.load(Relaxed))
    }

    pub(super) fn freeze(&self) {
        self.frozen.store(true, Relaxed);
    }
}

/// A batch lane, as a thread on it finds it.
#[derive(Clone, Copy)]
pub(super) struct Lane {
    sources: Sources<'static>,
    control: &'static ControlSlot,
    slot: &'static LaneSlot,
    view: &'static View,
}

impl Lane {
    /// The word that is 0 while the request lane idles. Of a service's page it is the running request: a queue without one
    /// lasts only until a worker takes from it.
    pub(super) fn word(&self) -> Option<&'static AtomicU64> {
        let service = || self.service().map(|slot| &slot.running_request);
        self.sources.tasks.map(|tasks| &tasks.task).or_else(service)
    }

    /// What a thread that blocks waits for.
    pub(super) fn wakes(&self) -> &'static AtomicU64 {
        &self.slot.wakes
    }

    pub(super) fn service(&self) -> Option<&'static ServiceSlot> {
        self.sources.service.and_then(|(reader, slot)| reader.slot(slot))
    }

    /// One look, on what the last look of this process remembers.
    pub(super) fn look(&self, now_ns: u64) -> Look {
        let fresh = || Borrow::new(self.sources, self.control, self.slot);
        match self.view.take() {
            Some(mut memory) => memory.borrow_or_insert(self.sources, fresh).look(now_ns),
            // A signal handler interrupted a look, or another thread was switched out in one.
            None => fresh().look(now_ns),
        }
    }
}

/// The views of all batch lanes, and which CPU is whose.
#[derive(Debug)]
struct Views {
    table: NonNull<Table>,
    count: u32,
}

/// Zeroed memory is an empty table.
#[repr(C)]
struct Table {
    /// One more than the index of the CPU's view; 0 if it is no batch lane.
    view_of_cpu: [AtomicU32; SLOTS_MAX as usize],
    // The views follow.
}

/// What looks at one lane remember, and one thread at a time may use. Zeroed memory is one that nobody has used.
#[repr(C, align(64))]
struct View {
    request_cpu: AtomicU32,
    /// Which slot of the service's page stood for the lane last time.
    service_slot: AtomicU32,
    taken: AtomicBool,
    memory: UnsafeCell<Memory>,
}

struct Memory {
    filled: bool,
    service_slot: u32,
    borrow: MaybeUninit<Borrow<'static>>,
}

// SAFETY: the table is a mapping of the process; it holds atomics, and memories that are reached through `View::take`.
unsafe impl Send for Views {}
// SAFETY: see above.
unsafe impl Sync for Views {}

const TABLE_BYTES: usize = size_of::<Table>();
const _: () = assert!(TABLE_BYTES.is_multiple_of(align_of::<View>()));

impl Views {
    fn of(run: &Run) -> Option<Self> {
        let count = run.lanes.slot_count();
        let len = TABLE_BYTES + size_of::<View>() * count as usize;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: the kernel chooses the address, so no mapping of the program's is replaced.
        let base = unsafe { libc::mmap(ptr::null_mut(), len, protection, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return None;
        }
        let views = Self { table: NonNull::new(base.cast())?, count };
        for (index, slot) in (0..).zip(run.lanes.slots()) {
            views.assign(index, slot);
        }
        Some(views)
    }

    /// Copies what the page says now: it may say something else later.
    fn assign(&self, index: u32, slot: &LaneSlot) {
        let cpus = [&slot.batch_cpu, &slot.request_cpu].map(|cpu| cpu.load(Relaxed));
        let [Ok(batch), Ok(request)] = cpus.map(u32::try_from) else { return };
        let (Some(entry), Some(view)) = (self.entry(batch), self.view(index)) else { return };
        view.request_cpu.store(request, Relaxed);
        entry.store(index + 1, Relaxed);
    }

    fn entry(&self, cpu: u32) -> Option<&'static AtomicU32> {
        // SAFETY: `of` mapped the table, nothing unmaps it, and it is nothing but atomics.
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
        // SAFETY: nothing unmaps it, it is aligned (see the assertion above), and zeroed memory is a View.
        Some(unsafe { view.as_ref() })
    }
}

impl View {
    /// The service's slot for this request lane: the last one, as long as it is that.
    fn service(
        &self,
        reader: &'static ServiceReader,
        request: u32,
    ) -> Option<(&'static ServiceReader, u32)> {
        let last = self.service_slot.load(Relaxed);
        let slot = Some(last).filter(|&last| reader.stands_for(last, request));
        let slot = slot.or_else(|| reader.lane_of(request))?;
        self.service_slot.store(slot, Relaxed);
        Some((reader, slot))
    }

    fn take(&self) -> Option<Taken<'_>> {
        // Acquire: pairs with the release in `Taken::drop`.
        let free = self.taken.compare_exchange(false, true, Acquire, Relaxed).is_ok();
        free.then_some(Taken { view: self })
    }
}

/// A view's memory, for the one thread that has taken it.
struct Taken<'a> {
    view: &'a View,
}

impl Taken<'_> {
    /// The lane's borrow, made anew if there is none or if the service's slot is another.
    fn borrow_or_insert(
        &mut self,
        sources: Sources<'static>,
        fresh: impl FnOnce() -> Borrow<'static>,
    ) -> &mut Borrow<'static> {
        // SAFETY: `take` gave the memory to us alone until we drop.
        let memory = unsafe { &mut *self.view.memory.get() };
        let service_slot = sources.service.map_or(u32::MAX, |(_, slot)| slot);
        if !memory.filled || memory.service_slot != service_slot {
            memory.borrow = MaybeUninit::new(fresh());
            memory.service_slot = service_slot;
            memory.filled = true;
        }
        // SAFETY: filled, now or earlier.
        unsafe { memory.borrow.assume_init_mut() }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        // Release: pairs with the acquire in `View::take`.
        self.view.taken.store(false, Release);
    }
}
