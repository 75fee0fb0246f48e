//! The service page: a latency-critical service publishes its queue, its running request and its
//! latencies.
//!
//! Each request lane has one slot. A slot has one writer, which claims it with its [`Identity`].
//! The queue length has a cache line of its own, because the thread that queues is seldom the
//! thread that serves. The writing half is [`crate::service`].

use core::ffi::c_int;
use core::mem::{offset_of, size_of};
use core::sync::atomic::{AtomicU64, Ordering::*};

use super::histogram::Histogram;
use super::mark::Marks;
use super::page::{NAME_BYTES, Page, PageError, Slot};
use crate::memory::{Access, Memory, MemoryError};
use crate::process::{Identity, Liveness, pid_namespace};

/// One request lane of a service.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct ServiceSlot {
    /// The [`Identity`] of the process that writes this slot; 0 for none.
    pub writer: AtomicU64,
    /// The request lane's CPU, as its writer gave it.
    pub cpu: AtomicU64,
    reserved_claim: [AtomicU64; 14],

    // The serving thread's line.
    /// The request that the serving thread works on; 0 for none.
    pub running_request: AtomicU64,
    pub request_started_ns: AtomicU64,
    pub finished_requests: AtomicU64,
    /// When the running request arrived. Its latency counts from here, and its budget from its
    /// start.
    pub request_arrived_ns: AtomicU64,
    /// The serving thread's instructions and cycles so far; both 0 if the service counts none.
    pub instructions: AtomicU64,
    pub cycles: AtomicU64,
    /// When the two were counted.
    pub counted_at_ns: AtomicU64,
    reserved_request: [AtomicU64; 9],

    // The queueing thread's line.
    /// The number of waiting requests, without the running one.
    pub queue_len: AtomicU64,
    reserved_queue: [AtomicU64; 15],

    /// The time from arrival to end, of each finished request.
    pub latency: Histogram,
    /// The steps of the last requests.
    pub marks: Marks,
}

const _: () = assert!(size_of::<ServiceSlot>() == 3 * 128 + 4864 + 131_200);
const _: () = assert!(offset_of!(ServiceSlot, writer) == 0);
const _: () = assert!(offset_of!(ServiceSlot, cpu) == 8);
const _: () = assert!(offset_of!(ServiceSlot, running_request) == 128);
const _: () = assert!(offset_of!(ServiceSlot, request_started_ns) == 136);
const _: () = assert!(offset_of!(ServiceSlot, finished_requests) == 144);
const _: () = assert!(offset_of!(ServiceSlot, request_arrived_ns) == 152);
const _: () = assert!(offset_of!(ServiceSlot, instructions) == 160);
const _: () = assert!(offset_of!(ServiceSlot, cycles) == 168);
const _: () = assert!(offset_of!(ServiceSlot, counted_at_ns) == 176);
const _: () = assert!(offset_of!(ServiceSlot, queue_len) == 256);
const _: () = assert!(offset_of!(ServiceSlot, latency) == 384);
const _: () = assert!(offset_of!(ServiceSlot, marks) == 5248);

// SAFETY: repr(C), aligned to 128, atomics only; "ELFNSERV" is used nowhere else.
unsafe impl Slot for ServiceSlot {
    const MAGIC: [u8; 8] = *b"ELFNSERV";
    const CHANNEL: &'static str = "service";
}

/// The writer of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Writer {
    /// No process has claimed the slot.
    None,
    Process(Identity, Liveness),
}

/// The first byte of every service's key, which distinguishes them from other segments of the
/// machine.
const KEY_PREFIX: u32 = 0xe1;

/// The segment key of a service's name: a prefix and 24 bits of FNV-1a. Two names can have the same
/// key; the name in the page distinguishes them.
pub const fn key_of(name: &[u8; NAME_BYTES]) -> i32 {
    let mut hash = 0x811c_9dc5_u32;
    let mut at = 0;
    while at < NAME_BYTES && name[at] != 0 {
        hash = (hash ^ name[at] as u32).wrapping_mul(0x0100_0193);
        at += 1;
    }
    (KEY_PREFIX << 24 | (hash ^ (hash >> 24)) & 0x00ff_ffff).cast_signed()
}

/// A service's name as pages hold it: 1 to 31 bytes, NUL-padded. `None` if the name is empty, too
/// long, or contains a NUL.
pub fn page_name(name: &str) -> Option<[u8; NAME_BYTES]> {
    let bytes = name.as_bytes();
    if bytes.is_empty() || bytes.len() >= NAME_BYTES || bytes.contains(&0) {
        return None;
    }
    let mut padded = [0; NAME_BYTES];
    padded[..bytes.len()].copy_from_slice(bytes);
    Some(padded)
}

/// Why a service's page could not be opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpenError {
    /// The name is empty, longer than 31 bytes, or contains a NUL.
    Name,
    Memory(MemoryError),
    Page(PageError),
    /// Another service has a name with the same key.
    Taken,
    /// The page exists and has another number of request lanes.
    Slots {
        found: u32,
        asked: u32,
    },
    /// The page belongs to another pid namespace, where this process's id is not valid.
    Namespace,
    /// `/proc` does not show this process's identity.
    NoProc,
    /// The page belongs to this user, which the process that opens it does not trust.
    Foreign(u32),
}

impl core::fmt::Display for OpenError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Name => f.write_str("a service's name has 1 to 31 bytes and no NUL"),
            Self::Memory(error) => write!(f, "cannot map the service page: {error}"),
            Self::Page(error) => error.fmt(f),
            Self::Taken => f.write_str("another service's name has the same key: choose another"),
            Self::Slots { found, asked } => {
                write!(f, "the service page has {found} slots, not the requested {asked}")
            }
            Self::Namespace => f.write_str("the service page belongs to another pid namespace"),
            Self::Foreign(uid) => {
                write!(f, "the service page belongs to user {uid}, which is neither you nor root")
            }
            Self::NoProc => f.write_str("/proc is required to identify the writer of a page"),
        }
    }
}

impl core::error::Error for OpenError {}

impl From<PageError> for OpenError {
    fn from(error: PageError) -> Self {
        Self::Page(error)
    }
}

/// Reads a service's page from any other process, without privileges.
#[derive(Debug)]
pub struct ServiceReader {
    page: Page<ServiceSlot>,
    /// Whether process ids in the page are valid in this process's pid namespace.
    same_namespace: bool,
}

impl ServiceReader {
    /// Opens the page of `name`, if it belongs to this process's user or to root.
    pub fn open(name: &str) -> Result<Self, OpenError> {
        Self::open_of(name, None)
    }

    /// Like [`ServiceReader::open`], and also accepts a page of the user `trusted`.
    pub fn open_of(name: &str, trusted: Option<u32>) -> Result<Self, OpenError> {
        let name = page_name(name).ok_or(OpenError::Name)?;
        let memory =
            Memory::attach_segment(key_of(&name), Access::Read).map_err(OpenError::Memory)?;
        let owner = memory.owner().ok_or(OpenError::Memory(MemoryError::Absent))?;
        if !owner.is_ours_or_roots() && trusted != Some(owner.uid) {
            return Err(OpenError::Foreign(owner.uid));
        }
        Self::from_memory(memory, &name)
    }

    /// Opens the page in a segment whose id came from a trusted process.
    pub fn open_segment(id: c_int) -> Result<Self, OpenError> {
        let memory = Memory::attach_id(id, Access::Read).map_err(OpenError::Memory)?;
        Self::from_page(Page::open(memory)?)
    }

    /// Checks the page in `memory`, which must be the service's.
    pub fn from_memory(memory: Memory, name: &[u8; NAME_BYTES]) -> Result<Self, OpenError> {
        let page: Page<ServiceSlot> = Page::open(memory)?;
        if page.name() != *name {
            return Err(OpenError::Taken);
        }
        Self::from_page(page)
    }

    fn from_page(page: Page<ServiceSlot>) -> Result<Self, OpenError> {
        let theirs = page.header().pid_namespace.load(Relaxed);
        Ok(Self { same_namespace: theirs == pid_namespace(), page })
    }

    pub fn name(&self) -> [u8; NAME_BYTES] {
        self.page.name()
    }

    /// The segment id by which other processes can open this page.
    pub fn segment_id(&self) -> Option<c_int> {
        self.page.memory().segment_id()
    }

    pub fn lanes(&self) -> u32 {
        self.page.slot_count()
    }

    #[inline]
    pub fn slot(&self, lane: u32) -> Option<&ServiceSlot> {
        self.page.slot(lane)
    }

    /// Whether a slot belongs to the request lane `cpu`. A slot that no service has claimed belongs
    /// to no lane.
    pub fn stands_for(&self, lane: u32, cpu: u32) -> bool {
        self.slot(lane).is_some_and(|slot| {
            slot.writer.load(Relaxed) != 0 && slot.cpu.load(Relaxed) == u64::from(cpu)
        })
    }

    /// The slot of the request lane `cpu`. A service claims its lanes one by one, and may claim
    /// them in another order after a restart.
    pub fn lane_of(&self, cpu: u32) -> Option<u32> {
        (0..self.lanes()).find(|&lane| self.stands_for(lane, cpu))
    }

    /// The writer of a slot, and whether it lives. Makes system calls, so it belongs in slow paths.
    pub fn writer(&self, lane: u32) -> Writer {
        // Acquire: a reader that sees a claim also sees what its writer stored before; pairs with
        // the exchange in `claim_word`.
        let word = self.slot(lane).map_or(0, |slot| slot.writer.load(Acquire));
        match Identity::from_word(word) {
            None => Writer::None,
            Some(identity) if self.same_namespace => Writer::Process(identity, identity.liveness()),
            Some(identity) => Writer::Process(identity, Liveness::Unknown),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_carry_the_prefix_and_differ() {
        let key = |name| key_of(&page_name(name).unwrap());
        assert_eq!(key("redis").cast_unsigned() >> 24, KEY_PREFIX);
        assert_eq!(key("redis"), key("redis"));
        assert_ne!(key("redis"), key("redis2"));
    }

    #[test]
    fn invalid_names_are_refused() {
        for name in ["", "a\0b", "0123456789012345678901234567890X"] {
            assert_eq!(page_name(name), None, "{name:?}");
        }
        assert!(page_name("0123456789012345678901234567890").is_some());
    }
}
