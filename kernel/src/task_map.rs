//! The task map: attach the program, or find one that is attached, and map what it writes.
//!
//! A process that gets a [`TaskMap`] from here holds the program's link as well, so the program
//! stays as long as its last reader. Processes find each other's program by its id, which only
//! CAP_SYS_ADMIN may do; elfend hands its own to those whom it trusts; with CAP_BPF and CAP_PERFMON
//! alone each process attaches its own.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use aya::programs::{ProgramInfo, loaded_programs};
use elfen_rt::bpf::Descriptor;
use elfen_rt::pages;
pub use elfen_rt::pages::TasksError;
use elfen_rt::signal::ABI_VERSION;
use elfen_rt::signal::account::{ACCOUNTS, Account};
use elfen_rt::signal::page::{Page, Slot};
use elfen_rt::signal::task::{Descriptors, TASK_MAP_NAME, TaskMap, TaskSlot, UNKNOWN};

use crate::bpf_call;
pub use crate::error::Error;
use crate::error::KERNEL_TYPES;
use crate::object::{DUPLICATING, Object};

static OBJECT: &[u8] = aya::include_bytes_aligned!("../bpf/task_map.bpf.o");

/// It ends in the version of the pages that it writes: a build that reads another version does not
/// find it, and attaches its own beside it.
const PROGRAM: &str = "elfen_switch_7";
const TASKS: &str = "elfen_tasks";
const WATCH: &str = "elfen_watch";
const CLAIMS: &str = "elfen_claims";
/// Entries that follow the CPUs.
#[expect(clippy::cast_possible_truncation, reason = "a handful")]
const ACCOUNTS_EACH: u32 = ACCOUNTS as u32;

const _: () = assert!(size_of::<Account>() == size_of::<TaskSlot>());

/// How a task map was come by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// Another process had attached the program.
    Shared,
    /// elfend handed its own over.
    Handed,
    /// We attached the program.
    Attached,
}

/// Opens the machine's task map: shared, handed over, or attached by us.
pub fn open() -> Result<(TaskMap, Source), Error> {
    // Held to the end: of two processes that start together, one attaches and the other finds it.
    let _lock = lock();
    match running() {
        Ok(Some(parts)) => return Ok((parts.into_map()?, Source::Shared)),
        Ok(None) => {}
        // Who may not look is handed it, or has to attach its own.
        Err(Error::NotPermitted) => match handed() {
            Ok(map) => return Ok((map, Source::Handed)),
            Err(TasksError::Absent | TasksError::Refused) => {}
            Err(TasksError::Map(error)) => return Err(error.into()),
        },
        Err(error) => return Err(error),
    }
    Ok((attach()?.into_map()?, Source::Attached))
}

/// What elfend hands over, to root and to members of its group.
pub fn handed() -> Result<TaskMap, TasksError> {
    pages::tasks(elfend().as_os_str().as_bytes())
}

/// Where elfend is asked.
pub fn elfend() -> PathBuf {
    let named = std::env::var_os(OsStr::from_bytes(pages::VARIABLE.to_bytes()));
    named.unwrap_or_else(|| OsStr::from_bytes(pages::SOCKET).to_owned()).into()
}

/// Whether a program of ours is attached; `None` if we may not know.
pub fn is_attached() -> Option<bool> {
    running().ok().map(|found| found.is_some())
}

/// An attached program and its maps.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) tasks: OwnedFd,
    pub(crate) watch: OwnedFd,
    pub(crate) claims: OwnedFd,
    pub(crate) link: OwnedFd,
}

impl Parts {
    pub(crate) fn into_map(self) -> Result<TaskMap, Error> {
        let Self { tasks, watch, claims, link } = self;
        let [tasks, watch, claims, link] = [tasks, watch, claims, link].map(descriptor);
        let claims = Some(claims);
        Ok(TaskMap::from_descriptors(Descriptors { tasks, watch, claims, link })?)
    }
}

fn descriptor(fd: OwnedFd) -> Descriptor {
    // SAFETY: `into_raw_fd` hands the open descriptor over to us alone.
    unsafe { Descriptor::from_raw(fd.into_raw_fd()) }
}

/// The program that some process has attached. Looking for it needs CAP_SYS_ADMIN.
pub(crate) fn running() -> Result<Option<Parts>, Error> {
    for link in bpf_call::links() {
        let (link, info) = link.map_err(Error::call("looking for links"))?;
        let Some(program) = program_of_ours(info.program) else { continue };
        let Ok(Some(maps)) = program.map_ids() else { continue };
        if let Some([tasks, watch, claims]) = maps_of_ours(&maps) {
            return Ok(Some(Parts { tasks, watch, claims, link }));
        }
    }
    Ok(None)
}

fn program_of_ours(id: u32) -> Option<ProgramInfo> {
    loaded_programs()
        .flatten()
        .find(|program| program.id() == id && program.name() == PROGRAM.as_bytes())
}

fn maps_of_ours(ids: &[u32]) -> Option<[OwnedFd; 3]> {
    let named = |name: &str| {
        let id = ids.iter().copied().find(|&id| {
            aya::maps::MapInfo::from_id(id).is_ok_and(|map| map.name() == name.as_bytes())
        })?;
        bpf_call::map_by_id(id).ok()
    };
    Some([named(TASKS)?, named(WATCH)?, named(CLAIMS)?])
}

/// Loads the program, attaches it, and looks who runs on the CPUs that don't switch.
pub(crate) fn attach() -> Result<Parts, Error> {
    let loaded = Loaded::load()?;
    let parts = loaded.attach()?;
    visit_cpus(loaded.cpus);
    Ok(parts)
}

/// The program and its maps in the kernel, not attached. Attaching one again and
/// again measures what it costs.
#[derive(Debug)]
pub struct Loaded {
    program: OwnedFd,
    tasks: OwnedFd,
    watch: OwnedFd,
    claims: OwnedFd,
    cpus: u32,
}

impl Loaded {
    /// Loads the program, writes the task map's header, and freezes the map.
    pub fn load() -> Result<Self, Error> {
        let cpus = possible_cpus()?;
        let mut object = Object::load(
            OBJECT,
            &[(TASKS, 1 + cpus + cpus * ACCOUNTS_EACH), (WATCH, cpus), (CLAIMS, cpus)],
        )?;
        let program = object.program(PROGRAM, "sched_switch")?;
        let (tasks, watch, claims) = (object.map(TASKS)?, object.map(WATCH)?, object.map(CLAIMS)?);
        fill(tasks.as_fd(), cpus)?;
        bpf_call::freeze(tasks.as_fd()).map_err(Error::call("freezing the task map"))?;
        Ok(Self { program, tasks, watch, claims, cpus })
    }

    /// Attaches the program until the map is dropped. CPUs that don't switch are
    /// not visited: see [`open`].
    pub fn map(&self) -> Result<TaskMap, Error> {
        self.attach()?.into_map()
    }

    fn attach(&self) -> Result<Parts, Error> {
        let again = |fd: &OwnedFd| fd.try_clone().map_err(Error::call(DUPLICATING));
        let (tasks, watch) = (again(&self.tasks)?, again(&self.watch)?);
        let claims = again(&self.claims)?;
        let link = bpf_call::attach(self.program.as_fd()).map_err(Error::call("attaching"))?;
        Ok(Parts { tasks, watch, claims, link })
    }
}

/// Writes the header, and marks every CPU unknown until its first switch.
fn fill(tasks: BorrowedFd<'_>, cpus: u32) -> Result<(), Error> {
    let mut unknown = [0; size_of::<TaskSlot>() / 8];
    unknown[0] = UNKNOWN;
    for cpu in 0..cpus {
        let written = bpf_call::update_element(tasks, cpu + 1, &unknown);
        written.map_err(Error::call("filling the task map"))?;
    }
    bpf_call::update_element(tasks, 0, &header(cpus)).map_err(Error::call("filling the task map"))
}

/// `PageHeader` as words: a value of an array is written by a call, not through a mapping.
fn header(cpus: u32) -> [u64; 16] {
    let mut words = [0; 16];
    words[0] = u64::from_le_bytes(TaskSlot::MAGIC);
    words[1] = u64::from(cpus) << 32 | u64::from(ABI_VERSION);
    words[2] = Page::<TaskSlot>::bytes(cpus) as u64;
    words[3] = size_of::<TaskSlot>() as u64;
    for (word, name) in words[4..8].iter_mut().zip(TASK_MAP_NAME.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*name);
    }
    // `counts_cgroups`, behind the name.
    words[8] = 1;
    words
}

/// One more than the highest CPU that this kernel can ever have.
pub(crate) fn possible_cpus() -> Result<u32, Error> {
    let text = std::fs::read_to_string("/sys/devices/system/cpu/possible").map_err(Error::Cpus)?;
    let last = text.trim().rsplit(['-', ',']).next().and_then(|last| last.parse::<u32>().ok());
    last.map(|last| last + 1).ok_or_else(|| Error::Cpus(io::ErrorKind::InvalidData.into()))
}

/// How long a visit to all CPUs may take before we go on without the rest of it.
const VISIT_LIMIT: Duration = Duration::from_millis(200);

/// Steps on every CPU we may run on, so that one which does not switch by itself is known at
/// once: a thread that polls, or an idle CPU without a tick. In a thread of its own, because a
/// real-time task could keep us off a CPU for ever; a CPU that was not reached stays unknown, and
/// counts as busy, until it switches.
fn visit_cpus(cpus: u32) {
    let mut mask = vec![0_u64; cpus as usize / 64 + 1];
    // It makes system calls alone: a process that forks while it is under way copies no lock of
    // its.
    let visitor = std::thread::spawn(move || (0..cpus).for_each(|cpu| step_on(cpu, &mut mask)));
    let start = Instant::now();
    while !visitor.is_finished() && start.elapsed() < VISIT_LIMIT {
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Moves the calling thread to one CPU. One that is offline or outside our cpuset
/// refuses, and is left alone.
fn step_on(cpu: u32, mask: &mut [u64]) {
    mask.fill(0);
    mask[cpu as usize / 64] = 1 << (cpu % 64);
    let size = size_of_val(mask);
    // The call itself and not libc's wrapper, whose set ends at 1,024 CPUs.
    // SAFETY: the kernel reads `size` bytes of `mask`, which is ours; 0 is the calling thread.
    unsafe { libc::syscall(libc::SYS_sched_setaffinity, 0, size, mask.as_ptr()) };
}

/// The lock among processes that are about to attach. Any process could hold it, so it is waited
/// for only so long.
fn lock() -> Option<File> {
    let file = File::open(KERNEL_TYPES).ok()?;
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(1) {
        if file.try_lock().is_ok() {
            return Some(file);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use elfen_rt::memory::Memory;

    #[test]
    fn builds_of_different_versions_do_not_share_a_program() {
        assert_eq!(PROGRAM, format!("elfen_switch_{ABI_VERSION}"));
        assert!(PROGRAM.len() < 16, "the kernel cuts longer names");
    }

    /// The words that go through the call are the header that a reader expects.
    #[test]
    fn the_header_in_words_is_a_page_header() {
        let bytes = Page::<TaskSlot>::bytes(6);
        let memory = Memory::create_segment(libc::IPC_PRIVATE, bytes, 0o600).unwrap();
        memory.remove_name().unwrap();
        let words = header(6);
        // SAFETY: the segment is ours, writable, and longer than a header.
        unsafe {
            memory.base().as_ptr().cast::<u64>().copy_from_nonoverlapping(words.as_ptr(), 16)
        };
        let page = Page::<TaskSlot>::open(memory).unwrap();
        assert_eq!((page.slot_count(), page.name()), (6, TASK_MAP_NAME));
    }
}
