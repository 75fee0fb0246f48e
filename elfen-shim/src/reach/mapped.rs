//! Maps memory that the observed process shares, read-only.
//!
//! If a mapped file is truncated, a load beyond its new end raises SIGBUS. The handler then maps a
//! page of zeroes, the sampling loop continues, and the recording reports the truncation.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use elfen_instrument::remote::Mapping;
use elfen_rt::memory::{Access, Memory};

use super::location::ReachError;

const PAGE: u64 = 4096;

/// Maps the word at `offset` of a process's mapping. Returns `None` if another process cannot map
/// this kind of mapping.
pub(super) fn map_word(
    process: u32,
    mapping: &Mapping,
    offset: u64,
) -> Result<Option<&'static AtomicU64>, ReachError> {
    if mapping.name.starts_with("/SYSV") {
        let id = mapping.file.as_ref().and_then(|(_, inode)| i32::try_from(*inode).ok());
        let Some(id) = id else { return Ok(None) };
        let Ok(memory) = Memory::attach_id(id, Access::Read) else { return Ok(None) };
        let at = usize::try_from((mapping.offset + offset) & !7).unwrap_or(usize::MAX);
        if at.saturating_add(8) > memory.len() {
            return Err(ReachError::Failed("the segment ends before that address".to_owned()));
        }
        let memory: &'static Memory = Box::leak(Box::new(memory));
        // SAFETY: the check above keeps these eight bytes within the segment.
        let word = unsafe { memory.base().add(at) }.cast::<AtomicU64>();
        // SAFETY: `at` is a multiple of 8, the leaked segment stays mapped, and all bytes are
        // valid.
        return Ok(Some(unsafe { word.as_ref() }));
    }
    let path =
        format!("/proc/{process}/map_files/{:x}-{:x}", mapping.range.start, mapping.range.end);
    match File::open(path) {
        Ok(file) => map_file_word(&file, mapping.offset + offset).map(Some),
        // This user may not open the mapping, or it has no file. The caller reads it with a system
        // call.
        Err(_) => Ok(None),
    }
}

/// Maps the word at an offset of a file.
pub(super) fn map_file_word(file: &File, offset: u64) -> Result<&'static AtomicU64, ReachError> {
    let length = file.metadata()?.len();
    if offset & !7 > length.saturating_sub(8) || length < 8 {
        return Err(ReachError::Failed(format!(
            "the file ends at byte {length}, before byte {offset}"
        )));
    }
    handle_truncated_files();
    let from = i64::try_from(offset & !(PAGE - 1)).map_err(io::Error::other)?;
    // SAFETY: the kernel chooses a free address, so no existing mapping is replaced.
    let base = unsafe {
        let page = usize::try_from(PAGE).unwrap_or(4096);
        libc::mmap(ptr::null_mut(), page, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), from)
    };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error().into());
    }
    let within = usize::try_from((offset % PAGE) & !7).unwrap_or(0);
    // SAFETY: `within` is less than the size of the page that was just mapped.
    let word = unsafe { base.byte_add(within) }.cast::<AtomicU64>();
    // SAFETY: `within` is a multiple of 8, the page is never unmapped, and all bytes are valid.
    Ok(unsafe { &*word })
}

static CUT: AtomicBool = AtomicBool::new(false);

/// Returns whether a mapped file was truncated.
pub fn saw_truncated_file() -> bool {
    CUT.load(Relaxed)
}

fn handle_truncated_files() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: zero bytes are a valid sigaction, a plain C structure.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = map_zeroes as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        // SAFETY: the handler has the type that SA_SIGINFO requires, and makes only system calls.
        unsafe { libc::sigaction(libc::SIGBUS, &action, ptr::null_mut()) };
    });
}

/// Maps a page of zeroes in place of a page that the file no longer has.
extern "C" fn map_zeroes(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    CUT.store(true, Relaxed);
    // SAFETY: the kernel passes its description of the fault to a SA_SIGINFO handler.
    let info = unsafe { &*info };
    // SAFETY: the signal is SIGBUS, whose description has an address.
    let at = unsafe { info.si_addr() };
    let page = at.map_addr(|at| at & !4095);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: only mappings of other processes' files raise SIGBUS, and this replaces the faulting
    // page of such a mapping.
    let mapped = unsafe { libc::mmap(page, 4096, libc::PROT_READ, flags, -1, 0) };
    if mapped == libc::MAP_FAILED {
        // SAFETY: ends this process, because the load would fault again forever.
        unsafe { libc::_exit(1) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: truncating a mapped file does not end its reader. Method: a file of two pages,
    /// truncated to one.
    #[test]
    fn a_truncated_file_reads_as_zeroes() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &7_u64.to_le_bytes(), 4096 + 16).unwrap();
        let word = map_file_word(&file, 4096 + 16).unwrap();
        assert_eq!((word.load(Relaxed), saw_truncated_file()), (7, false));
        file.set_len(4096).unwrap();
        assert_eq!((word.load(Relaxed), saw_truncated_file()), (0, true));
        assert!(map_file_word(&file, 4096).is_err());
    }
}
