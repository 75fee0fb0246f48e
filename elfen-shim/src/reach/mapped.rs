//! Memory that a process shares anyway: mapped by us as well, read-only.
//!
//! A file can be cut while it is mapped, and who reads behind its new end gets SIGBUS. Then a page
//! of zeroes takes the place, the loop goes on, and the recording says what happened.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use elfen_instrument::remote::Mapping;
use elfen_rt::memory::{Access, Memory};

use super::place::Unreached;

const PAGE: u64 = 4096;

/// The word that lies `offset` bytes into a mapping of a process; `None` if this kind of mapping
/// cannot be had by another.
pub(super) fn word(
    process: u32,
    mapping: &Mapping,
    offset: u64,
) -> Result<Option<&'static AtomicU64>, Unreached> {
    if mapping.name.starts_with("/SYSV") {
        let id = mapping.file.as_ref().and_then(|(_, inode)| i32::try_from(*inode).ok());
        let Some(id) = id else { return Ok(None) };
        let Ok(memory) = Memory::attach_id(id, Access::Read) else { return Ok(None) };
        let at = usize::try_from((mapping.offset + offset) & !7).unwrap_or(usize::MAX);
        if at.saturating_add(8) > memory.len() {
            return Err(Unreached::Failed("the segment ends before that".to_owned()));
        }
        let memory: &'static Memory = Box::leak(Box::new(memory));
        // SAFETY: inside of the segment by the line above.
        let word = unsafe { memory.base().add(at) }.cast::<AtomicU64>();
        // SAFETY: aligned to 8, mapped for good, and any bytes are a value.
        return Ok(Some(unsafe { word.as_ref() }));
    }
    let path =
        format!("/proc/{process}/map_files/{:x}-{:x}", mapping.range.start, mapping.range.end);
    match File::open(path) {
        Ok(file) => file_word(&file, mapping.offset + offset).map(Some),
        // Not for this user, or no file behind it: then it is read.
        Err(_) => Ok(None),
    }
}

/// The word at an offset of a file.
pub(super) fn file_word(file: &File, offset: u64) -> Result<&'static AtomicU64, Unreached> {
    let length = file.metadata()?.len();
    if offset & !7 > length.saturating_sub(8) || length < 8 {
        return Err(Unreached::Failed(format!("the file ends at byte {length}, before that")));
    }
    heed_cut_files();
    let from = i64::try_from(offset & !(PAGE - 1)).map_err(io::Error::other)?;
    // SAFETY: the kernel chooses the address, so no mapping of ours is replaced.
    let base = unsafe {
        let page = usize::try_from(PAGE).unwrap_or(4096);
        libc::mmap(ptr::null_mut(), page, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), from)
    };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error().into());
    }
    let within = usize::try_from((offset % PAGE) & !7).unwrap_or(0);
    // SAFETY: inside of the page that was just mapped.
    let word = unsafe { base.byte_add(within) }.cast::<AtomicU64>();
    // SAFETY: aligned to 8, mapped for good, and any bytes are a value.
    Ok(unsafe { &*word })
}

static CUT: AtomicBool = AtomicBool::new(false);

/// Whether a file was cut under a reader.
#[derive(Debug)]
pub struct CutFile;

impl CutFile {
    pub fn was_seen() -> bool {
        CUT.load(Relaxed)
    }
}

fn heed_cut_files() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: an all-zero sigaction is a valid value of that plain C structure.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = cut as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        // SAFETY: the handler has the type that SA_SIGINFO asks for, and makes one system call.
        unsafe { libc::sigaction(libc::SIGBUS, &action, ptr::null_mut()) };
    });
}

/// Puts a page of zeroes where the file has none any more.
extern "C" fn cut(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    CUT.store(true, Relaxed);
    // SAFETY: the kernel hands a handler its description of the fault.
    let info = unsafe { &*info };
    // SAFETY: it is that of a SIGBUS, which has an address.
    let at = unsafe { info.si_addr() };
    let page = at.map_addr(|at| at & !4095);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: only mappings of files of others fault so, and this replaces the page that did.
    let mapped = unsafe { libc::mmap(page, 4096, libc::PROT_READ, flags, -1, 0) };
    if mapped == libc::MAP_FAILED {
        // SAFETY: ends this process, which could only fault again.
        unsafe { libc::_exit(1) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a file that is cut under its reader ends nobody. Method: one of two pages, cut.
    #[test]
    fn a_file_that_is_cut_reads_as_zeroes() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &7_u64.to_le_bytes(), 4096 + 16).unwrap();
        let word = file_word(&file, 4096 + 16).unwrap();
        assert_eq!((word.load(Relaxed), CutFile::was_seen()), (7, false));
        file.set_len(4096).unwrap();
        assert_eq!((word.load(Relaxed), CutFile::was_seen()), (0, true));
        assert!(file_word(&file, 4096).is_err());
    }
}
