//! The calls of bpf(2) that a reader of pinned maps needs. Loading and attaching is the
//! business of `elfen-kernel`.
//!
//! Three small structures instead of a library: this runs in other people's processes.

use core::ffi::{CStr, c_int};
use core::mem::{size_of, zeroed};

use crate::memory::{Access, Memory, MemoryError};

const BPF_OBJ_GET: c_int = 7;
const BPF_OBJ_GET_INFO_BY_FD: c_int = 15;

/// A file descriptor that is ours to close.
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
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // Not the C library's close, which is a cancellation point: checks open
        // descriptors in any thread.
        // SAFETY: ours by the contract of `from_raw`.
        unsafe { libc::syscall(libc::SYS_close, self.0) };
    }
}

/// `union bpf_attr` as BPF_OBJ_GET reads it.
#[repr(C)]
struct ObjectGet {
    pathname: u64,
    bpf_fd: u32,
    file_flags: u32,
}

/// `union bpf_attr` as BPF_OBJ_GET_INFO_BY_FD reads it.
#[repr(C)]
struct InfoByFd {
    bpf_fd: u32,
    info_len: u32,
    info: u64,
}

/// The first fields of `struct bpf_map_info`; the kernel fills as much as it is given room for.
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
    // SAFETY: `attribute` is the start of a bpf_attr, ours, and of the size that is passed along;
    // every pointer in it was set by the callers below from references that outlive the call.
    let result = unsafe {
        libc::syscall(libc::SYS_bpf, command, core::ptr::from_mut(attribute), size_of::<T>())
    };
    match c_int::try_from(result) {
        Ok(result) if result >= 0 => Ok(result),
        _ => Err(MemoryError::last()),
    }
}

/// Opens a pinned object for reading and writing.
pub fn object_get(path: &CStr) -> Result<Descriptor, MemoryError> {
    let mut attribute =
        ObjectGet { pathname: path.as_ptr().addr() as u64, bpf_fd: 0, file_flags: 0 };
    // bpf(2) sets close-on-exec on every descriptor it returns.
    let fd = call(BPF_OBJ_GET, &mut attribute)?;
    // SAFETY: the kernel has just given us this descriptor.
    Ok(unsafe { Descriptor::from_raw(fd) })
}

/// Maps the whole of an array map whose values are `value_bytes` long.
pub fn map_array(
    fd: &Descriptor,
    value_bytes: usize,
    access: Access,
) -> Result<Memory, MemoryError> {
    // SAFETY: an all-zero MapInfo is a valid value of that plain structure.
    let mut info: MapInfo = unsafe { zeroed() };
    let mut attribute = InfoByFd {
        bpf_fd: fd.raw().unsigned_abs(),
        info_len: MAP_INFO_BYTES,
        info: core::ptr::from_mut(&mut info).expose_provenance() as u64,
    };
    // Fails on anything that is not an eBPF object.
    call(BPF_OBJ_GET_INFO_BY_FD, &mut attribute)?;
    if info.kind != BPF_MAP_TYPE_ARRAY || info.value_size as usize != value_bytes {
        return Err(MemoryError::Size);
    }
    let len = value_bytes * info.max_entries as usize;
    // SAFETY: the kernel has just described the descriptor as an array map.
    unsafe { Memory::map_bpf(fd.raw(), len, access) }
}
