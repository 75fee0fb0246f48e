//! The daemon's socket: who asks, and what.
//!
//! One request and one answer a connection, each a message of its own. The kernel says who asks; a
//! connection that says nothing is closed after a while, and there are at most so many.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use elfen_rt::pages;
use nix::unistd::Group as UserGroup;

use crate::fence::status::{Answer, LONGEST_REQUEST, Request, address};
use crate::pidfd::has_ended;

/// Whose members may put themselves into a fence.
const GROUP: &str = "elfen";
const MOST_CONNECTIONS: usize = 64;
const SILENCE: Duration = Duration::from_secs(2);

/// The process at the other end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Peer {
    pub(super) pid: u32,
    pub(super) is_root: bool,
    pub(super) may_enter: bool,
}

#[derive(Debug)]
struct Connection {
    socket: OwnedFd,
    since: Instant,
}

#[derive(Debug)]
pub(super) struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    open: Vec<Connection>,
}

impl Listener {
    /// The caller holds the folder's lock: what is there is left over.
    pub(super) fn bind(path: &Path) -> io::Result<Self> {
        match std::fs::symlink_metadata(path) {
            Ok(found) => {
                use std::os::unix::fs::FileTypeExt;
                if !found.file_type().is_socket() {
                    return Err(io::Error::other("it is there, and no socket"));
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
        // SAFETY: the kernel has just given us this descriptor.
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
        Ok(Self { socket, path: path.to_owned(), open: Vec::new() })
    }

    /// What to wait for.
    pub(super) fn descriptors(&self) -> Vec<RawFd> {
        let connections = self.open.iter().map(|connection| connection.socket.as_raw_fd());
        // Who waits for a place is heard when there is one.
        let more = (self.open.len() < MOST_CONNECTIONS).then(|| self.socket.as_raw_fd());
        more.into_iter().chain(connections).collect()
    }

    /// Takes new connections, and reads what has been asked.
    pub(super) fn asked(&mut self) -> Vec<Asked> {
        while self.open.len() < MOST_CONNECTIONS {
            let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
            let nobody = std::ptr::null_mut::<libc::sockaddr>();
            let none = std::ptr::null_mut::<libc::socklen_t>();
            // SAFETY: the kernel is given nowhere to write the address to, and writes none.
            let fd = unsafe { libc::accept4(self.socket.as_raw_fd(), nobody, none, flags) };
            if fd < 0 {
                break;
            }
            // SAFETY: the kernel has just given us this descriptor.
            let socket = unsafe { OwnedFd::from_raw_fd(fd) };
            self.open.push(Connection { socket, since: Instant::now() });
        }
        let mut asked = Vec::new();
        for connection in std::mem::take(&mut self.open) {
            let mut text = vec![0; LONGEST_REQUEST + 1];
            let fd = connection.socket.as_raw_fd();
            // SAFETY: the kernel writes at most `text.len()` bytes into `text`.
            let got = unsafe { libc::recv(fd, text.as_mut_ptr().cast(), text.len(), 0) };
            match usize::try_from(got) {
                Ok(0) => {}
                Ok(length) => asked.push(Asked::read(connection.socket, &text[..length])),
                Err(_) => {
                    let waits = io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock;
                    if waits && connection.since.elapsed() < SILENCE {
                        self.open.push(connection);
                    }
                }
            }
        }
        asked
    }
}

/// What a connection has asked; the request is the reason if it is none.
#[derive(Debug)]
pub(super) struct Asked {
    socket: OwnedFd,
    pub(super) request: Result<(Peer, Request), String>,
}

impl Asked {
    fn read(socket: OwnedFd, text: &[u8]) -> Self {
        let request = if text.len() > LONGEST_REQUEST {
            Err(format!("a request has at most {LONGEST_REQUEST} bytes"))
        } else {
            serde_json::from_slice(text).map_err(|error| format!("it is no request: {error}"))
        };
        let peer = peer(socket.as_raw_fd());
        let peer = peer.map_err(|error| format!("the kernel does not say who asks: {error}"));
        Self { request: request.and_then(|request| Ok((peer?, request))), socket }
    }

    /// Who does not read the answer goes without. `handed` are descriptors that go with it.
    pub(super) fn answer(self, answer: &Answer, handed: &[RawFd]) {
        let text = serde_json::to_vec(answer).unwrap_or_default();
        let _gone = pages::answer(self.socket.as_raw_fd(), &text, handed);
    }

    /// Whether the process that asked is gone: then its id may be another's by now. It has hung up,
    /// or has ended with its end of the connection in somebody else's hands.
    pub(super) fn is_gone(&self) -> bool {
        let mut byte = 0_u8;
        let (fd, flags) = (self.socket.as_raw_fd(), libc::MSG_PEEK | libc::MSG_DONTWAIT);
        // SAFETY: the kernel writes at most one byte.
        let hung_up = unsafe { libc::recv(fd, (&raw mut byte).cast(), 1, flags) == 0 };
        hung_up || process_of(fd).is_some_and(|process| has_ended(&process))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // A process that forked off has a copy of this, and never drops it.
        std::fs::remove_file(&self.path).ok();
    }
}

fn peer(fd: RawFd) -> io::Result<Peer> {
    let mut who = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut length = libc::socklen_t::try_from(size_of::<libc::ucred>()).unwrap_or(0);
    // SAFETY: the kernel writes at most `length` bytes into a ucred.
    let got = unsafe {
        let (level, option) = (libc::SOL_SOCKET, libc::SO_PEERCRED);
        libc::getsockopt(fd, level, option, (&raw mut who).cast(), &raw mut length)
    };
    if got != 0 {
        return Err(io::Error::last_os_error());
    }
    // 0: a process of another pid namespace, which has no id here.
    let pid = u32::try_from(who.pid).ok().filter(|&pid| pid != 0);
    let pid = pid.ok_or_else(|| io::Error::other("it has no process id here"))?;
    let group = UserGroup::from_name(GROUP).ok().flatten().map(|group| group.gid.as_raw());
    let in_group = group.is_some_and(|group| who.gid == group || groups(fd).contains(&group));
    let is_root = who.uid == 0;
    Ok(Peer { pid, is_root, may_enter: is_root || in_group })
}

/// The process at the other end itself, whoever has its id; `None` on a kernel before 6.5.
fn process_of(fd: RawFd) -> Option<OwnedFd> {
    const SO_PEERPIDFD: libc::c_int = 77;
    let mut process: RawFd = -1;
    let mut length = libc::socklen_t::try_from(size_of::<RawFd>()).unwrap_or(0);
    // SAFETY: the kernel writes at most `length` bytes into a descriptor's number.
    let got = unsafe {
        let level = libc::SOL_SOCKET;
        libc::getsockopt(fd, level, SO_PEERPIDFD, (&raw mut process).cast(), &raw mut length)
    };
    // SAFETY: the kernel has just given us this descriptor.
    (got == 0).then(|| unsafe { OwnedFd::from_raw_fd(process) })
}

/// The further groups of the process at the other end; none where the kernel does not say.
fn groups(fd: RawFd) -> Vec<u32> {
    let mut groups = vec![0_u32; 1 << 10];
    let bytes = groups.len() * size_of::<u32>();
    let mut length = libc::socklen_t::try_from(bytes).unwrap_or(0);
    // SAFETY: the kernel writes at most `length` bytes into `groups`.
    let got = unsafe {
        let (level, option) = (libc::SOL_SOCKET, libc::SO_PEERGROUPS);
        libc::getsockopt(fd, level, option, groups.as_mut_ptr().cast(), &raw mut length)
    };
    let count = usize::try_from(length).unwrap_or(0) / size_of::<u32>();
    groups.truncate(if got == 0 { count } else { 0 });
    groups
}
