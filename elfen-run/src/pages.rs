//! Makes the pages of a run: without a name, so that they go with the last process that maps them.

use std::io;
use std::sync::atomic::AtomicU64;

use elfen_rt::bpf::Descriptor;
use elfen_rt::memory::{Memory, MemoryError};
use elfen_rt::process::pid_namespace;
use elfen_rt::sealed::{self, Writers};
use elfen_rt::signal::lane::LaneInputs;
use elfen_rt::signal::page::{NAME_BYTES, Page, PageError, Slot};

use super::Order;

#[derive(Debug, thiserror::Error)]
pub enum PagesError {
    #[error("shared memory: {0}")]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Page(#[from] PageError),
    #[error("keeping a descriptor open for the batch: {0}")]
    Descriptor(io::Error),
}

/// The inputs of a guard. No other process gets this page: only the processes that hold guards,
/// which are forks of one another, have it mapped.
#[repr(C, align(128))]
#[derive(Debug)]
pub(super) struct GuardSlot {
    pub(super) inputs: LaneInputs,
    reserved: [AtomicU64; 8],
}

// SAFETY: repr(C), aligned to 128, atomics only; "ELFNGARD" is used nowhere else.
unsafe impl Slot for GuardSlot {
    const MAGIC: [u8; 8] = *b"ELFNGARD";
    const CHANNEL: &'static str = "guard";
}

/// A page that only this process and its future children have.
pub(super) fn private_page<S: Slot>(slots: u32) -> Result<Page<S>, PagesError> {
    let (page, _unnamed) = sealed_page(slots, &[0; NAME_BYTES], Writers::MakerOnly)?;
    Ok(page)
}

/// The program's name, cut to its field, by which `elfen status` shows the run.
pub(super) fn page_name(order: &Order) -> [u8; NAME_BYTES] {
    let path = std::path::Path::new(&order.program);
    let name = path.file_name().unwrap_or(order.program.as_os_str()).to_string_lossy();
    let mut padded = [0; NAME_BYTES];
    for (to, from) in padded.iter_mut().zip(name.bytes()).take(NAME_BYTES - 1) {
        *to = from;
    }
    padded
}

pub(super) fn page<S: Slot>(slots: u32, name: &[u8; NAME_BYTES]) -> Result<Page<S>, PagesError> {
    let memory = Memory::create_segment(libc::IPC_PRIVATE, Page::<S>::bytes(slots), 0o600)?;
    // From now on the segment goes with the last process that maps it.
    memory.remove_name()?;
    Ok(Page::format(memory, slots, pid_namespace(), name)?)
}

pub(super) fn lane_slots(order: &Order) -> u32 {
    u32::try_from(order.lanes().count()).unwrap_or(u32::MAX)
}

pub(super) fn sealed_page<S: Slot>(
    slots: u32,
    name: &[u8; NAME_BYTES],
    writers: Writers,
) -> Result<(Page<S>, Descriptor), PagesError> {
    let (memory, file) = sealed::create(Page::<S>::bytes(slots), writers)?;
    Ok((Page::format(memory, slots, pid_namespace(), name)?, file))
}

pub(super) fn segment<S: Slot>(page: &Page<S>) -> u64 {
    page.memory().segment_id().map_or(0, |id| u64::from(id.unsigned_abs()))
}

/// Copies a descriptor so that it survives exec. The copy gets a high number, out of the way of
/// programs that rely on low numbers.
pub(super) fn keep_open(fd: i32) -> Result<i32, PagesError> {
    const FROM: [i32; 3] = [900, 200, 20];
    for from in FROM {
        // SAFETY: F_DUPFD takes numbers and creates a new descriptor, which the batch inherits.
        let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD, from) };
        if copy >= 0 {
            return Ok(copy);
        }
    }
    Err(PagesError::Descriptor(io::Error::last_os_error()))
}
