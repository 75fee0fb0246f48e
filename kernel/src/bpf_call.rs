//! The commands of bpf(2) that aya lacks: freezing a map, attaching without an owner object, and
//! finding the links of other processes. They return plain descriptors, whose lifetime the kernel
//! manages.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

const BPF_MAP_LOOKUP_ELEM: c_int = 1;
const BPF_MAP_UPDATE_ELEM: c_int = 2;
const BPF_MAP_GET_FD_BY_ID: c_int = 14;
const BPF_OBJ_GET_INFO_BY_FD: c_int = 15;
const BPF_RAW_TRACEPOINT_OPEN: c_int = 17;
const BPF_MAP_FREEZE: c_int = 22;
const BPF_LINK_GET_FD_BY_ID: c_int = 30;
const BPF_LINK_GET_NEXT_ID: c_int = 31;

/// The part of `union bpf_attr` that a command reads. The kernel pads a shorter one with zeroes.
#[repr(C)]
#[derive(Default)]
struct Element {
    map_fd: u32,
    _pad: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
#[derive(Default)]
struct ById {
    id: u32,
    next_id: u32,
    open_flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct RawTracepoint {
    name: u64,
    prog_fd: u32,
    _pad: u32,
}

#[repr(C)]
#[derive(Default)]
struct InfoByFd {
    bpf_fd: u32,
    info_len: u32,
    info: u64,
}

/// The first fields of `struct bpf_link_info`.
#[repr(C)]
#[derive(Default)]
pub(crate) struct LinkInfo {
    pub(crate) kind: u32,
    pub(crate) id: u32,
    pub(crate) program: u32,
}

/// Makes a call. The result of a command that succeeds is 0 or a descriptor.
fn call<T>(command: c_int, attribute: &mut T) -> io::Result<c_int> {
    let size = size_of::<T>();
    // SAFETY: `attribute` is the start of a bpf_attr, and its size is passed along. The functions
    // below took the addresses in it from references that outlive this call.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attribute), size) };
    match c_int::try_from(result) {
        Ok(result) if result >= 0 => Ok(result),
        _ => Err(io::Error::last_os_error()),
    }
}

fn call_for_descriptor<T>(command: c_int, attribute: &mut T) -> io::Result<OwnedFd> {
    let fd = call(command, attribute)?;
    // SAFETY: the command succeeded, so the kernel has just opened this descriptor, close-on-exec,
    // and no other code knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn number(fd: BorrowedFd<'_>) -> u32 {
    fd.as_raw_fd().unsigned_abs()
}

fn address<T: ?Sized>(of: &T) -> u64 {
    std::ptr::from_ref(of).cast::<u8>().expose_provenance() as u64
}

/// Replaces one value of an array. `value` is as long as the map's values are.
pub(crate) fn update_element(map: BorrowedFd<'_>, key: u32, value: &[u64]) -> io::Result<()> {
    let mut attribute = Element {
        map_fd: number(map),
        key: address(&key),
        value: address(value),
        ..Element::default()
    };
    call(BPF_MAP_UPDATE_ELEM, &mut attribute).map(drop)
}

/// Copies one value of an array. `value` is as long as the map's values are.
pub(crate) fn look_up_element(map: BorrowedFd<'_>, key: u32, value: &mut [u64]) -> io::Result<()> {
    let mut attribute = Element {
        map_fd: number(map),
        key: address(&key),
        value: value.as_mut_ptr().expose_provenance() as u64,
        ..Element::default()
    };
    call(BPF_MAP_LOOKUP_ELEM, &mut attribute).map(drop)
}

/// Puts a perf event into an array of events.
pub(crate) fn put_event(map: BorrowedFd<'_>, cpu: u32, event: BorrowedFd<'_>) -> io::Result<()> {
    let event = number(event);
    let mut attribute = Element {
        map_fd: number(map),
        key: address(&cpu),
        value: address(&event),
        ..Element::default()
    };
    call(BPF_MAP_UPDATE_ELEM, &mut attribute).map(drop)
}

/// Freezes a map: no process can write it any more, by a call or a mapping. eBPF programs still
/// can.
pub(crate) fn freeze(map: BorrowedFd<'_>) -> io::Result<()> {
    let mut attribute = number(map);
    call(BPF_MAP_FREEZE, &mut attribute).map(drop)
}

/// Attaches a loaded tp_btf program. It stays attached as long as any process holds the link.
pub(crate) fn attach(program: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut attribute = RawTracepoint { prog_fd: number(program), ..RawTracepoint::default() };
    call_for_descriptor(BPF_RAW_TRACEPOINT_OPEN, &mut attribute)
}

pub(crate) fn map_by_id(id: u32) -> io::Result<OwnedFd> {
    call_for_descriptor(BPF_MAP_GET_FD_BY_ID, &mut ById { id, ..ById::default() })
}

/// How often a link is requested again while the kernel is still making it.
const BEING_MADE_TRIES: u32 = 1000;

/// All links of the machine, except links that end meanwhile. Needs CAP_SYS_ADMIN.
pub(crate) fn links() -> impl Iterator<Item = io::Result<(OwnedFd, LinkInfo)>> {
    let mut last = Some(0);
    let mut patience = BEING_MADE_TRIES;
    std::iter::from_fn(move || {
        loop {
            let mut attribute = ById { id: last?, ..ById::default() };
            match call(BPF_LINK_GET_NEXT_ID, &mut attribute) {
                Ok(_) => last = Some(attribute.next_id),
                Err(error) => {
                    last = None;
                    return (error.raw_os_error() != Some(libc::ENOENT)).then_some(Err(error));
                }
            }
            let mut by_id = ById { id: attribute.next_id, ..ById::default() };
            match call_for_descriptor(BPF_LINK_GET_FD_BY_ID, &mut by_id) {
                Ok(link) => return Some(link_info(link.as_fd()).map(|info| (link, info))),
                // The link ended between the two calls.
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
                // Another process is making the link, so it is requested again. A link that is
                // never finished is left out.
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {
                    if patience > 0 {
                        patience -= 1;
                        last = Some(attribute.next_id.saturating_sub(1));
                        std::thread::yield_now();
                    }
                }
                Err(error) => {
                    last = None;
                    return Some(Err(error));
                }
            }
        }
    })
}

pub(crate) fn link_info(link: BorrowedFd<'_>) -> io::Result<LinkInfo> {
    let mut info = LinkInfo::default();
    let mut attribute = InfoByFd {
        bpf_fd: number(link),
        info_len: u32::try_from(size_of::<LinkInfo>()).unwrap_or(0),
        info: std::ptr::from_mut(&mut info).expose_provenance() as u64,
    };
    call(BPF_OBJ_GET_INFO_BY_FD, &mut attribute)?;
    Ok(info)
}

/// How often a program was skipped because it was already running on the same CPU.
pub(crate) fn recursion_misses(program: BorrowedFd<'_>) -> io::Result<u64> {
    /// The index of `recursion_misses` in `struct bpf_prog_info`, since Linux 5.12.
    const WORD: usize = 26;
    let mut info = [0_u64; WORD + 1];
    let mut attribute = InfoByFd {
        bpf_fd: number(program),
        info_len: u32::try_from(size_of_val(&info)).unwrap_or(0),
        info: info.as_mut_ptr().expose_provenance() as u64,
    };
    call(BPF_OBJ_GET_INFO_BY_FD, &mut attribute)?;
    Ok(info[WORD])
}
