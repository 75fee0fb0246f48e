//! What elfend hands out over its socket: to a process in one of its fences the pages of its lanes,
//! to users whom it trusts the machine's task map.
//!
//! Ids of segments mean something in one IPC namespace, and paths in one file system; what comes
//! over a socket is mapped as it is, in a container too. One message asks and one answers. The
//! answer carries descriptors, for each service or lent pair the lane page and the control page,
//! then the task map and the link that keeps its writer attached. A page is known by its seals, so
//! the order is all that has to be agreed on. Whoever answers is believed as little as the writer
//! of a page: what is not sealed, or no map, is not mapped.
//!
//! Nobody waits here for long, and a process that gets nothing runs without checks: guards hold its
//! lane all the same.

use core::ffi::{CStr, c_int, c_long};
use core::mem::{offset_of, size_of, zeroed};
use core::sync::atomic::Ordering::Relaxed;

use crate::bpf::Descriptor;
use crate::clock::monotonic_ns;
use crate::memory::Access;
use crate::process::errno;
use crate::sealed;
use crate::signal::control::ControlSlot;
use crate::signal::lane::LaneSlot;
use crate::signal::page::Page;
use crate::signal::service::ServiceReader;
use crate::signal::task::{Descriptors, TaskMap, TaskMapError};

/// Where the socket is, and where it is otherwise.
pub const VARIABLE: &CStr = c"ELFEN_SOCKET";
pub const SOCKET: &[u8] = b"/run/elfen/elfend.sock";
/// What is asked, as elfend reads it.
pub const REQUEST: &[u8] = br#"{"do":"pages"}"#;
/// How the answer begins that carries pages; by the second, System V segments have the same ids for
/// the one who asks as for elfend, and the pages of services can be had as well.
pub const ANSWERS: [&[u8]; 2] =
    [br#"{"pages":{"services":false}}"#, br#"{"pages":{"services":true}}"#];
/// For the task map alone, with what has its CPUs timed: its map, the leases and the link.
pub const TASKS_REQUEST: &[u8] = br#"{"do":"tasks"}"#;
pub const TASKS_ANSWER: &[u8] = br#""tasks""#;
/// Services, and lent pairs without one, whose pages an answer has room for. On the lanes of others
/// there are guards alone.
pub const MOST: usize = 8;

/// Two descriptors each, and two of the task map.
const DESCRIPTORS: usize = 2 * MOST + 2;
/// A daemon that is busy answers within a fraction of that.
const PATIENCE_NS: u64 = 2_000_000_000;

/// The pages of lanes that have one policy.
#[derive(Debug)]
pub struct Pages {
    pub lanes: Page<LaneSlot>,
    pub control: Page<ControlSlot>,
    pub service: Option<ServiceReader>,
}

impl Pages {
    #[inline(never)]
    fn open(files: [Descriptor; 2], access: Access, with_services: bool) -> Option<Self> {
        let [lanes, control] = files;
        let lanes = Page::open(sealed::map(&lanes, access).ok()?).ok()?;
        let control: Page<ControlSlot> =
            Page::open(sealed::map(&control, Access::Read).ok()?).ok()?;
        let segment = control.slot(0)?.service_segment.load(Relaxed).checked_sub(1);
        let segment = segment.filter(|_| with_services).and_then(|id| c_int::try_from(id).ok());
        let service = segment.and_then(|id| ServiceReader::open_segment(id).ok());
        Some(Self { lanes, control, service })
    }
}

/// Those that there are. Once in the preload library: loops over few places are copied out.
#[inline(never)]
fn next<'a>(places: &mut core::slice::Iter<'a, Option<Pages>>) -> Option<&'a Pages> {
    places.find_map(Option::as_ref)
}

pub(crate) fn of(places: &[Option<Pages>; MOST]) -> impl Iterator<Item = &Pages> {
    let mut places = places.iter();
    core::iter::from_fn(move || next(&mut places))
}

/// What elfend has answered.
#[derive(Debug)]
pub struct Answer {
    pub pages: [Option<Pages>; MOST],
    pub tasks: Option<TaskMap>,
}

/// Asks behind the socket at `path`, and maps what comes; lane pages with this access. `None` if
/// nobody answers in time, or this process is not to have them.
pub fn ask(path: &[u8], access: Access) -> Option<Answer> {
    let end_ns = monotonic_ns().saturating_add(PATIENCE_NS);
    let socket = connect(path, end_ns)?;
    let (which, mut received) = exchange(&socket, REQUEST, &ANSWERS, end_ns)?;
    let with_services = which == 1;
    let mut answer = Answer { pages: [const { None }; MOST], tasks: None };
    for place in &mut answer.pages {
        let Some(lanes) = received.next() else { return Some(answer) };
        let control = received.next()?;
        if !sealed::is_sealed(&lanes) {
            answer.tasks = TaskMap::lent(lanes, control).ok();
            return Some(answer);
        }
        *place = Pages::open([lanes, control], access, with_services);
    }
    if let (Some(tasks), Some(link)) = (received.next(), received.next()) {
        answer.tasks = TaskMap::lent(tasks, link).ok();
    }
    Some(answer)
}

/// Why elfend's task map is not to be had.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TasksError {
    /// Nobody listens.
    Absent,
    /// This process is not to have it, or whoever listens has none.
    Refused,
    Map(TaskMapError),
}

/// Asks behind the socket at `path` for the machine's task map, to read and to have CPUs timed by.
pub fn tasks(path: &[u8]) -> Result<TaskMap, TasksError> {
    let end_ns = monotonic_ns().saturating_add(PATIENCE_NS);
    let socket = connect(path, end_ns).ok_or(TasksError::Absent)?;
    let answered = exchange(&socket, TASKS_REQUEST, &[TASKS_ANSWER], end_ns);
    let (_, mut received) = answered.ok_or(TasksError::Refused)?;
    let mut next = || received.next().ok_or(TasksError::Refused);
    let (tasks, watch, link) = (next()?, next()?, next()?);
    let descriptors = Descriptors { tasks, watch, claims: None, link };
    TaskMap::from_descriptors(descriptors).map_err(TasksError::Map)
}

/// Asks, and waits for one of the answers that are known: which, and all descriptors.
#[inline(never)]
fn exchange(
    socket: &Descriptor,
    request: &[u8],
    known: &[&[u8]],
    end_ns: u64,
) -> Option<(usize, Received)> {
    let flags = libc::MSG_NOSIGNAL;
    let sent = again(end_ns, || {
        let (at, nobody) = (request.as_ptr(), core::ptr::null::<u8>());
        // By the number and not by the C library's, here and below, which are cancellation points.
        // SAFETY: the kernel reads `request`, and no address.
        unsafe {
            libc::syscall(libc::SYS_sendto, socket.raw(), at, request.len(), flags, nobody, 0)
        }
    })?;
    if sent != request.len() {
        return None;
    }
    receive(socket, known, end_ns)
}

/// A path as the kernel takes it; `None` of one that is too long, or none.
pub fn address(path: &[u8]) -> Option<(libc::sockaddr_un, libc::socklen_t)> {
    // SAFETY: a sockaddr_un is numbers alone, for which zeros are valid.
    let mut address: libc::sockaddr_un = unsafe { zeroed() };
    address.sun_family = libc::sa_family_t::try_from(libc::AF_UNIX).ok()?;
    if path.is_empty() || path.len() >= address.sun_path.len() {
        return None;
    }
    for (to, from) in address.sun_path.iter_mut().zip(path) {
        *to = from.cast_signed();
    }
    let length = offset_of!(libc::sockaddr_un, sun_path) + path.len() + 1;
    Some((address, libc::socklen_t::try_from(length).ok()?))
}

fn connect(path: &[u8], end_ns: u64) -> Option<Descriptor> {
    let (address, length) = address(path)?;
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: socket takes numbers.
    let fd = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
    if fd < 0 {
        return None;
    }
    // SAFETY: the kernel has just given us this descriptor.
    let socket = unsafe { Descriptor::from_raw(fd) };
    let patience =
        libc::timeval { tv_sec: (PATIENCE_NS / 1_000_000_000).cast_signed(), tv_usec: 0 };
    let size = libc::socklen_t::try_from(size_of::<libc::timeval>()).ok()?;
    for option in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO] {
        let value = (&raw const patience).cast();
        // SAFETY: the kernel reads a timeval.
        if unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, option, value, size) } != 0 {
            return None;
        }
    }
    again(end_ns, || {
        // SAFETY: the kernel reads `length` bytes of `address`.
        unsafe { libc::syscall(libc::SYS_connect, fd, &raw const address, length) }
    })?;
    Some(socket)
}

/// A `cmsghdr` with room for what we expect.
#[repr(C, align(8))]
struct Rights {
    bytes: usize,
    level: c_int,
    kind: c_int,
    descriptors: [c_int; DESCRIPTORS],
}

const RIGHTS_AT: usize = offset_of!(Rights, descriptors);
const _: () = assert!(RIGHTS_AT == size_of::<libc::cmsghdr>());

/// Descriptors that have come and belong to nobody yet.
struct Received {
    rights: Rights,
    count: usize,
    taken: usize,
}

impl Received {
    #[inline(never)]
    fn next(&mut self) -> Option<Descriptor> {
        let number = self.rights.descriptors.get(self.taken).filter(|_| self.taken < self.count)?;
        self.taken += 1;
        // SAFETY: the kernel has given us the first `count` of them, and none is taken twice.
        Some(unsafe { Descriptor::from_raw(*number) })
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        while let Some(unused) = self.next() {
            drop(unused);
        }
    }
}

fn receive(socket: &Descriptor, known: &[&[u8]], end_ns: u64) -> Option<(usize, Received)> {
    let mut text = [0u8; 64];
    let mut part = libc::iovec { iov_base: text.as_mut_ptr().cast(), iov_len: text.len() };
    let mut rights = Rights { bytes: 0, level: 0, kind: 0, descriptors: [-1; DESCRIPTORS] };
    // SAFETY: an all-zero msghdr is a valid value of that plain C structure.
    let mut message: libc::msghdr = unsafe { zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
    message.msg_control = (&raw mut rights).cast();
    message.msg_controllen = size_of::<Rights>();
    let length = again(end_ns, || {
        let flags = libc::MSG_CMSG_CLOEXEC;
        // SAFETY: the kernel writes into `text` and `rights`, at most as much as they have.
        unsafe { libc::syscall(libc::SYS_recvmsg, socket.raw(), &raw mut message, flags) }
    })?;
    let carries = message.msg_controllen > RIGHTS_AT
        && (rights.level, rights.kind) == (libc::SOL_SOCKET, libc::SCM_RIGHTS);
    let bytes = if carries { rights.bytes.saturating_sub(RIGHTS_AT) } else { 0 };
    let count = bytes / size_of::<c_int>();
    // From here on they close themselves.
    let received = Received { rights, count, taken: 0 };
    let said = text.get(..length)?;
    let which = known.iter().position(|answer| *answer == said)?;
    (message.msg_flags & libc::MSG_CTRUNC == 0).then_some((which, received))
}

/// Answers behind a socket: with as many descriptors as there is room for. `false` if nobody reads
/// it.
pub fn answer(socket: c_int, text: &[u8], descriptors: &[c_int]) -> bool {
    let mut part = libc::iovec { iov_base: text.as_ptr().cast_mut().cast(), iov_len: text.len() };
    let count = descriptors.len().min(DESCRIPTORS);
    let bytes = RIGHTS_AT + count * size_of::<c_int>();
    let (level, kind) = (libc::SOL_SOCKET, libc::SCM_RIGHTS);
    let mut rights = Rights { bytes, level, kind, descriptors: [-1; DESCRIPTORS] };
    rights.descriptors.iter_mut().zip(descriptors).for_each(|(to, from)| *to = *from);
    // SAFETY: an all-zero msghdr is a valid value of that plain C structure.
    let mut message: libc::msghdr = unsafe { zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
    if count > 0 {
        message.msg_control = (&raw mut rights).cast();
        message.msg_controllen = bytes.next_multiple_of(align_of::<Rights>());
    }
    // SAFETY: the kernel reads `text` and `rights`, which live until it returns.
    let sent = unsafe { libc::sendmsg(socket, &raw const message, libc::MSG_NOSIGNAL) };
    usize::try_from(sent) == Ok(text.len())
}

/// Makes a call that a signal may interrupt, until the time is up.
fn again(end_ns: u64, mut call: impl FnMut() -> c_long) -> Option<usize> {
    loop {
        match usize::try_from(call()) {
            Ok(done) => return Some(done),
            Err(_) if errno() == libc::EINTR && monotonic_ns() < end_ns => {}
            Err(_) => return None,
        }
    }
}
