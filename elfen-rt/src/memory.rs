//! Shared memory that cannot shrink under its reader.
//!
//! A file in `/dev/shm` can be truncated while it is mapped; then the reader's program dies of
//! SIGBUS. So channels live in memory whose size the kernel fixes for good:
//! - System V segments, which need no privilege,
//! - the memory of eBPF maps,
//! - sealed files without a name ([`crate::sealed`]).
//!
//! No call makes any of these smaller, and all of them outlive their removal while they are mapped.
//!
//! A [`Memory`] proves that its bytes stay mapped and backed until it is dropped. It proves nothing
//! about their contents.

use core::ffi::c_int;
use core::fmt;
use core::ptr::{self, NonNull};

use crate::process::errno;

/// The access that a mapping allows. A read-only mapping cannot be made writable later.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    Read,
    Write,
}

/// Why shared memory could not be made or mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryError {
    Absent,
    Exists,
    Denied,
    /// The memory has another size than expected, or the size is invalid.
    Size,
    /// A limit of the system: segments, memory, address space.
    Exhausted,
    /// Anything else, with its errno.
    Other(c_int),
}

impl MemoryError {
    pub(crate) fn last() -> Self {
        match errno() {
            libc::ENOENT | libc::EIDRM => Self::Absent,
            libc::EEXIST => Self::Exists,
            libc::EACCES | libc::EPERM => Self::Denied,
            libc::EINVAL => Self::Size,
            libc::ENOSPC | libc::ENOMEM | libc::EMFILE | libc::ENFILE => Self::Exhausted,
            other => Self::Other(other),
        }
    }
}

impl MemoryError {
    /// Translates the error of a call that takes an id and no size. There EINVAL means that the
    /// segment is gone.
    fn of_an_id(self) -> Self {
        if self == Self::Size { Self::Absent } else { self }
    }
}

impl fmt::Display for MemoryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => f.write_str("it does not exist"),
            Self::Exists => f.write_str("it exists already"),
            Self::Denied => f.write_str("permission denied"),
            Self::Size => f.write_str("unexpected size"),
            Self::Exhausted => f.write_str("the system has no shared memory left"),
            Self::Other(errno) => write!(f, "errno {errno}"),
        }
    }
}

impl core::error::Error for MemoryError {}

/// The owner of a System V segment. The kernel records it, so no writer can forge it.
#[derive(Clone, Copy, Debug)]
pub struct SegmentOwner {
    pub uid: u32,
    /// How many mappings the segment has now.
    pub attached: u64,
}

impl SegmentOwner {
    /// Whether the segment belongs to this process's user or to root, which have power over this
    /// process anyway. Names of pages can be guessed, so any other user could have made the page.
    pub fn is_ours_or_roots(self) -> bool {
        // SAFETY: takes nothing and cannot fail.
        self.uid == 0 || self.uid == unsafe { libc::geteuid() }
    }
}

#[derive(Debug)]
enum Release {
    Segment { id: c_int },
    Mapping,
}

/// A mapping of shared memory whose size the kernel has fixed.
#[derive(Debug)]
pub struct Memory {
    base: NonNull<u8>,
    len: usize,
    access: Access,
    release: Release,
}

// SAFETY: the mapping belongs to the process and not to a thread, and `Memory` hands out only its
// address.
unsafe impl Send for Memory {}
// SAFETY: as above, and `&Memory` only reads plain fields.
unsafe impl Sync for Memory {}

impl Memory {
    /// Makes a segment of `len` zero bytes under `key` and maps it writable. `mode` holds its
    /// permission bits.
    pub fn create_segment(key: i32, len: usize, mode: u16) -> Result<Self, MemoryError> {
        let flags = libc::IPC_CREAT | libc::IPC_EXCL | c_int::from(mode);
        // SAFETY: shmget takes plain numbers.
        let id = unsafe { libc::shmget(key, len, flags) };
        if id < 0 {
            return Err(MemoryError::last());
        }
        Self::attach_id(id, Access::Write).inspect_err(|_| {
            // No other process knows the segment, so none would ever remove it.
            // SAFETY: IPC_RMID takes no buffer.
            unsafe { libc::shmctl(id, libc::IPC_RMID, ptr::null_mut()) };
        })
    }

    /// Maps the segment under `key`.
    pub fn attach_segment(key: i32, access: Access) -> Result<Self, MemoryError> {
        // SAFETY: shmget takes plain numbers. Size 0 accepts a segment of any size.
        let id = unsafe { libc::shmget(key, 0, 0) };
        if id < 0 {
            return Err(MemoryError::last());
        }
        Self::attach_id(id, access)
    }

    /// Maps the segment with this id.
    pub fn attach_id(id: c_int, access: Access) -> Result<Self, MemoryError> {
        let len = segment_stat(id).map_err(MemoryError::of_an_id)?.shm_segsz;
        let flags = match access {
            Access::Read => libc::SHM_RDONLY,
            Access::Write => 0,
        };
        // SAFETY: the kernel chooses the address, so no mapping of ours is replaced.
        let base = unsafe { libc::shmat(id, ptr::null(), flags) };
        // shmat reports failure as an address of -1.
        if base as isize == -1 {
            return Err(MemoryError::last().of_an_id());
        }
        let base = NonNull::new(base.cast()).ok_or(MemoryError::Exhausted)?;
        // The id may have passed to another segment before it was attached. The attached segment
        // cannot lose its id, so its size is verified again.
        let memory = Self { base, len, access, release: Release::Segment { id } };
        if segment_stat(id)?.shm_segsz != len {
            return Err(MemoryError::Size);
        }
        Ok(memory)
    }

    /// Maps the first `len` bytes behind a descriptor.
    ///
    /// # Safety
    /// 1. `fd` refers to memory that never shrinks: an eBPF map, the nanonap device, or a sealed
    ///    file. Other files can shrink.
    /// 2. That memory has `len` bytes, or the kernel refuses to map more bytes than there are, as
    ///    it does for a map.
    pub(crate) unsafe fn map_descriptor(
        fd: c_int,
        len: usize,
        access: Access,
    ) -> Result<Self, MemoryError> {
        let protection = match access {
            Access::Read => libc::PROT_READ,
            Access::Write => libc::PROT_READ | libc::PROT_WRITE,
        };
        // SAFETY: the kernel chooses the address, so no mapping of ours is replaced.
        let base = unsafe { libc::mmap(ptr::null_mut(), len, protection, libc::MAP_SHARED, fd, 0) };
        if base == libc::MAP_FAILED {
            return Err(MemoryError::last());
        }
        let base = NonNull::new(base.cast()).ok_or(MemoryError::Exhausted)?;
        Ok(Self { base, len, access, release: Release::Mapping })
    }

    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn access(&self) -> Access {
        self.access
    }

    /// The owner of a segment; `None` for other memory, or if the segment was removed meanwhile.
    pub fn owner(&self) -> Option<SegmentOwner> {
        let Release::Segment { id } = self.release else { return None };
        let stat = segment_stat(id).ok()?;
        Some(SegmentOwner { uid: stat.shm_perm.uid, attached: stat.shm_nattch })
    }

    /// The id by which a process can map this segment. It is valid as long as any process maps the
    /// segment, even after the name was removed.
    pub fn segment_id(&self) -> Option<c_int> {
        match self.release {
            Release::Segment { id } => Some(id),
            Release::Mapping => None,
        }
    }

    /// Gives a segment to another user, whose processes can map it from then on. Existing mappings
    /// stay.
    pub fn give_to(&self, user: u32, group: u32) -> Result<(), MemoryError> {
        let Release::Segment { id } = self.release else { return Err(MemoryError::Absent) };
        let mut stat = segment_stat(id)?;
        stat.shm_perm.uid = user;
        stat.shm_perm.gid = group;
        // SAFETY: `stat` is ours, and of the type that IPC_SET reads.
        match unsafe { libc::shmctl(id, libc::IPC_SET, &mut stat) } {
            0 => Ok(()),
            _ => Err(MemoryError::last()),
        }
    }

    /// Removes a segment's name: no new process finds the segment, and it ends with its last
    /// mapping.
    pub fn remove_name(&self) -> Result<(), MemoryError> {
        let Release::Segment { id } = self.release else { return Err(MemoryError::Absent) };
        // SAFETY: IPC_RMID takes no buffer.
        match unsafe { libc::shmctl(id, libc::IPC_RMID, ptr::null_mut()) } {
            0 => Ok(()),
            _ => Err(MemoryError::last()),
        }
    }
}

impl Drop for Memory {
    // Never inlined, which keeps the preload library small.
    #[inline(never)]
    fn drop(&mut self) {
        match self.release {
            // SAFETY: `base` came from shmat and is detached only here.
            Release::Segment { .. } => unsafe {
                libc::shmdt(self.base.as_ptr().cast());
            },
            // SAFETY: `base` and `len` came from mmap and are unmapped only here.
            Release::Mapping => unsafe {
                libc::munmap(self.base.as_ptr().cast(), self.len);
            },
        }
    }
}

fn segment_stat(id: c_int) -> Result<libc::shmid_ds, MemoryError> {
    // SAFETY: an all-zero shmid_ds is a valid value of that plain C structure.
    let mut stat: libc::shmid_ds = unsafe { core::mem::zeroed() };
    // SAFETY: `stat` is ours and of the type that IPC_STAT fills.
    match unsafe { libc::shmctl(id, libc::IPC_STAT, &mut stat) } {
        0 => Ok(stat),
        _ => Err(MemoryError::last()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::{AtomicI32, Ordering};

    /// A key for this test run. The process id separates parallel runs.
    pub(crate) fn scratch_key() -> i32 {
        static NEXT: AtomicI32 = AtomicI32::new(0);
        let pid = i32::try_from(std::process::id()).unwrap();
        0x6600_0000 | ((pid & 0xffff) << 8) | NEXT.fetch_add(1, Ordering::Relaxed)
    }

    #[test]
    fn a_segment_is_found_by_key_and_keeps_its_size() {
        let key = scratch_key();
        assert_eq!(Memory::attach_segment(key, Access::Read).unwrap_err(), MemoryError::Absent);
        let writer = Memory::create_segment(key, 5000, 0o600).unwrap();
        assert_eq!(Memory::create_segment(key, 1, 0o600).unwrap_err(), MemoryError::Exists);
        let reader = Memory::attach_segment(key, Access::Read).unwrap();
        assert_eq!((reader.len(), writer.len()), (5000, 5000));
        assert_eq!(reader.owner().unwrap().attached, 2);
        writer.remove_name().unwrap();
        assert_eq!(Memory::attach_segment(key, Access::Read).unwrap_err(), MemoryError::Absent);
    }

    #[test]
    fn removal_and_a_smaller_successor_leave_the_mapping_whole() {
        let key = scratch_key();
        let writer = Memory::create_segment(key, 64 * 1024, 0o600).unwrap();
        let reader = Memory::attach_segment(key, Access::Read).unwrap();
        writer.remove_name().unwrap();
        drop(writer);
        let successor = Memory::create_segment(key, 1, 0o600).unwrap();
        successor.remove_name().unwrap();
        for offset in (0..reader.len()).step_by(512) {
            // SAFETY: `offset` lies inside the mapping, which `reader` keeps.
            let at = unsafe { reader.base().add(offset) };
            // SAFETY: see above; any byte is a valid u8.
            assert_eq!(unsafe { at.read_volatile() }, 0);
        }
    }

    #[test]
    fn a_read_only_mapping_cannot_be_upgraded() {
        let writer = Memory::create_segment(scratch_key(), 4096, 0o600).unwrap();
        let Release::Segment { id } = writer.release else { panic!("a segment") };
        let reader = Memory::attach_id(id, Access::Read).unwrap();
        let base = reader.base().as_ptr().cast();
        // SAFETY: mprotect of a mapping of this test. The call must fail and change nothing.
        let upgraded = unsafe { libc::mprotect(base, 4096, libc::PROT_READ | libc::PROT_WRITE) };
        assert_eq!((upgraded, errno()), (-1, libc::EACCES));
        writer.remove_name().unwrap();
    }
}
