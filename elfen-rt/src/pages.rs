//! The client of elfend's socket: requests shared pages and the machine's task map.
//!
//! elfend gives a process in one of its fences the pages of that fence's lanes. It gives trusted
//! users the machine's task map. Segment ids are valid in one IPC namespace only, and paths in one
//! file system; a descriptor that arrives over a socket can be mapped in a container too.
//!
//! The protocol is one request message and one answer message. The answer carries descriptors: for
//! each service or lent pair the lane page and the control page, then the task map and the link
//! that keeps the map's writer attached. Their order identifies them; pages are sealed, and the
//! task map is not. The answer is not trusted: a file that is neither sealed nor an eBPF map is not
//! mapped.
//!
//! Every call here gives up after `PATIENCE_NS`. A process that gets no pages runs without checks;
//! the guards occupy its lane all the same.

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

/// The environment variable with the socket's path.
pub const VARIABLE: &CStr = c"ELFEN_SOCKET";
/// The socket's path where that variable is not set.
pub const SOCKET: &[u8] = b"/run/elfen/elfend.sock";
/// The request for pages, as elfend parses it.
pub const REQUEST: &[u8] = br#"{"do":"pages"}"#;
/// The texts of an answer that carries pages. The second one says that the caller is in elfend's
/// IPC namespace: System V segment ids agree, so the caller can map the pages of services as well.
pub const ANSWERS: [&[u8]; 2] =
    [br#"{"pages":{"services":false}}"#, br#"{"pages":{"services":true}}"#];
/// The request for the task map only. The answer carries the map, the leases by which a reader has
/// CPUs timed, and the link.
pub const TASKS_REQUEST: &[u8] = br#"{"do":"tasks"}"#;
pub const TASKS_ANSWER: &[u8] = br#""tasks""#;
/// How many services, and lent pairs without a service, one answer has room for. The lanes of
/// further ones have guards but no checks.
pub const ENTRIES_MAX: usize = 8;

/// Two descriptors for each entry, and two for the task map.
const DESCRIPTORS: usize = 2 * ENTRIES_MAX + 2;
/// Bounds every exchange. Even a busy daemon answers within a fraction of this time.
const PATIENCE_NS: u64 = 2_000_000_000;

/// The pages of a group of lanes that share one policy.
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

/// Never inlined, which keeps the preload library small: the compiler unrolls loops over so few
/// entries.
#[inline(never)]
fn next_filled<'a>(entries: &mut core::slice::Iter<'a, Option<Pages>>) -> Option<&'a Pages> {
    entries.find_map(Option::as_ref)
}

/// The entries that are filled.
pub(crate) fn filled(entries: &[Option<Pages>; ENTRIES_MAX]) -> impl Iterator<Item = &Pages> {
    let mut entries = entries.iter();
    core::iter::from_fn(move || next_filled(&mut entries))
}

/// The pages and the task map that elfend sent.
#[derive(Debug)]
pub struct Answer {
    pub pages: [Option<Pages>; ENTRIES_MAX],
    pub tasks: Option<TaskMap>,
}

/// Requests the pages over the socket at `path` and maps them, lane pages with this access. `None`
/// if elfend does not answer in time, or does not give this process the pages.
pub fn request_pages(path: &[u8], access: Access) -> Option<Answer> {
    let end_ns = monotonic_ns().saturating_add(PATIENCE_NS);
    let socket = connect(path, end_ns)?;
    let (which, mut received) = exchange(&socket, REQUEST, &ANSWERS, end_ns)?;
    let with_services = which == 1;
    let mut answer = Answer { pages: [const { None }; ENTRIES_MAX], tasks: None };
    for entry in &mut answer.pages {
        let Some(lanes) = received.next() else { return Some(answer) };
        let control = received.next()?;
        if !sealed::is_sealed(&lanes) {
            answer.tasks = TaskMap::lent(lanes, control).ok();
            return Some(answer);
        }
        *entry = Pages::open([lanes, control], access, with_services);
    }
    if let (Some(tasks), Some(link)) = (received.next(), received.next()) {
        answer.tasks = TaskMap::lent(tasks, link).ok();
    }
    Some(answer)
}

/// Why this process did not get elfend's task map.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TasksError {
    /// No process listens on the socket.
    Absent,
    /// The daemon does not give the map to this process, or has none.
    Refused,
    Map(TaskMapError),
}

/// Requests the machine's task map over the socket at `path`. The caller can read it and have CPUs
/// timed.
pub fn request_task_map(path: &[u8]) -> Result<TaskMap, TasksError> {
    let end_ns = monotonic_ns().saturating_add(PATIENCE_NS);
    let socket = connect(path, end_ns).ok_or(TasksError::Absent)?;
    let answered = exchange(&socket, TASKS_REQUEST, &[TASKS_ANSWER], end_ns);
    let (_, mut received) = answered.ok_or(TasksError::Refused)?;
    let mut next = || received.next().ok_or(TasksError::Refused);
    let (tasks, watch, link) = (next()?, next()?, next()?);
    let descriptors = Descriptors { tasks, watch, claims: None, link };
    TaskMap::from_descriptors(descriptors).map_err(TasksError::Map)
}

/// Sends the request and waits for one of the `known` answers. Returns which answer came, and all
/// its descriptors.
#[inline(never)]
fn exchange(
    socket: &Descriptor,
    request: &[u8],
    known: &[&[u8]],
    end_ns: u64,
) -> Option<(usize, Received)> {
    let flags = libc::MSG_NOSIGNAL;
    let sent = retry(end_ns, || {
        let text = request.as_ptr();
        let no_address = core::ptr::null::<u8>();
        // The system call by its number, here and below: the C library's wrappers are cancellation
        // points.
        // SAFETY: the kernel reads `request`, and no address.
        unsafe {
            libc::syscall(libc::SYS_sendto, socket.raw(), text, request.len(), flags, no_address, 0)
        }
    })?;
    if sent != request.len() {
        return None;
    }
    receive(socket, known, end_ns)
}

/// The socket address of a path. `None` if the path is empty or too long for an address.
pub fn socket_address(path: &[u8]) -> Option<(libc::sockaddr_un, libc::socklen_t)> {
    // SAFETY: a sockaddr_un consists of numbers only, for which zeros are valid.
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
    let (address, length) = socket_address(path)?;
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
    retry(end_ns, || {
        // SAFETY: the kernel reads `length` bytes of `address`.
        unsafe { libc::syscall(libc::SYS_connect, fd, &raw const address, length) }
    })?;
    Some(socket)
}

/// A `cmsghdr` with room for the descriptors that an answer can carry.
#[repr(C, align(8))]
struct Rights {
    bytes: usize,
    level: c_int,
    kind: c_int,
    descriptors: [c_int; DESCRIPTORS],
}

const RIGHTS_AT: usize = offset_of!(Rights, descriptors);
const _: () = assert!(RIGHTS_AT == size_of::<libc::cmsghdr>());

/// Descriptors that arrived with a message. Descriptors that are not taken are closed on drop.
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
        // SAFETY: the kernel opened the first `count` descriptors for us, and `taken` ensures that
        // each is taken once.
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
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut rights).cast();
    message.msg_controllen = size_of::<Rights>();
    let length = retry(end_ns, || {
        let flags = libc::MSG_CMSG_CLOEXEC;
        // SAFETY: the kernel writes into `text` and `rights`, within the lengths in `message`.
        unsafe { libc::syscall(libc::SYS_recvmsg, socket.raw(), &raw mut message, flags) }
    })?;
    let carries = message.msg_controllen > RIGHTS_AT
        && (rights.level, rights.kind) == (libc::SOL_SOCKET, libc::SCM_RIGHTS);
    let bytes = if carries { rights.bytes.saturating_sub(RIGHTS_AT) } else { 0 };
    let count = bytes / size_of::<c_int>();
    // From here on, every return closes the descriptors that arrived.
    let received = Received { rights, count, taken: 0 };
    let text = text.get(..length)?;
    let which = known.iter().position(|answer| *answer == text)?;
    (message.msg_flags & libc::MSG_CTRUNC == 0).then_some((which, received))
}

/// Sends an answer over a connected socket, with as many of the descriptors as fit. `false` if the
/// message cannot be sent.
pub fn send_answer(socket: c_int, text: &[u8], descriptors: &[c_int]) -> bool {
    let mut part = libc::iovec { iov_base: text.as_ptr().cast_mut().cast(), iov_len: text.len() };
    let count = descriptors.len().min(DESCRIPTORS);
    let bytes = RIGHTS_AT + count * size_of::<c_int>();
    let (level, kind) = (libc::SOL_SOCKET, libc::SCM_RIGHTS);
    let mut rights = Rights { bytes, level, kind, descriptors: [-1; DESCRIPTORS] };
    rights.descriptors.iter_mut().zip(descriptors).for_each(|(to, from)| *to = *from);
    // SAFETY: an all-zero msghdr is a valid value of that plain C structure.
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    if count > 0 {
        message.msg_control = (&raw mut rights).cast();
        message.msg_controllen = bytes.next_multiple_of(align_of::<Rights>());
    }
    // SAFETY: the kernel reads `text` and `rights`, which live until it returns.
    let sent = unsafe { libc::sendmsg(socket, &raw const message, libc::MSG_NOSIGNAL) };
    usize::try_from(sent) == Ok(text.len())
}

/// Repeats a system call while signals interrupt it, until `end_ns`.
fn retry(end_ns: u64, mut call: impl FnMut() -> c_long) -> Option<usize> {
    loop {
        match usize::try_from(call()) {
            Ok(done) => return Some(done),
            Err(_) if errno() == libc::EINTR && monotonic_ns() < end_ns => {}
            Err(_) => return None,
        }
    }
}
