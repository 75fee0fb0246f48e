//! Opens the task map: finds an attached program, or attaches one, and maps its map.
//!
//! A [`TaskMap`] holds the program's link, so the program stays attached as long as its last reader
//! exists. A process with CAP_SYS_ADMIN finds the program of another process by its id. elfend
//! hands its map to processes that it trusts. A process that has only CAP_BPF and CAP_PERFMON
//! attaches a program of its own.

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

/// The program's name. It ends in the version of the pages that it writes, so that a build for
/// another version does not find it, and attaches its own program as well.
const PROGRAM: &str = "elfen_switch_7";
const TASKS: &str = "elfen_tasks";
const WATCH: &str = "elfen_watch";
const CLAIMS: &str = "elfen_claims";
/// How many entries follow for each CPU.
#[expect(clippy::cast_possible_truncation, reason = "a handful")]
const ACCOUNTS_EACH: u32 = ACCOUNTS as u32;

const _: () = assert!(size_of::<Account>() == size_of::<TaskSlot>());

/// Where a task map came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// Another process had attached the program.
    Shared,
    /// elfend handed over its map.
    Handed,
    /// This process attached the program.
    Attached,
}

/// Opens the machine's task map: shared, handed over by elfend, or attached by this process.
pub fn open() -> Result<(TaskMap, Source), Error> {
    // Held until the return: of two processes that start together, one attaches the program and the
    // other finds it.
    let _lock = lock();
    match find_attached() {
        Ok(Some(parts)) => return Ok((parts.into_map()?, Source::Shared)),
        Ok(None) => {}
        // A process that may not search gets the map from elfend, or attaches its own program.
        Err(Error::NotPermitted) => match request_from_elfend() {
            Ok(map) => return Ok((map, Source::Handed)),
            Err(TasksError::Absent | TasksError::Refused) => {}
            Err(TasksError::Map(error)) => return Err(error.into()),
        },
        Err(error) => return Err(error),
    }
    Ok((attach()?.into_map()?, Source::Attached))
}

/// Requests the task map from elfend, which hands it to root and to members of its group.
pub fn request_from_elfend() -> Result<TaskMap, TasksError> {
    pages::request_task_map(elfend_socket().as_os_str().as_bytes())
}

/// The path of elfend's socket.
pub fn elfend_socket() -> PathBuf {
    let named = std::env::var_os(OsStr::from_bytes(pages::VARIABLE.to_bytes()));
    named.unwrap_or_else(|| OsStr::from_bytes(pages::SOCKET).to_owned()).into()
}

/// Whether the program of this version is attached; `None` if this process may not search for it.
pub fn is_attached() -> Option<bool> {
    find_attached().ok().map(|found| found.is_some())
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
    // SAFETY: `into_raw_fd` gives up the ownership of the open descriptor.
    unsafe { Descriptor::from_raw(fd.into_raw_fd()) }
}

/// Finds the program that any process has attached. Needs CAP_SYS_ADMIN.
pub(crate) fn find_attached() -> Result<Option<Parts>, Error> {
    for link in bpf_call::links() {
        let (link, info) = link.map_err(Error::call("looking for links"))?;
        let Some(program) = program_of_this_version(info.program) else { continue };
        let Ok(Some(maps)) = program.map_ids() else { continue };
        if let Some([tasks, watch, claims]) = maps_of_program(&maps) {
            return Ok(Some(Parts { tasks, watch, claims, link }));
        }
    }
    Ok(None)
}

fn program_of_this_version(id: u32) -> Option<ProgramInfo> {
    loaded_programs()
        .flatten()
        .find(|program| program.id() == id && program.name() == PROGRAM.as_bytes())
}

fn maps_of_program(ids: &[u32]) -> Option<[OwnedFd; 3]> {
    let named = |name: &str| {
        let id = ids.iter().copied().find(|&id| {
            aya::maps::MapInfo::from_id(id).is_ok_and(|map| map.name() == name.as_bytes())
        })?;
        bpf_call::map_by_id(id).ok()
    };
    Some([named(TASKS)?, named(WATCH)?, named(CLAIMS)?])
}

/// Loads the program, attaches it, and makes every CPU switch once.
pub(crate) fn attach() -> Result<Parts, Error> {
    let loaded = Loaded::load()?;
    let parts = loaded.attach()?;
    visit_cpus(loaded.cpus);
    Ok(parts)
}

/// The loaded program and its maps, not attached. A benchmark attaches it repeatedly to measure its
/// cost.
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
        initialize(tasks.as_fd(), cpus)?;
        bpf_call::freeze(tasks.as_fd()).map_err(Error::call("freezing the task map"))?;
        Ok(Self { program, tasks, watch, claims, cpus })
    }

    /// Attaches the program until the map is dropped. Unlike [`open`], does not make every CPU
    /// switch once.
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
fn initialize(tasks: BorrowedFd<'_>, cpus: u32) -> Result<(), Error> {
    let mut unknown = [0; size_of::<TaskSlot>() / 8];
    unknown[0] = UNKNOWN;
    for cpu in 0..cpus {
        let written = bpf_call::update_element(tasks, cpu + 1, &unknown);
        written.map_err(Error::call("filling the task map"))?;
    }
    bpf_call::update_element(tasks, 0, &header(cpus)).map_err(Error::call("filling the task map"))
}

/// A `PageHeader` as words, because a value of an array is written by a call and not through a
/// mapping.
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

/// The highest CPU that this kernel can ever have, plus 1.
pub(crate) fn possible_cpus() -> Result<u32, Error> {
    let text = std::fs::read_to_string("/sys/devices/system/cpu/possible").map_err(Error::Cpus)?;
    let last = text.trim().rsplit(['-', ',']).next().and_then(|last| last.parse::<u32>().ok());
    last.map(|last| last + 1).ok_or_else(|| Error::Cpus(io::ErrorKind::InvalidData.into()))
}

/// How long this process waits for a visit to all CPUs.
const VISIT_LIMIT: Duration = Duration::from_millis(200);

/// Runs on every CPU that this process may use, so that each CPU switches once and its task is
/// known. Some CPUs would not switch by themselves: a CPU with a thread that polls, or an idle CPU
/// without a tick.
///
/// A thread of its own does this, because a real-time task could block it on a CPU for ever. A CPU
/// that was not reached stays unknown, and counts as busy, until it switches.
fn visit_cpus(cpus: u32) {
    let mut mask = vec![0_u64; cpus as usize / 64 + 1];
    // The thread only makes system calls, so a fork during the visit copies no lock that it holds.
    let visitor = std::thread::spawn(move || (0..cpus).for_each(|cpu| step_on(cpu, &mut mask)));
    let start = Instant::now();
    while !visitor.is_finished() && start.elapsed() < VISIT_LIMIT {
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Moves the calling thread to one CPU. A CPU that is offline or outside of the cpuset is skipped.
fn step_on(cpu: u32, mask: &mut [u64]) {
    mask.fill(0);
    mask[cpu as usize / 64] = 1 << (cpu % 64);
    let size = size_of_val(mask);
    // The system call and not libc's wrapper, whose set ends at 1,024 CPUs.
    // SAFETY: the kernel reads `size` bytes of `mask`; 0 is the calling thread.
    unsafe { libc::syscall(libc::SYS_sched_setaffinity, 0, size, mask.as_ptr()) };
}

/// Takes the lock of processes that are about to attach. Any process could hold it for ever, so the
/// wait is bounded.
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

    /// The words that the call writes are the header that a reader expects.
    #[test]
    fn the_header_words_are_a_page_header() {
        let bytes = Page::<TaskSlot>::bytes(6);
        let memory = Memory::create_segment(libc::IPC_PRIVATE, bytes, 0o600).unwrap();
        memory.remove_name().unwrap();
        let words = header(6);
        // SAFETY: this test made the segment, writable and longer than a header.
        unsafe {
            memory.base().as_ptr().cast::<u64>().copy_from_nonoverlapping(words.as_ptr(), 16)
        };
        let page = Page::<TaskSlot>::open(memory).unwrap();
        assert_eq!((page.slot_count(), page.name()), (6, TASK_MAP_NAME));
    }
}
