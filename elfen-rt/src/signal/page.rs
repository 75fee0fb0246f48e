//! The header of every channel page, and the checked way from bytes to slots.
//!
//! A reader copies each header field once. It compares the copies with what this build expects and
//! with the size that the kernel reports, and afterwards uses only its own constants. So a page
//! that is truncated, zeroed, of another version or rewritten later can give wrong values, but
//! never cause an access outside the mapping.

use core::fmt;
use core::marker::PhantomData;
use core::mem::{offset_of, size_of};
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

use super::ABI_VERSION;
use crate::memory::{Access, Memory};

/// Bytes of a page's name, NUL-padded.
pub const NAME_BYTES: usize = 32;

/// A page with more slots is invalid: Linux supports no machine with more CPUs.
pub const SLOTS_MAX: u32 = 8192;

/// The first 128 bytes of every page. The page's maker writes them once.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct PageHeader {
    /// Identifies the channel. Stored last, with release: a reader that acquires it sees the rest.
    pub magic: AtomicU64,
    pub version: AtomicU32,
    pub slot_count: AtomicU32,
    /// The page's size in bytes: this header and all slots.
    pub size: AtomicU64,
    pub slot_size: AtomicU32,
    /// Inode of the pid namespace that process ids in this page belong to; 0 for the kernel's own.
    pub pid_namespace: AtomicU32,
    pub name: [AtomicU64; NAME_BYTES / 8],
    /// In a task map: 1 if its writer supports claims on a cgroup.
    pub counts_cgroups: AtomicU64,
    reserved: [AtomicU64; 7],
}

const HEADER_BYTES: usize = 128;
const _: () = assert!(size_of::<PageHeader>() == HEADER_BYTES);
const _: () = assert!(offset_of!(PageHeader, version) == 8);
const _: () = assert!(offset_of!(PageHeader, slot_count) == 12);
const _: () = assert!(offset_of!(PageHeader, size) == 16);
const _: () = assert!(offset_of!(PageHeader, slot_size) == 24);
const _: () = assert!(offset_of!(PageHeader, pid_namespace) == 28);
const _: () = assert!(offset_of!(PageHeader, name) == 32);
const _: () = assert!(offset_of!(PageHeader, counts_cgroups) == 64);

/// The type of a channel's slots.
///
/// # Safety
/// 1. `repr(C)`, aligned to 128, and every field is an atomic integer, or an array or structure of
///    atomic integers. Then any bytes are a valid value, and writers in other processes cause no
///    data race.
/// 2. No other slot type has the same `MAGIC`.
pub unsafe trait Slot: Sized {
    /// Eight ASCII letters, readable in a hex dump.
    const MAGIC: [u8; 8];
    /// The channel's name in errors.
    const CHANNEL: &'static str;
}

/// Why memory does not hold the expected page. Each variant names what was found and what was
/// expected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageError {
    /// The memory is too small for a header.
    Truncated {
        channel: &'static str,
        found: usize,
    },
    /// The magic is 0: the page's maker has not finished it, or died before that.
    Unfinished {
        channel: &'static str,
    },
    Magic {
        channel: &'static str,
        found: u64,
        expected: u64,
    },
    Version {
        channel: &'static str,
        found: u32,
        expected: u32,
    },
    SlotSize {
        channel: &'static str,
        found: u32,
        expected: u32,
    },
    SlotCount {
        channel: &'static str,
        found: u32,
        most: u32,
    },
    /// The header's size does not match its slots, or exceeds the mapping.
    Size {
        channel: &'static str,
        found: u64,
        expected: u64,
    },
}

impl fmt::Display for PageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Truncated { channel, found } => {
                write!(f, "the {channel} page has {found} bytes, but a header has {HEADER_BYTES}")
            }
            Self::Unfinished { channel } => {
                write!(f, "the {channel} page has no magic number yet: its maker has not finished")
            }
            Self::Magic { channel, found, expected } => {
                write!(f, "the {channel} page has magic {found:#018x}, expected {expected:#018x}")
            }
            Self::Version { channel, found, expected } => {
                write!(f, "the {channel} page has version {found}, this build reads {expected}")
            }
            Self::SlotSize { channel, found, expected } => {
                write!(f, "the {channel} page has slots of {found} bytes, expected {expected}")
            }
            Self::SlotCount { channel, found, most } => {
                write!(f, "the {channel} page has {found} slots, expected 1 to {most}")
            }
            Self::Size { channel, found, expected } => {
                write!(f, "the {channel} page says it has {found} bytes, expected {expected}")
            }
        }
    }
}

impl core::error::Error for PageError {}

/// A checked page in shared memory: a header, then slots of `S`.
#[derive(Debug)]
pub struct Page<S> {
    memory: Memory,
    slot_count: u32,
    slots: PhantomData<S>,
}

impl<S: Slot> Page<S> {
    /// Bytes of a page with this many slots.
    pub const fn bytes(slot_count: u32) -> usize {
        HEADER_BYTES + size_of::<S>() * slot_count as usize
    }

    /// Checks that `memory` holds a page of this channel.
    pub fn open(memory: Memory) -> Result<Self, PageError> {
        let slot_count = check_memory::<S>(&memory)?;
        Ok(Self { memory, slot_count, slots: PhantomData })
    }

    /// Writes the header of a page with `slot_count` slots into zeroed memory that this process
    /// made.
    pub fn format(
        memory: Memory,
        slot_count: u32,
        pid_namespace: u32,
        name: &[u8; NAME_BYTES],
    ) -> Result<Self, PageError> {
        let found = memory.len();
        // Otherwise the first store would fault. Only a debug assertion, because a release build
        // must not panic in other people's processes.
        debug_assert!(memory.access() == Access::Write, "formatting a page requires write access");
        if found < Self::bytes(slot_count) {
            return Err(PageError::Truncated { channel: S::CHANNEL, found });
        }
        check_slot_count::<S>(slot_count)?;
        write_header::<S>(header_of(&memory), slot_count, pid_namespace, name);
        Self::open(memory)
    }

    pub fn header(&self) -> &PageHeader {
        header_of(&self.memory)
    }

    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    pub fn slot_count(&self) -> u32 {
        self.slot_count
    }

    /// The page's name, up to the first NUL.
    pub fn name(&self) -> [u8; NAME_BYTES] {
        let mut name = [0; NAME_BYTES];
        for (word, bytes) in self.header().name.iter().zip(name.chunks_exact_mut(8)) {
            bytes.copy_from_slice(&word.load(Relaxed).to_ne_bytes());
        }
        name
    }

    /// The offset of a slot in the page.
    pub const fn offset(index: u32) -> usize {
        HEADER_BYTES + size_of::<S>() * index as usize
    }

    #[inline]
    pub fn slot(&self, index: u32) -> Option<&S> {
        if index >= self.slot_count {
            return None;
        }
        let offset = Self::offset(index);
        // SAFETY: `open` checked that `slot_count` slots lie inside the memory, and `index` is
        // below `slot_count`.
        let slot: NonNull<S> = unsafe { self.memory.base().add(offset) }.cast();
        // SAFETY: `Memory` keeps the bytes mapped as long as `self`. The kernel maps at page
        // boundaries, and both sizes are multiples of 128. `Slot` guarantees that any bytes are a
        // valid `S` that other processes may write.
        Some(unsafe { slot.as_ref() })
    }

    pub fn slots(&self) -> impl Iterator<Item = &S> {
        (0..self.slot_count).filter_map(|index| self.slot(index))
    }
}

/// Fills in a header, the magic last.
pub fn write_header<S: Slot>(
    header: &PageHeader,
    slot_count: u32,
    pid_namespace: u32,
    name: &[u8; NAME_BYTES],
) {
    header.version.store(ABI_VERSION, Relaxed);
    header.slot_count.store(slot_count, Relaxed);
    header.size.store(Page::<S>::bytes(slot_count) as u64, Relaxed);
    header.slot_size.store(slot_bytes::<S>(), Relaxed);
    header.pid_namespace.store(pid_namespace, Relaxed);
    for (word, bytes) in header.name.iter().zip(name.chunks_exact(8)) {
        word.store(bytes.try_into().map_or(0, u64::from_ne_bytes), Relaxed);
    }
    // Release: pairs with the acquire in `check`.
    header.magic.store(magic_word::<S>(), Release);
}

/// Checks that `memory` holds a page of `S`, and returns its slot count.
pub fn check_memory<S: Slot>(memory: &Memory) -> Result<u32, PageError> {
    if memory.len() < HEADER_BYTES {
        return Err(PageError::Truncated { channel: S::CHANNEL, found: memory.len() });
    }
    check::<S>(header_of(memory), memory.len())
}

/// Whether a page of `S` can have this many slots.
pub fn check_slot_count<S: Slot>(found: u32) -> Result<(), PageError> {
    if found == 0 || found > SLOTS_MAX {
        return Err(PageError::SlotCount { channel: S::CHANNEL, found, most: SLOTS_MAX });
    }
    Ok(())
}

fn check<S: Slot>(header: &PageHeader, mapped: usize) -> Result<u32, PageError> {
    let channel = S::CHANNEL;
    // Acquire: pairs with the release in `write_header`. Each field is loaded once, because its
    // writer is not trusted.
    let magic = header.magic.load(Acquire);
    let version = header.version.load(Relaxed);
    let slot_size = header.slot_size.load(Relaxed);
    let slot_count = header.slot_count.load(Relaxed);
    let size = header.size.load(Relaxed);
    if magic == 0 {
        return Err(PageError::Unfinished { channel });
    }
    if magic != magic_word::<S>() {
        return Err(PageError::Magic { channel, found: magic, expected: magic_word::<S>() });
    }
    if version != ABI_VERSION {
        return Err(PageError::Version { channel, found: version, expected: ABI_VERSION });
    }
    if slot_size != slot_bytes::<S>() {
        return Err(PageError::SlotSize { channel, found: slot_size, expected: slot_bytes::<S>() });
    }
    check_slot_count::<S>(slot_count)?;
    let expected = Page::<S>::bytes(slot_count) as u64;
    if size != expected {
        return Err(PageError::Size { channel, found: size, expected });
    }
    if (mapped as u64) < expected {
        return Err(PageError::Size { channel, found: mapped as u64, expected });
    }
    Ok(slot_count)
}

fn header_of(memory: &Memory) -> &PageHeader {
    debug_assert!(memory.len() >= HEADER_BYTES);
    // SAFETY: both callers checked that the memory is large enough for a header. It stays mapped as
    // long as `memory` and starts at a page boundary. A header consists of atomics, for which any
    // bytes are valid.
    unsafe { memory.base().cast().as_ref() }
}

fn magic_word<S: Slot>() -> u64 {
    u64::from_ne_bytes(S::MAGIC)
}

const fn slot_bytes<S: Slot>() -> u32 {
    assert!(size_of::<S>() <= 1 << 20 && size_of::<S>().is_multiple_of(128));
    #[expect(clippy::cast_possible_truncation, reason = "at most 2^20 by the line above")]
    let bytes = size_of::<S>() as u32;
    bytes
}
