//! The memory that host and program share: code, table, and the words of threads.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use elfen_stream::{Cache, Cluster, CodeMemory, layout};
use memmap2::{MmapOptions, MmapRaw};
use nix::sys::memfd::{MFdFlags, memfd_create};

const NAME: &CStr = c"elfen-profile";
/// How the mappings of a process name it.
pub(crate) const MAPPED_NAME: &str = "/memfd:elfen-profile";
/// Clusters of code in one program.
pub(crate) const CLUSTERS_MAX: u64 = 8;
const PART_BYTES: u64 = 32 << 20;
pub(crate) const CLUSTER_BYTES: u64 = 2 * PART_BYTES;
pub(crate) const EXTRA_BYTES: u64 = 4096;
/// Threads that run at the same time.
pub(crate) const CONTEXTS_MAX: u32 = 256;
const CLUSTERS_AT: u64 = Cache::TABLE_BYTES;
pub(crate) const CONTEXTS_AT: u64 = CLUSTERS_AT + CLUSTERS_MAX * CLUSTER_BYTES;
pub(crate) const CONTEXTS_BYTES: u64 = CONTEXTS_MAX as u64 * layout::BYTES;
/// For bursts: a header, the code inside the program, and the points of faults.
pub(crate) const HEADER_AT: u64 = CONTEXTS_AT + CONTEXTS_BYTES;
pub(crate) const HEADER_BYTES: u64 = 4096;
pub(crate) const INSIDE_AT: u64 = HEADER_AT + HEADER_BYTES;
pub(crate) const INSIDE_BYTES: u64 = 8192;
pub(crate) const POINTS_AT: u64 = INSIDE_AT + INSIDE_BYTES;
pub(crate) const CLUSTER_POINTS_BYTES: u64 = 16 << 20;
pub(crate) const POINTS_BYTES: u64 = CLUSTERS_MAX * CLUSTER_POINTS_BYTES;
const BYTES: u64 = POINTS_AT + POINTS_BYTES;

/// A memory file, where the host has mapped it, and where the program has.
#[derive(Debug)]
pub(crate) struct Region {
    file: File,
    host: MmapRaw,
    /// Ranges of the program, and their offsets in the file.
    parts: Vec<(Range<u64>, u64)>,
}

impl Region {
    pub(crate) fn new() -> io::Result<Self> {
        let file = File::from(memfd_create(NAME, MFdFlags::MFD_CLOEXEC)?);
        file.set_len(BYTES)?;
        let length = usize::try_from(BYTES).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let host = MmapOptions::new().len(length).map_raw(&file)?;
        Ok(Self { file, host, parts: Vec::new() })
    }

    /// A copy for a process that has just been forked, with the same places.
    pub(crate) fn copy(&self, used: &[Range<u64>]) -> io::Result<Self> {
        let mut copy = Self::new()?;
        copy.parts.clone_from(&self.parts);
        for range in used {
            let mut bytes = vec![0; usize::try_from(range.end - range.start).unwrap_or(0)];
            self.read(range.start, &mut bytes);
            copy.write(range.start, &bytes);
        }
        Ok(copy)
    }

    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The inode of the file.
    pub(crate) fn inode(&self) -> io::Result<u64> {
        self.file.metadata().map(|file| file.ino())
    }

    /// Notes where the program has mapped a part of the file.
    pub(crate) fn add_part(&mut self, at: u64, bytes: u64, offset: u64) {
        self.parts.push((at..at + bytes, offset));
    }

    pub(crate) fn parts(&self) -> &[(Range<u64>, u64)] {
        &self.parts
    }

    /// Offset in the file of a cluster, and the cluster at an address of the program.
    pub(crate) fn cluster(number: u64, at: u64) -> (u64, Cluster) {
        let middle = at + PART_BYTES;
        let cluster = Cluster { hot: at..middle, cold: middle..Self::extra_at(at) };
        (CLUSTERS_AT + number * CLUSTER_BYTES, cluster)
    }

    /// Where the cluster at an address has room for code that is not of the cache.
    pub(crate) fn extra_at(at: u64) -> u64 {
        at + CLUSTER_BYTES - EXTRA_BYTES
    }

    /// The host's address of memory of the program. `None` if it is not in one part.
    fn find(&self, at: u64, bytes: usize) -> Option<*mut u8> {
        let bytes = u64::try_from(bytes).ok()?;
        let (range, offset) = self.parts.iter().find(|(range, _)| range.contains(&at))?;
        if at.checked_add(bytes)? > range.end {
            return None;
        }
        let offset = usize::try_from(offset + (at - range.start)).ok()?;
        Some(self.host.as_mut_ptr().wrapping_add(offset))
    }

    pub(crate) fn read(&self, at: u64, bytes: &mut [u8]) {
        let Some(from) = self.find(at, bytes.len()) else { return };
        // SAFETY: `find` checked that the memory is within the mapping, which lives as long as
        // `self`. The program may write it at the same time; any bytes are valid.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
    }

    /// A word of the program; 0 if it is not in the region.
    pub(crate) fn word(&self, at: u64) -> u64 {
        self.atomic(at).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    /// Some words of the program; none if they are not in the region.
    pub(crate) fn words(&self, at: u64, count: usize) -> Vec<u64> {
        let bytes = count.saturating_mul(8);
        let Some(from) = self.find(at, bytes).filter(|at| at.addr() % 8 == 0) else {
            return Vec::new();
        };
        let mut words = vec![0; count];
        // SAFETY: `find` checked that the memory is within the mapping, which lives as long as
        // `self`. The program may write it at the same time; any bytes are valid.
        unsafe { std::ptr::copy_nonoverlapping(from, words.as_mut_ptr().cast(), bytes) };
        words
    }

    pub(crate) fn set_word(&self, at: u64, value: u64) {
        if let Some(word) = self.atomic(at) {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// Sets some words of the program to the same value.
    pub(crate) fn fill(&self, at: u64, value: u64, count: u32) {
        let Ok(length) = usize::try_from(count) else { return };
        let Some(to) = self.find(at, length.saturating_mul(8)) else { return };
        for word in 0..length {
            // SAFETY: `find` checked the range. No thread uses these words yet.
            unsafe { to.cast::<u64>().wrapping_add(word).write_unaligned(value) };
        }
    }

    /// Replaces a word of the program if it is the expected one. Returns whether it was.
    pub(crate) fn replace_word(&self, at: u64, expected: u64, value: u64) -> bool {
        let (taken, other) = (Ordering::AcqRel, Ordering::Relaxed);
        self.atomic(at)
            .is_some_and(|word| word.compare_exchange(expected, value, taken, other).is_ok())
    }

    fn atomic(&self, at: u64) -> Option<&AtomicU64> {
        let at = self.find(at, 8).filter(|at| at.addr() % 8 == 0)?;
        // SAFETY: `find` checked the range, the filter checked the alignment, and the mapping lives
        // as long as `self`.
        Some(unsafe { AtomicU64::from_ptr(at.cast()) })
    }
}

impl CodeMemory for Region {
    fn write(&mut self, at: u64, bytes: &[u8]) {
        let Some(to) = self.find(at, bytes.len()) else { return };
        match *bytes {
            [a, b, c, d] if to.addr() % 4 == 0 => {
                // SAFETY: `find` checked the range, the guard the alignment.
                let word = unsafe { AtomicU32::from_ptr(to.cast()) };
                // Whatever the jump leads to is written before.
                word.store(u32::from_le_bytes([a, b, c, d]), Ordering::Release);
            }
            [a, b, c, d, e, f, g, h] if to.addr() % 8 == 0 => {
                // SAFETY: as above.
                let word = unsafe { AtomicU64::from_ptr(to.cast()) };
                word.store(u64::from_le_bytes([a, b, c, d, e, f, g, h]), Ordering::Release);
            }
            _ => {
                // SAFETY: `find` checked the range. No thread executes these bytes yet.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
            }
        }
    }
}
