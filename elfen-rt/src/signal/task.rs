//! The task map: which task runs on every CPU. It is the thesis's `cpu_task_map`.
//!
//! Each slot has one writer (the sched_switch program, on that CPU), any number of readers, and no
//! lock, because a check can afford only one load. `task` and `switched_at_ns`, read one after the
//! other, may belong to two different switches. [`TaskSlot::snapshot`] is for readers that must not
//! mix them.
//!
//! A timestamp costs the kernel a clock read on every switch. So a CPU's switches are timed only
//! while a reader holds a lease on the CPU. [`WatchSlot::renew`] renews the lease, and the lease
//! expires if the reader dies.

use core::fmt;
use core::mem::{offset_of, size_of};
use core::sync::atomic::{AtomicU64, Ordering::*};

use super::account::{ACCOUNTS, Account, Claim, Counted};
use super::page::{NAME_BYTES, Page, PageError, PageHeader, Slot};
use super::snapshot;
use crate::bpf::{self, Descriptor};
use crate::memory::{Access, Memory, MemoryError};
use crate::nanonap::{DeviceError, Nanonap};

/// One CPU. Entry `cpu + 1` of the map; entry 0 is the page's header.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct TaskSlot {
    /// `tgid << 32 | tid` of the running task in one store, with ids of the initial pid namespace.
    /// 0 while the CPU idles, [`UNKNOWN`] until its first switch.
    pub task: AtomicU64,
    /// When `task` was switched in, CLOCK_MONOTONIC; 0 if the CPU was not timed then.
    pub switched_at_ns: AtomicU64,
    /// Context switches of this CPU since the map was made. Stored after the other words: the
    /// `done` of a snapshot.
    pub switches: AtomicU64,
    /// The same count, stored before the other words: the `begun` of a snapshot.
    pub switches_begun: AtomicU64,
    /// For the writer only: the last renewal that it saw.
    pub lease_renewal: AtomicU64,
    /// For the writer only: when that lease ends.
    pub lease_end_ns: AtomicU64,
    /// How long the CPU was busy while it was timed, up to its last switch to or from idle.
    pub busy_ns: AtomicU64,
    /// When the CPU turned busy; 0 while it idles, or if it was not timed then.
    pub busy_since_ns: AtomicU64,
    reserved: [AtomicU64; 8],
}

const _: () = assert!(size_of::<TaskSlot>() == 128);
const _: () = assert!(offset_of!(TaskSlot, task) == 0);
const _: () = assert!(offset_of!(TaskSlot, switched_at_ns) == 8);
const _: () = assert!(offset_of!(TaskSlot, switches) == 16);
const _: () = assert!(offset_of!(TaskSlot, switches_begun) == 24);
const _: () = assert!(offset_of!(TaskSlot, lease_renewal) == 32);
const _: () = assert!(offset_of!(TaskSlot, lease_end_ns) == 40);
const _: () = assert!(offset_of!(TaskSlot, busy_ns) == 48);
const _: () = assert!(offset_of!(TaskSlot, busy_since_ns) == 56);

// SAFETY: repr(C), aligned to 128, atomics only; "ELFNTASK" is used nowhere else.
unsafe impl Slot for TaskSlot {
    const MAGIC: [u8; 8] = *b"ELFNTASK";
    const CHANNEL: &'static str = "task map";
}

/// The task word of a CPU that has not switched since the map was made. It is not 0, because an
/// unknown task counts as busy.
pub const UNKNOWN: u64 = u64::MAX;

/// The task that a CPU runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Task {
    pub process: u32,
    pub thread: u32,
}

impl Task {
    #[inline]
    fn from_word(word: u64) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "the two halves of the word")]
        let halves = ((word >> 32) as u32, word as u32);
        Self { process: halves.0, thread: halves.1 }
    }
}

/// The state of a CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Running {
    Idle,
    Task(Task),
    /// The CPU has not switched since the map was made.
    Unknown,
}

impl Running {
    #[inline]
    pub fn from_word(word: u64) -> Self {
        match word {
            0 => Self::Idle,
            UNKNOWN => Self::Unknown,
            word => Self::Task(Task::from_word(word)),
        }
    }
}

/// One switch, with all words from the same moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Switch {
    pub running: Running,
    /// `None` if the CPU was not timed then.
    pub at_ns: Option<u64>,
    pub count: u64,
    /// How long the CPU had been busy, while it was timed, when it last turned busy or idle.
    pub busy_ns: u64,
    /// When the CPU turned busy; `None` while it idles, or if it was not timed then.
    pub busy_since_ns: Option<u64>,
}

impl Switch {
    /// How long the CPU has been busy, while it was timed, up to `now_ns`. The difference of two
    /// results is the busy time in between, however often the CPU turned busy and idle.
    pub fn busy_until_ns(&self, now_ns: u64) -> u64 {
        let running_ns = self.busy_since_ns.map_or(0, |since_ns| now_ns.saturating_sub(since_ns));
        self.busy_ns.saturating_add(running_ns)
    }
}

impl TaskSlot {
    /// Whether the CPU runs anything but its idle task. One load.
    #[inline]
    pub fn is_busy(&self) -> bool {
        // Relaxed: the result is a hint about this moment, and nothing is published through it.
        self.task.load(Relaxed) != 0
    }

    /// The latest switch; `None` only if the CPU switched during every one of 16 tries.
    pub fn snapshot(&self) -> Option<Switch> {
        snapshot::read(&self.switches_begun, &self.switches, || {
            // Relaxed: `read` orders these between the two counters.
            let at_ns = self.switched_at_ns.load(Relaxed);
            let busy_since_ns = self.busy_since_ns.load(Relaxed);
            Switch {
                running: Running::from_word(self.task.load(Relaxed)),
                at_ns: (at_ns != 0).then_some(at_ns),
                count: self.switches.load(Relaxed),
                busy_ns: self.busy_ns.load(Relaxed),
                busy_since_ns: (busy_since_ns != 0).then_some(busy_since_ns),
            }
        })
    }
}

/// The lease on one CPU, in a second map, which readers may write.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct WatchSlot {
    /// When a reader counts this up, the CPU's switches are timed for [`LEASE_NS`] from the next
    /// switch on.
    pub renewals: AtomicU64,
    reserved: [AtomicU64; 7],
}

const _: () = assert!(size_of::<WatchSlot>() == 64);

/// Which tasks are counted on one batch lane. This third map is never handed to another process,
/// because a writer could falsify every account of the machine.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct ClaimSlot {
    /// The CPU of the lane's request lane plus 1; 0 before the first claim.
    pub request: AtomicU64,
    /// The [`Claim`]s of the runs that have an account; 0 where there is room.
    pub claims: [AtomicU64; ACCOUNTS],
    reserved: [AtomicU64; 4],
}

const _: () = assert!(size_of::<ClaimSlot>() == 64);
const _: () = assert!(offset_of!(ClaimSlot, claims) == 8);

/// How long a lease lasts after the first switch that sees it. Readers renew four times as often.
pub const LEASE_NS: u64 = 4_000_000_000;

impl WatchSlot {
    /// Requests timestamps on this CPU for another lease.
    fn renew(&self) {
        // Relaxed: the kernel only compares the word with the value that it saw last. The word is
        // added to and not stored, because readers share it.
        self.renewals.fetch_add(1, Relaxed);
    }
}

impl ClaimSlot {
    /// Puts `own` into a word without a living claim, and returns the word's index.
    fn claim(&self, own: Claim, is_dead: impl Fn(Claim) -> bool) -> Option<usize> {
        let words = || self.claims.iter().map(|word| word.load(Relaxed)).enumerate();
        if let Some((at, _)) = words().find(|&(_, word)| word == own.word()) {
            return Some(at);
        }
        let free = |word| Claim::from_word(word).is_none_or(&is_dead);
        // Relaxed: the kernel uses each word on its own. Of two claims on the same word, one gets
        // it.
        let take = |at: usize, word| {
            let claims = self.claims.get(at)?;
            claims.compare_exchange(word, own.word(), Relaxed, Relaxed).ok()
        };
        words().find(|&(at, word)| free(word) && take(at, word).is_some()).map(|(at, _)| at)
    }
}

/// Why the task map could not be opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TaskMapError {
    /// A file descriptor does not refer to the expected map.
    Open(MemoryError),
    Page(PageError),
}

impl fmt::Display for TaskMapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open(error) => write!(f, "cannot open the task map: {error}"),
            Self::Page(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for TaskMapError {}

impl From<PageError> for TaskMapError {
    fn from(error: PageError) -> Self {
        Self::Page(error)
    }
}

/// The mapped task map, and the descriptors that keep its writer attached. So a reader's map never
/// stops being updated.
#[derive(Debug)]
pub struct TaskMap {
    page: Page<TaskSlot>,
    writer: MapWriter,
}

#[derive(Debug)]
enum MapWriter {
    /// The eBPF program: its leases, its claims, and the descriptors with its link.
    Program { watch: Memory, claims: Option<Memory>, descriptors: Descriptors },
    /// The eBPF program, for a process that only reads: only its link.
    Lent { _link: Descriptor },
    /// The nanonap module, which cannot be unloaded while its map is mapped. Timing needs its file.
    Module { module: Option<Nanonap> },
}

/// The descriptors of a task map. A child that inherits them can open the map again.
#[derive(Debug)]
pub struct Descriptors {
    pub tasks: Descriptor,
    pub watch: Descriptor,
    /// Only privileged processes have this descriptor.
    pub claims: Option<Descriptor>,
    /// The program's link. An open descriptor of it keeps the program attached, whichever other
    /// process dies.
    pub link: Descriptor,
}

impl TaskMap {
    /// Maps a task map from its descriptors. Refuses descriptors that are not eBPF maps. Needs no
    /// capability. The map is frozen, so no process can map it writable.
    pub fn from_descriptors(descriptors: Descriptors) -> Result<Self, TaskMapError> {
        let tasks = bpf::map_array(&descriptors.tasks, size_of::<TaskSlot>(), Access::Read);
        let page = Page::open(tasks.map_err(TaskMapError::Open)?)?;
        let cpus = page.slot_count() as usize;
        let map_requests = |map: &Descriptor, slot: usize| {
            let memory = bpf::map_array(map, slot, Access::Write).map_err(TaskMapError::Open)?;
            let is_whole = memory.len() >= slot * cpus;
            if is_whole { Ok(memory) } else { Err(TaskMapError::Open(MemoryError::Size)) }
        };
        let watch = map_requests(&descriptors.watch, size_of::<WatchSlot>())?;
        let claims = descriptors.claims.as_ref();
        let claims =
            claims.map(|claims| map_requests(claims, size_of::<ClaimSlot>())).transpose()?;
        Ok(Self { page, writer: MapWriter::Program { watch, claims, descriptors } })
    }

    /// Maps a task map for reading only. This process cannot have CPUs timed or tasks counted.
    pub(crate) fn lent(tasks: Descriptor, link: Descriptor) -> Result<Self, TaskMapError> {
        let tasks = bpf::map_array(&tasks, size_of::<TaskSlot>(), Access::Read);
        let page = Page::open(tasks.map_err(TaskMapError::Open)?)?;
        Ok(Self { page, writer: MapWriter::Lent { _link: link.moved_to_high_number() } })
    }

    /// Maps the nanonap module's task map.
    pub fn open_module() -> Result<Self, DeviceError> {
        let module = Nanonap::open()?;
        let page = Page::open(module.map()?)?;
        Ok(Self { page, writer: MapWriter::Module { module: Some(module) } })
    }

    /// Maps the nanonap module's task map and keeps no descriptor open. This map cannot have CPUs
    /// timed.
    pub(crate) fn open_module_map() -> Result<Self, DeviceError> {
        let page = Page::open(Nanonap::open()?.map()?)?;
        Ok(Self { page, writer: MapWriter::Module { module: None } })
    }

    /// Makes a map for tests that write it themselves, in place of the kernel.
    #[doc(hidden)]
    pub fn for_tests(cpus: u32) -> Self {
        let accounts = cpus as usize * ACCOUNTS * size_of::<Account>();
        let memory = Page::<TaskSlot>::bytes(cpus) + accounts;
        let memory = Memory::create_segment(libc::IPC_PRIVATE, memory, 0o600);
        let page = memory.map(|memory| {
            let _removed = memory.remove_name();
            Page::format(memory, cpus, 0, &TASK_MAP_NAME)
        });
        let Ok(Ok(page)) = page else { unreachable!("a test has memory") };
        Self { page, writer: MapWriter::Module { module: None } }
    }

    #[doc(hidden)]
    pub fn account_for_tests(&self, cpu: u32, index: usize) -> &Account {
        self.account_at(cpu, index).unwrap_or_else(|| unreachable!("a test knows its CPUs"))
    }

    /// How many CPUs the map has room for: the highest possible CPU plus 1.
    pub fn cpus(&self) -> u32 {
        self.page.slot_count()
    }

    /// The length of the mapping.
    pub fn bytes(&self) -> usize {
        self.page.memory().len()
    }

    #[inline]
    pub fn slot(&self, cpu: u32) -> Option<&TaskSlot> {
        self.page.slot(cpu)
    }

    /// Has a CPU's switches timed for another lease; `false` if this CPU does not exist. The module
    /// times the CPU as long as this map exists.
    pub fn renew(&self, cpu: u32) -> bool {
        match &self.writer {
            MapWriter::Program { .. } => {
                self.watch_slot(cpu).inspect(|slot| slot.renew()).is_some()
            }
            MapWriter::Lent { .. } => false,
            MapWriter::Module { module } => {
                cpu < self.cpus() && module.as_ref().is_some_and(|m| m.watch(cpu, true).is_ok())
            }
        }
    }

    /// Has the kernel count how long the tasks of `own` run on a batch lane, and how long of that
    /// while the request lane is busy. Returns the index of the lane's account. `None` if there is
    /// no room, or if the writer is the module, which keeps no accounts.
    pub fn claim(
        &self,
        batch: u32,
        request: u32,
        own: Claim,
        is_dead: impl Fn(Claim) -> bool,
    ) -> Option<usize> {
        let slot = self.claim_slot(batch)?;
        // Relaxed: every run on this lane stores the same value.
        slot.request.store(u64::from(request) + 1, Relaxed);
        slot.claim(own, is_dead)
    }

    /// Whether the map's writer counts cgroups. The module does not.
    pub fn counts_cgroups(&self) -> bool {
        let header = self.page.memory().base().cast::<PageHeader>();
        // SAFETY: `Page::open` checked that the memory is longer than a header, which consists of
        // atomics.
        let header = unsafe { header.as_ref() };
        // Relaxed: the word was written before the map was handed out.
        header.counts_cgroups.load(Relaxed) == 1
    }

    /// Ends a claim.
    pub fn disclaim(&self, batch: u32, own: Claim) {
        let Some(slot) = self.claim_slot(batch) else { return };
        for claim in &slot.claims {
            // Relaxed: as in `claim`. Another run's claim stays.
            let _ours = claim.compare_exchange(own.word(), 0, Relaxed, Relaxed);
        }
    }

    /// One of a batch lane's accounts, if it belongs to `claim`.
    pub fn account(&self, batch: u32, index: usize, claim: u64) -> Option<Counted> {
        self.account_at(batch, index)?.counted(claim)
    }

    /// All accounts of a batch lane that have a claim.
    pub fn accounts(&self, batch: u32) -> impl Iterator<Item = Counted> {
        (0..ACCOUNTS).filter_map(move |index| {
            let account = self.account_at(batch, index)?;
            let claim = Claim::from_word(account.claim.load(Relaxed))?;
            account.counted(claim.word())
        })
    }

    /// In the program's map the accounts follow the slots. The module's map ends with the slots.
    fn account_at(&self, cpu: u32, index: usize) -> Option<&Account> {
        if cpu >= self.cpus() || index >= ACCOUNTS {
            return None;
        }
        let offset = Page::<TaskSlot>::bytes(self.cpus())
            + (cpu as usize * ACCOUNTS + index) * size_of::<Account>();
        let memory = self.page.memory();
        if offset + size_of::<Account>() > memory.len() {
            return None;
        }
        // SAFETY: the check above ensures that the account lies inside the memory.
        let account = unsafe { memory.base().add(offset) }.cast::<Account>();
        // SAFETY: the mapping lives as long as `self` and starts at a page boundary, and the offset
        // is a multiple of 128. An account consists of atomics, which the kernel writes while this
        // process reads.
        Some(unsafe { account.as_ref() })
    }

    fn claim_slot(&self, cpu: u32) -> Option<&ClaimSlot> {
        let MapWriter::Program { claims: Some(claims), .. } = &self.writer else { return None };
        if cpu >= self.cpus() {
            return None;
        }
        // SAFETY: `from_descriptors` checked that there are as many slots as CPUs.
        let slot = unsafe { claims.base().cast::<ClaimSlot>().add(cpu as usize) };
        // SAFETY: the mapping lives as long as `self`, starts at a page boundary, and holds atomics
        // only.
        Some(unsafe { slot.as_ref() })
    }

    /// The request lane that a batch lane's overlap is counted against; `None` before the first
    /// claim on the batch lane.
    pub fn counted_request_lane(&self, batch: u32) -> Option<u32> {
        // Relaxed: every claim on this lane stores the same value.
        let word = self.claim_slot(batch)?.request.load(Relaxed).checked_sub(1)?;
        u32::try_from(word).ok()
    }

    fn watch_slot(&self, cpu: u32) -> Option<&WatchSlot> {
        let MapWriter::Program { watch, .. } = &self.writer else { return None };
        if cpu >= self.cpus() {
            return None;
        }
        // SAFETY: `from_descriptors` checked that there are as many watch slots as CPUs.
        let slot = unsafe { watch.base().cast::<WatchSlot>().add(cpu as usize) };
        // SAFETY: the mapping lives as long as `self`, starts at a page boundary, and holds atomics
        // only.
        Some(unsafe { slot.as_ref() })
    }

    /// The descriptors for handing the map on, with the link that keeps the program attached.
    /// `None` for the module's map, which a child opens itself, and for a map that was lent.
    pub fn descriptors(&self) -> Option<&Descriptors> {
        match &self.writer {
            MapWriter::Program { descriptors, .. } => Some(descriptors),
            MapWriter::Lent { .. } | MapWriter::Module { .. } => None,
        }
    }
}

/// The name in the header of every task map.
pub const TASK_MAP_NAME: [u8; NAME_BYTES] =
    *b"tasks\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(front: u32) -> Claim {
        Claim::of_run(front, front + 1)
    }

    /// Goal: every living run keeps its account, and the accounts of dead runs are reused. Method:
    /// more claims than accounts.
    #[test]
    fn accounts_of_dead_runs_are_reused() {
        // SAFETY: a ClaimSlot consists of atomic integers, for which zero is a value.
        let slot: ClaimSlot = unsafe { core::mem::zeroed() };
        let none_dead = |_| false;
        let all = [10, 20, 30].map(|front| slot.claim(claim(front), none_dead));
        assert_eq!(all, [Some(0), Some(1), Some(2)]);
        assert_eq!(slot.claim(claim(20), none_dead), Some(1), "its own account again");
        assert_eq!(slot.claim(claim(40), none_dead), None, "all runs live");
        assert_eq!(slot.claim(claim(40), |held| held == claim(30)), Some(2));
        assert_eq!(slot.claim(claim(20), |_| true), Some(1), "never twice");
    }
}
