//! The daemon's socket: reads requests, and names the processes that sent them.
//!
//! Each connection has one request and one answer, each in one message. The kernel names the peer
//! process. A silent connection is closed after a while, and earlier if its user has many or all
//! places are taken, so that silent processes of one user cannot keep others waiting.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use elfen_machine::accounts::group_id;
use elfen_rt::pages;

use elfen_machine::fence::status::{Answer, LONGEST_REQUEST, Request, address};
use elfen_machine::pidfd::has_ended;

/// The group whose members may put themselves into a fence.
const GROUP: &str = "elfen";
const MOST_CONNECTIONS: usize = 64;
/// How many silent connections one user may have.
const MOST_OF_ONE_USER: usize = 8;
/// How many connections are accepted in one round; the rest waits in the kernel.
const MOST_AT_ONCE: usize = 256;
const SILENCE_MAX: Duration = Duration::from_secs(2);

/// The process at the other end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Peer {
    pub(super) pid: u32,
    pub(super) may_enter: bool,
}

impl Peer {
    /// Whether the process has CAP_SYS_ADMIN in our own user namespace. The caller verifies
    /// afterwards that the process has not ended meanwhile.
    pub(super) fn is_administrator(self) -> bool {
        const CAP_SYS_ADMIN: u32 = 21;
        let namespace = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/user")).ok();
        let is_ours = namespace("self").is_some_and(|ours| {
            namespace(&self.pid.to_string()).is_some_and(|theirs| theirs == ours)
        });
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid));
        let status = status.unwrap_or_default();
        let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
        let effective = effective.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        is_ours && effective.is_some_and(|mask| mask & 1 << CAP_SYS_ADMIN != 0)
    }
}

#[derive(Debug)]
struct Connection {
    socket: OwnedFd,
    user: u32,
    since: Instant,
}

#[derive(Debug)]
pub(super) struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    /// The id of [`GROUP`], looked up once: a directory server may answer slowly.
    group: Option<u32>,
    /// Silent connections, the oldest first.
    open: Vec<Connection>,
}

impl Listener {
    /// The caller holds the folder's lock, so a socket at this path is a leftover.
    pub(super) fn bind(path: &Path) -> io::Result<Self> {
        match std::fs::symlink_metadata(path) {
            Ok(found) => {
                use std::os::unix::fs::FileTypeExt;
                if !found.file_type().is_socket() {
                    return Err(io::Error::other("the path exists and is not a socket"));
                }
                std::fs::remove_file(path)?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        let (address, length) = address(path)?;
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: socket takes numbers.
        let fd = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just created this descriptor for us.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: the kernel reads `length` bytes of `address`.
        if unsafe { libc::bind(fd, (&raw const address).cast(), length) } != 0 {
            return Err(io::Error::last_os_error());
        }
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))?;
        // SAFETY: listen takes numbers.
        if unsafe { libc::listen(fd, 128) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let group = group_id(GROUP).ok().flatten().map(|group| group.as_raw());
        Ok(Self { socket, path: path.to_owned(), group, open: Vec::new() })
    }

    /// The descriptors to poll.
    pub(super) fn descriptors(&self) -> Vec<RawFd> {
        let connections = self.open.iter().map(|connection| connection.socket.as_raw_fd());
        std::iter::once(self.socket.as_raw_fd()).chain(connections).collect()
    }

    /// Accepts new connections, and reads the requests that have arrived.
    pub(super) fn requests(&mut self) -> Vec<ReceivedRequest> {
        let mut requests = Vec::new();
        for _ in 0..MOST_AT_ONCE {
            let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
            let no_address = std::ptr::null_mut::<libc::sockaddr>();
            let no_length = std::ptr::null_mut::<libc::socklen_t>();
            // SAFETY: with null pointers the kernel does not write the peer's address.
            let fd =
                unsafe { libc::accept4(self.socket.as_raw_fd(), no_address, no_length, flags) };
            if fd < 0 {
                break;
            }
            // SAFETY: the kernel has just created this descriptor for us.
            let socket = unsafe { OwnedFd::from_raw_fd(fd) };
            let Ok(peer) = credentials(fd) else { continue };
            let connection = Connection { socket, user: peer.uid, since: Instant::now() };
            self.read_request(connection, &mut requests);
        }
        for connection in std::mem::take(&mut self.open) {
            self.read_request(connection, &mut requests);
        }
        requests
    }

    /// Reads the request of a connection, which is kept while it is silent.
    fn read_request(&mut self, connection: Connection, requests: &mut Vec<ReceivedRequest>) {
        let mut text = [0; LONGEST_REQUEST + 1];
        let fd = connection.socket.as_raw_fd();
        // SAFETY: the kernel writes at most `text.len()` bytes into `text`.
        let got = unsafe { libc::recv(fd, text.as_mut_ptr().cast(), text.len(), 0) };
        match usize::try_from(got) {
            Ok(0) => {}
            Ok(length) => {
                requests.push(ReceivedRequest::read(
                    connection.socket,
                    &text[..length],
                    self.group,
                ));
            }
            Err(_) => {
                let waits = io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock;
                if waits && connection.since.elapsed() < SILENCE_MAX {
                    self.keep_waiting(connection);
                }
            }
        }
    }

    /// Keeps a silent connection. If there are too many, drops the oldest of the user with the
    /// most.
    fn keep_waiting(&mut self, connection: Connection) {
        let of = |open: &[Connection], user| open.iter().filter(|one| one.user == user).count();
        let crowded_user = match of(&self.open, connection.user) {
            MOST_OF_ONE_USER.. => Some(connection.user),
            _ if self.open.len() >= MOST_CONNECTIONS => {
                self.open.iter().map(|one| one.user).max_by_key(|&user| of(&self.open, user))
            }
            _ => None,
        };
        if let Some(at) = self.open.iter().position(|one| Some(one.user) == crowded_user) {
            self.open.remove(at);
        }
        self.open.push(connection);
    }
}

/// A request that has arrived, or why it is invalid.
#[derive(Debug)]
pub(super) struct ReceivedRequest {
    socket: OwnedFd,
    pub(super) request: Result<(Peer, Request), String>,
}

impl ReceivedRequest {
    fn read(socket: OwnedFd, text: &[u8], group: Option<u32>) -> Self {
        let request = if text.len() > LONGEST_REQUEST {
            Err(format!("a request has at most {LONGEST_REQUEST} bytes"))
        } else {
            serde_json::from_slice(text).map_err(|error| format!("invalid request: {error}"))
        };
        let peer = peer(socket.as_raw_fd(), group);
        let peer = peer.map_err(|error| format!("the kernel does not name the peer: {error}"));
        Self { request: request.and_then(|request| Ok((peer?, request))), socket }
    }

    /// Sends the answer with the descriptors `files`. A peer that does not read loses the answer.
    pub(super) fn answer(self, answer: &Answer, files: &[RawFd]) {
        let text = serde_json::to_vec(answer).unwrap_or_default();
        let _gone = pages::send_answer(self.socket.as_raw_fd(), &text, files);
    }

    /// Whether the process that sent the request is gone, so that another process may have its id.
    /// It has closed the connection, or has ended while another process has its end open.
    pub(super) fn is_gone(&self) -> bool {
        let mut byte = 0_u8;
        let fd = self.socket.as_raw_fd();
        let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
        // SAFETY: the kernel writes at most one byte.
        let hung_up = unsafe { libc::recv(fd, (&raw mut byte).cast(), 1, flags) == 0 };
        hung_up || process_of(fd).is_some_and(|process| has_ended(&process))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // A forked process has a copy of this, and never drops it.
        std::fs::remove_file(&self.path).ok();
    }
}

/// The peer's credentials at the time when it connected.
fn credentials(fd: RawFd) -> io::Result<libc::ucred> {
    let mut credentials = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut length = libc::socklen_t::try_from(size_of::<libc::ucred>()).unwrap_or(0);
    // SAFETY: the kernel writes at most `length` bytes into a ucred.
    let got = unsafe {
        let level = libc::SOL_SOCKET;
        let option = libc::SO_PEERCRED;
        libc::getsockopt(fd, level, option, (&raw mut credentials).cast(), &raw mut length)
    };
    if got != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(credentials)
}

fn peer(fd: RawFd, group: Option<u32>) -> io::Result<Peer> {
    let peer = credentials(fd)?;
    // 0 is a process of another pid namespace, which has no id here.
    let pid = u32::try_from(peer.pid).ok().filter(|&pid| pid != 0);
    let pid = pid.ok_or_else(|| io::Error::other("it has no process id here"))?;
    let in_group = group.is_some_and(|group| peer.gid == group || groups(fd).contains(&group));
    Ok(Peer { pid, may_enter: peer.uid == 0 || in_group })
}

/// A pidfd of the peer process, which stays correct when its id is reused. `None` before Linux 6.5.
fn process_of(fd: RawFd) -> Option<OwnedFd> {
    const SO_PEERPIDFD: libc::c_int = 77;
    let mut process: RawFd = -1;
    let mut length = libc::socklen_t::try_from(size_of::<RawFd>()).unwrap_or(0);
    // SAFETY: the kernel writes at most `length` bytes into a descriptor's number.
    let got = unsafe {
        let level = libc::SOL_SOCKET;
        libc::getsockopt(fd, level, SO_PEERPIDFD, (&raw mut process).cast(), &raw mut length)
    };
    // SAFETY: the kernel has just created this descriptor for us.
    (got == 0).then(|| unsafe { OwnedFd::from_raw_fd(process) })
}

/// The supplementary groups of the peer process; none where the kernel does not say.
fn groups(fd: RawFd) -> Vec<u32> {
    let mut groups = vec![0_u32; 1 << 10];
    let bytes = groups.len() * size_of::<u32>();
    let mut length = libc::socklen_t::try_from(bytes).unwrap_or(0);
    // SAFETY: the kernel writes at most `length` bytes into `groups`.
    let got = unsafe {
        let level = libc::SOL_SOCKET;
        let option = libc::SO_PEERGROUPS;
        libc::getsockopt(fd, level, option, groups.as_mut_ptr().cast(), &raw mut length)
    };
    let count = usize::try_from(length).unwrap_or(0) / size_of::<u32>();
    groups.truncate(if got == 0 { count } else { 0 });
    groups
}
