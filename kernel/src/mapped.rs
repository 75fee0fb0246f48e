//! An eBPF array, mapped for reading.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// Words that eBPF programs write while this process reads them.
#[derive(Debug)]
pub(crate) struct Mapped {
    base: NonNull<AtomicU64>,
    words: usize,
}

// SAFETY: the mapping is not tied to a thread, and all access is atomic.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Maps the first `words` words of an array. Fails if the array has fewer.
    pub(crate) fn new(map: BorrowedFd<'_>, words: usize) -> io::Result<Self> {
        let (length, read) = (words * size_of::<AtomicU64>(), libc::PROT_READ);
        let null = std::ptr::null_mut();
        // SAFETY: the kernel chooses the address of the new mapping, and refuses a length beyond
        // the array.
        let base = unsafe { libc::mmap(null, length, read, libc::MAP_SHARED, map.as_raw_fd(), 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { base, words })
    }

    pub(crate) fn words(&self) -> &[AtomicU64] {
        // SAFETY: `new` mapped this many words, page-aligned, and nothing unmaps them before `self`
        // drops. The kernel writes them meanwhile, and they are atomic.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.words) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let length = self.words * size_of::<AtomicU64>();
        // SAFETY: `new` mapped this, and no reference outlives `self`.
        unsafe { libc::munmap(self.base.as_ptr().cast(), length) };
    }
}
