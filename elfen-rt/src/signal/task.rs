//! Who runs on every CPU: the thesis's `cpu_task_map`, as the kernel
//! writes it and a check reads it.
//!
//! One writer (the sched_switch program, on its own CPU), any number of readers, no lock: a check
//! can afford one load. `task` and `switched_at_ns` read one after the other may belong to two
//! different switches; [`TaskSlot::snapshot`] is for readers that may not mix them.
//!
//! A timestamp costs the kernel a clock read on every switch, so a CPU gets one only while a reader
//! holds a lease on it: [`WatchSlot::renew`] asks for one, and it runs out on its own if the asker
//! dies.

use core::fmt;
use core::mem::{offset_of, size_of};
use core::sync::atomic::{AtomicU64, Ordering::*};

use super::account::{ACCOUNTS, Account, Claim, Counted};
use super::page::{NAME_BYTES, Page, PageError, PageHeader, Slot};
use super::snapshot;
use crate::bpf::{self, Descriptor};
use crate::memory::{Access, Memory, MemoryError};
use crate::nanonap::{DeviceError, Nanonap};

/// What the kernel says about one CPU. Entry `cpu + 1` of the map; entry 0 is the page's header.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct TaskSlot {
    /// `tgid << 32 | tid` of the running task in one store, ids of the initial pid namespace; 0
    /// while the CPU idles, [`UNKNOWN`] until its first switch.
    pub task: AtomicU64,
    /// When `task` was switched in, CLOCK_MONOTONIC; 0 if no reader watched this CPU then.
    pub switched_at_ns: AtomicU64,
    /// Context switches of this CPU since the map was made. Stored after the other
    /// words: `done` of a snapshot.
    pub switches: AtomicU64,
    /// The same count, stored before the other words: `begun` of a snapshot.
    pub switches_begun: AtomicU64,
    /// The writer's own: the renewal it saw last, and when that lease ends.
    pub lease_renewal: AtomicU64,
    pub lease_end_ns: AtomicU64,
    /// How long the CPU was not idle while a reader watched, up to its last switch to or from idle.
    pub busy_ns: AtomicU64,
    /// When the CPU turned busy; 0 while it idles, or if no reader watched then.
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

/// The task word of a CPU that has not switched since the map was made. Not 0: an unknown task
/// counts as busy.
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

/// What a CPU runs.
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

/// One switch, all of its words from the same moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Switch {
    pub running: Running,
    /// `None` if no reader watched the CPU then.
    pub at_ns: Option<u64>,
    pub count: u64,
    /// How long the CPU had been busy, while watched, when it last turned busy or idle.
    pub busy_ns: u64,
    /// When it turned busy; `None` while it idles, or if no reader watched then.
    pub busy_since_ns: Option<u64>,
}

impl Switch {
    /// How long the CPU has been busy, while watched, up to `now_ns`. Two of these make the busy
    /// time between them, however often it turned busy and idle.
    pub fn busy_until_ns(&self, now_ns: u64) -> u64 {
        let running_ns = self.busy_since_ns.map_or(0, |since_ns| now_ns.saturating_sub(since_ns));
        self.busy_ns.saturating_add(running_ns)
    }
}

impl TaskSlot {
    /// Whether the CPU runs anything but its idle task. One load.
    #[inline]
    pub fn is_busy(&self) -> bool {
        // Relaxed: the answer is a hint about now, nothing is published through it.
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

/// What readers ask of the kernel about one CPU, in a second map, which they may write.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct WatchSlot {
    /// Counted up: the CPU's switches are timed for [`LEASE_NS`] from the next switch on.
    pub renewals: AtomicU64,
    reserved: [AtomicU64; 7],
}

const _: () = assert!(size_of::<WatchSlot>() == 64);

/// Of a batch lane: which tasks to count there. A third map, which is handed to no other process:
/// writing it falsifies every account of the machine.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct ClaimSlot {
    /// One more than its request lane's CPU; 0 before the first claim.
    pub request: AtomicU64,
    /// The [`Claim`]s of the runs that want an account; 0 where there is room.
    pub claims: [AtomicU64; ACCOUNTS],
    reserved: [AtomicU64; 4],
}

const _: () = assert!(size_of::<ClaimSlot>() == 64);
const _: () = assert!(offset_of!(ClaimSlot, claims) == 8);

/// How long a lease lasts after the first switch that sees it. Watchers renew four times as often.
pub const LEASE_NS: u64 = 4_000_000_000;

impl WatchSlot {
    /// Asks for timestamps on this CPU for another lease.
    fn renew(&self) {
        // Relaxed: the kernel only compares it with what it saw last. Added, not
        // stored: watchers share the word.
        self.renewals.fetch_add(1, Relaxed);
    }
}

impl ClaimSlot {
    /// Puts `own` into a word without a living claim; returns its index.
    fn claim(&self, own: Claim, is_dead: impl Fn(Claim) -> bool) -> Option<usize> {
        let words = || self.claims.iter().map(|word| word.load(Relaxed)).enumerate();
        if let Some((at, _)) = words().find(|&(_, word)| word == own.word()) {
            return Some(at);
        }
        let free = |word| Claim::from_word(word).is_none_or(&is_dead);
        // Relaxed: the kernel takes the word as it finds it; of two claims on the same room one
        // gets it.
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
    /// A file descriptor is not what it was said to be.
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

/// The mapped task map, and what keeps its writer there: no reader is left with a frozen map.
#[derive(Debug)]
pub struct TaskMap {
    page: Page<TaskSlot>,
    writer: MapWriter,
}

#[derive(Debug)]
enum MapWriter {
    /// The eBPF program: its leases, and the descriptors with its link.
    Program { watch: Memory, claims: Option<Memory>, descriptors: Descriptors },
    /// The eBPF program, for a process that asks nothing of it: its link alone.
    Lent { _link: Descriptor },
    /// The nanonap module, which cannot go while its map is mapped; timing needs its file.
    Module { module: Option<Nanonap> },
}

/// The descriptors from which a task map is opened, and from which a child that inherits them can
/// open it again.
#[derive(Debug)]
pub struct Descriptors {
    pub tasks: Descriptor,
    pub watch: Descriptor,
    /// Only privileged processes have this one.
    pub claims: Option<Descriptor>,
    /// The program's link: an open descriptor of it keeps the program running whichever other
    /// process dies.
    pub link: Descriptor,
}

impl TaskMap {
    /// Maps a task map from its descriptors; they are looked at, and refused
    /// if they are no eBPF maps. Needs no capability; the map is frozen, so that nobody can map it
    /// but read-only.
    pub fn from_descriptors(descriptors: Descriptors) -> Result<Self, TaskMapError> {
        let tasks = bpf::map_array(&descriptors.tasks, size_of::<TaskSlot>(), Access::Read);
        let page = Page::open(tasks.map_err(TaskMapError::Open)?)?;
        let cpus = page.slot_count() as usize;
        let asked = |map: &Descriptor, slot: usize| {
            let asked = bpf::map_array(map, slot, Access::Write).map_err(TaskMapError::Open)?;
            let is_whole = asked.len() >= slot * cpus;
            if is_whole { Ok(asked) } else { Err(TaskMapError::Open(MemoryError::Size)) }
        };
        let watch = asked(&descriptors.watch, size_of::<WatchSlot>())?;
        let claims = descriptors.claims.as_ref();
        let claims = claims.map(|claims| asked(claims, size_of::<ClaimSlot>())).transpose()?;
        Ok(Self { page, writer: MapWriter::Program { watch, claims, descriptors } })
    }

    /// Maps a task map for reading alone: no CPU is timed, and nothing is counted, on behalf of it.
    pub(crate) fn lent(tasks: Descriptor, link: Descriptor) -> Result<Self, TaskMapError> {
        let tasks = bpf::map_array(&tasks, size_of::<TaskSlot>(), Access::Read);
        let page = Page::open(tasks.map_err(TaskMapError::Open)?)?;
        Ok(Self { page, writer: MapWriter::Lent { _link: link.out_of_the_way() } })
    }

    /// Maps the nanonap module's task map.
    pub fn open_module() -> Result<Self, DeviceError> {
        let module = Nanonap::open()?;
        let page = Page::open(module.map()?)?;
        Ok(Self { page, writer: MapWriter::Module { module: Some(module) } })
    }

    /// The same, holding no descriptor: no CPU is timed on behalf of this map.
    pub(crate) fn open_module_unseen() -> Result<Self, DeviceError> {
        let page = Page::open(Nanonap::open()?.map()?)?;
        Ok(Self { page, writer: MapWriter::Module { module: None } })
    }

    /// A map of our own, for tests that play the kernel; no CPU is timed, and nothing is counted,
    /// but by them.
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

    /// How many CPUs the map has room for: one more than the highest possible CPU.
    pub fn cpus(&self) -> u32 {
        self.page.slot_count()
    }

    /// How long its mapping is.
    pub fn bytes(&self) -> usize {
        self.page.memory().len()
    }

    #[inline]
    pub fn slot(&self, cpu: u32) -> Option<&TaskSlot> {
        self.page.slot(cpu)
    }

    /// Has a CPU's switches timed for another lease; `false` if there is no such CPU. From the
    /// module, timing lasts as long as this map.
    pub fn renew(&self, cpu: u32) -> bool {
        match &self.writer {
            MapWriter::Program { .. } => self.watch(cpu).inspect(|slot| slot.renew()).is_some(),
            MapWriter::Lent { .. } => false,
            MapWriter::Module { module } => {
                cpu < self.cpus() && module.as_ref().is_some_and(|m| m.watch(cpu, true).is_ok())
            }
        }
    }

    /// Has the kernel count how long tasks that descend from `own` run on a batch lane, and how
    /// much of that beside the request lane. Says which of the lane's accounts it is; `None` if
    /// there is no room, or from the module, which keeps none.
    pub fn claim(
        &self,
        batch: u32,
        request: u32,
        own: Claim,
        is_dead: impl Fn(Claim) -> bool,
    ) -> Option<usize> {
        let asked = self.asked(batch)?;
        // Relaxed: every run on this lane stores the same.
        asked.request.store(u64::from(request) + 1, Relaxed);
        asked.claim(own, is_dead)
    }

    /// Whether whoever writes the map counts cgroups, which the module does not.
    pub fn counts_cgroups(&self) -> bool {
        let header = self.page.memory().base().cast::<PageHeader>();
        // SAFETY: the page was opened, so its memory is longer than a header, which is nothing but
        // atomics.
        let header = unsafe { header.as_ref() };
        // Relaxed: written before the map was handed out.
        header.counts_cgroups.load(Relaxed) == 1
    }

    /// Ends a claim.
    pub fn disclaim(&self, batch: u32, own: Claim) {
        let claims = self.asked(batch).map(|asked| &asked.claims);
        for claim in claims.into_iter().flatten() {
            // Relaxed: see `claim`. Another claim stays.
            let _ours = claim.compare_exchange(own.word(), 0, Relaxed, Relaxed);
        }
    }

    /// One of a batch lane's accounts, if it is `claim`'s.
    pub fn account(&self, batch: u32, index: usize, claim: u64) -> Option<Counted> {
        self.account_at(batch, index)?.counted(claim)
    }

    /// All of a batch lane's accounts that are claimed.
    pub fn accounts(&self, batch: u32) -> impl Iterator<Item = Counted> {
        (0..ACCOUNTS).filter_map(move |index| {
            let account = self.account_at(batch, index)?;
            let claim = Claim::from_word(account.claim.load(Relaxed))?;
            account.counted(claim.word())
        })
    }

    /// Accounts follow the slots in the program's map; the module's ends with its slots.
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
        // SAFETY: the account lies inside the memory, by the line above.
        let account = unsafe { memory.base().add(offset) }.cast::<Account>();
        // SAFETY: the mapping lives as long as `self` and starts at a page boundary, the
        // offset is a multiple of 128, and an account is nothing but atomics, which the
        // kernel writes while we read.
        Some(unsafe { account.as_ref() })
    }

    fn asked(&self, cpu: u32) -> Option<&ClaimSlot> {
        let MapWriter::Program { claims: Some(claims), .. } = &self.writer else { return None };
        if cpu >= self.cpus() {
            return None;
        }
        // SAFETY: `from_descriptors` checked that there are as many slots as CPUs.
        let slot = unsafe { claims.base().cast::<ClaimSlot>().add(cpu as usize) };
        // SAFETY: the mapping lives as long as `self`, starts at a page
        // boundary, and holds atomics alone.
        Some(unsafe { slot.as_ref() })
    }

    /// The request lane beside which a batch lane's tasks are counted; `None` before the first
    /// claim there.
    pub fn counted_beside(&self, batch: u32) -> Option<u32> {
        // Relaxed: every claim on this lane stores the same.
        let word = self.asked(batch)?.request.load(Relaxed).checked_sub(1)?;
        u32::try_from(word).ok()
    }

    fn watch(&self, cpu: u32) -> Option<&WatchSlot> {
        let MapWriter::Program { watch, .. } = &self.writer else { return None };
        if cpu >= self.cpus() {
            return None;
        }
        // SAFETY: `from_descriptors` checked that there are as many watch slots as CPUs.
        let slot = unsafe { watch.base().cast::<WatchSlot>().add(cpu as usize) };
        // SAFETY: the mapping lives as long as `self`, starts at a page
        // boundary, and holds atomics alone.
        Some(unsafe { slot.as_ref() })
    }

    /// For handing the map on, with what keeps the program attached; `None` of the module's map,
    /// which a child opens for itself, and of one that was lent.
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

    /// Goal: every run that lives keeps its account, and the dead make room. Method:
    /// more claims than accounts.
    #[test]
    fn the_dead_make_room() {
        // SAFETY: nothing but atomic integers, of which zero is a value.
        let slot: ClaimSlot = unsafe { core::mem::zeroed() };
        let nobody = |_| false;
        let all = [10, 20, 30].map(|front| slot.claim(claim(front), nobody));
        assert_eq!(all, [Some(0), Some(1), Some(2)]);
        assert_eq!(slot.claim(claim(20), nobody), Some(1), "its own, again");
        assert_eq!(slot.claim(claim(40), nobody), None, "all of them live");
        assert_eq!(slot.claim(claim(40), |held| held == claim(30)), Some(2));
        assert_eq!(slot.claim(claim(20), |_| true), Some(1), "never twice");
    }
}
