//! Gives another process one of our descriptors, by a pair of sockets that system calls in its name
//! create. It cannot open ours by a path: it may belong to another user, or be in a container.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use super::memory::Memory;

/// Bytes of its memory that the calls need.
pub const ROOM_BYTES: usize = 160;

/// Where each part lies in that memory.
const PAIR: u64 = 0;
const MESSAGE: u64 = 16;
const PART: u64 = 80;
const BYTE: u64 = 96;
const CONTROL: u64 = 112;
/// A header and one descriptor, with what aligns it.
const CONTROL_BYTES: usize = 24;

/// Gives `process` the descriptor, and returns its number there. `call` makes system calls in its
/// name, and `room` is an address with [`ROOM_BYTES`] that it does not use meanwhile.
pub fn give<E>(
    process: u32,
    memory: &Memory,
    room: u64,
    descriptor: BorrowedFd<'_>,
    call: impl Fn(&'static str, i64, [u64; 6]) -> Result<u64, E>,
    fail: impl Fn(&'static str, io::Error) -> E,
) -> Result<u64, E> {
    let family = u64::from(libc::AF_UNIX.unsigned_abs());
    let kind = u64::from((libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC).unsigned_abs());
    call("socketpair", libc::SYS_socketpair, [family, kind, 0, room + PAIR, 0, 0])?;
    let number = |at| -> io::Result<u64> {
        let bytes = memory.read_vec(at, 4)?;
        bytes.try_into().map(|bytes| u32::from_ne_bytes(bytes).into()).map_err(|_| invalid())
    };
    let [ours, its] = [number(room + PAIR), number(room + PAIR + 4)];
    let [ours, its] = [ours, its].map(|read| read.map_err(|error| fail("its memory", error)));
    let [ours, its] = [ours?, its?];
    let sent = take(process, ours)
        .and_then(|socket| send(&socket, descriptor))
        .map_err(|error| fail("a socket to it", error));
    let received = sent.and_then(|()| {
        let flags = u64::from(libc::MSG_CMSG_CLOEXEC.unsigned_abs());
        memory.write(room + MESSAGE, &message(room)).map_err(|error| fail("its memory", error))?;
        call("recvmsg", libc::SYS_recvmsg, [its, room + MESSAGE, flags, 0, 0, 0])?;
        let got = memory.read_vec(room + CONTROL, CONTROL_BYTES);
        let got = got.map_err(|error| fail("its memory", error))?;
        // If it may have no more descriptors, the byte comes without one.
        match got.strip_prefix(&control_header()).and_then(|rest| rest.first_chunk()) {
            Some(number) => Ok(u32::from_ne_bytes(*number).into()),
            None => Err(fail("recvmsg", io::Error::from_raw_os_error(libc::EMFILE))),
        }
    });
    for end in [ours, its] {
        call("close", libc::SYS_close, [end, 0, 0, 0, 0, 0])?;
    }
    received
}

fn invalid() -> io::Error {
    io::ErrorKind::InvalidData.into()
}

/// A duplicate of a descriptor of another process.
fn take(process: u32, number: u64) -> io::Result<OwnedFd> {
    let owned = |fd: libc::c_long| match i32::try_from(fd) {
        // SAFETY: the kernel has just created this descriptor for us.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    };
    // SAFETY: takes numbers.
    let process = owned(unsafe { libc::syscall(libc::SYS_pidfd_open, process, 0) })?;
    // SAFETY: takes numbers.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), number, 0) })
}

/// Sends a byte with a descriptor.
fn send(socket: &OwnedFd, descriptor: BorrowedFd<'_>) -> io::Result<()> {
    #[repr(align(8))]
    struct Control([u8; CONTROL_BYTES]);
    let mut control = Control([0; CONTROL_BYTES]);
    let (head, number) = control.0.split_at_mut(size_of::<libc::cmsghdr>());
    head.copy_from_slice(&control_header());
    number[..4].copy_from_slice(&descriptor.as_raw_fd().to_ne_bytes());
    let mut byte = 0_u8;
    let mut part = libc::iovec { iov_base: ptr::from_mut(&mut byte).cast(), iov_len: 1 };
    // SAFETY: plain fields, all of which may be 0.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = CONTROL_BYTES;
    // SAFETY: the message and all that it points to are local variables.
    match unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) } {
        1 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// `struct cmsghdr` of a message with one descriptor.
fn control_header() -> [u8; 16] {
    let mut bytes = [0; 16];
    let length = size_of::<libc::cmsghdr>() as u64 + 4;
    bytes[..8].copy_from_slice(&length.to_ne_bytes());
    bytes[8..12].copy_from_slice(&libc::SOL_SOCKET.to_ne_bytes());
    bytes[12..].copy_from_slice(&libc::SCM_RIGHTS.to_ne_bytes());
    bytes
}

/// `struct msghdr` and `struct iovec` in the memory of the receiver, and what is behind them.
fn message(room: u64) -> Vec<u8> {
    let message = [0, 0, room + PART, 1, room + CONTROL, CONTROL_BYTES as u64, 0];
    let mut words = message.to_vec();
    words.resize(usize::try_from((PART - MESSAGE) / 8).unwrap_or(0), 0);
    words.extend([room + BYTE, 1]);
    // No header of a message, unless the kernel writes one.
    words.resize((ROOM_BYTES - usize::try_from(MESSAGE).unwrap_or(0)) / 8, 0);
    words.into_iter().flat_map(u64::to_ne_bytes).collect()
}
