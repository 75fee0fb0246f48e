//! The bpf(2) calls for readers of maps. `elfen-kernel` loads and attaches programs.
//!
//! This code runs in other people's processes, so it has three small structures instead of a
//! library. Containers refuse bpf(2); there `/proc` describes the descriptor.

use core::ffi::c_int;
use core::mem::{size_of, zeroed};

use crate::memory::{Access, Memory, MemoryError};
use crate::process::{NumberedPath, parse_u64, read_file};

const BPF_OBJ_GET_INFO_BY_FD: c_int = 15;

/// A file descriptor that this value owns and closes.
#[derive(Debug)]
pub struct Descriptor(c_int);

impl Descriptor {
    /// # Safety
    /// 1. `fd` is open, and no other code closes it.
    pub unsafe fn from_raw(fd: c_int) -> Self {
        Self(fd)
    }

    pub fn raw(&self) -> c_int {
        self.0
    }

    /// Moves the descriptor to a high number, out of the way of programs that rely on low numbers.
    pub(crate) fn moved_to_high_number(self) -> Self {
        const FROM: [c_int; 3] = [900, 200, 20];
        for from in FROM {
            // SAFETY: F_DUPFD_CLOEXEC takes numbers and changes no descriptor that is open.
            let copy = unsafe { libc::fcntl(self.0, libc::F_DUPFD_CLOEXEC, from) };
            if copy >= 0 {
                return Self(copy);
            }
        }
        self
    }
}

impl Drop for Descriptor {
    #[inline(never)]
    fn drop(&mut self) {
        // Not the C library's close, which is a cancellation point: checks open descriptors in any
        // thread.
        // SAFETY: the caller of `from_raw` ensured that no other code closes the descriptor.
        unsafe { libc::syscall(libc::SYS_close, self.0) };
    }
}

/// `union bpf_attr` as BPF_OBJ_GET_INFO_BY_FD reads it.
#[repr(C)]
struct InfoByFd {
    bpf_fd: u32,
    info_len: u32,
    info: u64,
}

/// The first fields of `struct bpf_map_info`. The kernel fills as many as there is room for.
#[repr(C)]
struct MapInfo {
    kind: u32,
    id: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    map_flags: u32,
}

const MAP_INFO_BYTES: u32 = 24;
const _: () = assert!(size_of::<MapInfo>() == MAP_INFO_BYTES as usize);

const BPF_MAP_TYPE_ARRAY: u32 = 2;

fn call<T>(command: c_int, attribute: &mut T) -> Result<c_int, MemoryError> {
    // SAFETY: `attribute` is the start of a bpf_attr, belongs to this process, and has the size
    // that is passed. The callers below set every pointer in it from references that outlive the
    // call.
    let result = unsafe {
        libc::syscall(libc::SYS_bpf, command, core::ptr::from_mut(attribute), size_of::<T>())
    };
    match c_int::try_from(result) {
        Ok(result) if result >= 0 => Ok(result),
        _ => Err(MemoryError::last()),
    }
}

/// Maps the whole of an array map whose values are `value_bytes` long.
pub fn map_array(
    fd: &Descriptor,
    value_bytes: usize,
    access: Access,
) -> Result<Memory, MemoryError> {
    let info = map_info(fd)?;
    if info.kind != BPF_MAP_TYPE_ARRAY || info.value_size as usize != value_bytes {
        return Err(MemoryError::Size);
    }
    let len = value_bytes.checked_mul(info.max_entries as usize).ok_or(MemoryError::Size)?;
    // SAFETY: the kernel has just described the descriptor as an array map of this length.
    unsafe { Memory::map_descriptor(fd.raw(), len, access) }
}

/// Fails on anything that is not an eBPF map.
fn map_info(fd: &Descriptor) -> Result<MapInfo, MemoryError> {
    // SAFETY: an all-zero MapInfo is a valid value of that plain structure.
    let mut info: MapInfo = unsafe { zeroed() };
    let mut attribute = InfoByFd {
        bpf_fd: fd.raw().unsigned_abs(),
        info_len: MAP_INFO_BYTES,
        info: core::ptr::from_mut(&mut info).expose_provenance() as u64,
    };
    match call(BPF_OBJ_GET_INFO_BY_FD, &mut attribute) {
        Ok(_) => Ok(info),
        // bpf(2) is refused to this process or its container, whatever the descriptor is.
        Err(MemoryError::Denied | MemoryError::Other(libc::ENOSYS)) => {
            info_from_proc(fd).ok_or(MemoryError::Denied)
        }
        Err(error) => Err(error),
    }
}

/// Reads the map's properties from `/proc/self/fdinfo`, which has these lines only for maps.
fn info_from_proc(fd: &Descriptor) -> Option<MapInfo> {
    let path = NumberedPath::of(b"/proc/self/fdinfo/", fd.raw(), b"");
    let mut text = [0; 640];
    parse_fdinfo(read_file(path.as_c_str(), &mut text)?)
}

fn parse_fdinfo(text: &[u8]) -> Option<MapInfo> {
    let line = |name: &[u8]| {
        let mut lines = text.split(|&byte| byte == b'\n');
        let number = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(b":\t"))?;
        u32::try_from(parse_u64(number)?).ok()
    };
    Some(MapInfo {
        kind: line(b"map_type")?,
        id: 0,
        key_size: line(b"key_size")?,
        value_size: line(b"value_size")?,
        max_entries: line(b"max_entries")?,
        map_flags: 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a map is recognized in `/proc`, and nothing else is mistaken for one. Method: the
    /// lines of an array of 133 values and of an open file, and incomplete lines of the array.
    #[test]
    fn proc_describes_a_map() {
        let map = "pos:\t0\nflags:\t02000002\nmnt_id:\t15\nino:\t1057\nmap_type:\t2\n\
                   key_size:\t4\nvalue_size:\t128\nmax_entries:\t133\nmap_flags:\t0x400\n";
        let info = parse_fdinfo(map.as_bytes()).unwrap();
        assert_eq!((info.kind, info.value_size, info.max_entries), (2, 128, 133));
        for other in ["", "pos:\t0\nflags:\t0100000\n", &map[..60], &map.replace(":\t", ": ")] {
            assert!(parse_fdinfo(other.as_bytes()).is_none(), "{other:?}");
        }
        // SAFETY: dup takes a number.
        let copy = unsafe { libc::dup(2) };
        // SAFETY: dup has just made this descriptor, and no other code knows it.
        let file = unsafe { Descriptor::from_raw(copy) };
        assert!(info_from_proc(&file).is_none() && map_array(&file, 128, Access::Read).is_err());
    }
}
