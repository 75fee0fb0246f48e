//! System calls by what a thread that sleeps in one waits for.

/// What somebody waits for who sleeps in a system call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum For {
    /// A disk, or what holds files.
    Storage,
    /// A lock, a condition, another thread.
    Lock,
    /// A time.
    Time,
    /// Input from a client, another service or another thread.
    Input,
    Other,
}

const CALLS: &[(libc::c_long, &str, For)] = &[
    (libc::SYS_read, "read", For::Input),
    (libc::SYS_write, "write", For::Other),
    (libc::SYS_readv, "readv", For::Input),
    (libc::SYS_writev, "writev", For::Other),
    (libc::SYS_pread64, "pread64", For::Storage),
    (libc::SYS_pwrite64, "pwrite64", For::Storage),
    (libc::SYS_preadv, "preadv", For::Storage),
    (libc::SYS_pwritev, "pwritev", For::Storage),
    (libc::SYS_fsync, "fsync", For::Storage),
    (libc::SYS_fdatasync, "fdatasync", For::Storage),
    (libc::SYS_sync_file_range, "sync_file_range", For::Storage),
    (libc::SYS_msync, "msync", For::Storage),
    (libc::SYS_openat, "openat", For::Storage),
    (libc::SYS_fallocate, "fallocate", For::Storage),
    (libc::SYS_sendfile, "sendfile", For::Storage),
    (libc::SYS_io_getevents, "io_getevents", For::Storage),
    (libc::SYS_io_uring_enter, "io_uring_enter", For::Input),
    (libc::SYS_futex, "futex", For::Lock),
    (libc::SYS_flock, "flock", For::Lock),
    (libc::SYS_mmap, "mmap", For::Other),
    (libc::SYS_munmap, "munmap", For::Other),
    (libc::SYS_madvise, "madvise", For::Other),
    (libc::SYS_mprotect, "mprotect", For::Other),
    (libc::SYS_clone, "clone", For::Other),
    (libc::SYS_wait4, "wait4", For::Other),
    (libc::SYS_nanosleep, "nanosleep", For::Time),
    (libc::SYS_clock_nanosleep, "clock_nanosleep", For::Time),
    (libc::SYS_epoll_pwait, "epoll_pwait", For::Input),
    (libc::SYS_ppoll, "ppoll", For::Input),
    (libc::SYS_pselect6, "pselect6", For::Input),
    (libc::SYS_recvfrom, "recvfrom", For::Input),
    (libc::SYS_recvmsg, "recvmsg", For::Input),
    (libc::SYS_accept4, "accept4", For::Input),
    (libc::SYS_accept, "accept", For::Input),
    (libc::SYS_connect, "connect", For::Input),
    (libc::SYS_sendto, "sendto", For::Other),
    (libc::SYS_sendmsg, "sendmsg", For::Other),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_epoll_wait, "epoll_wait", For::Input),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_poll, "poll", For::Input),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_select, "select", For::Input),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_open, "open", For::Storage),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_fork, "fork", For::Other),
];

fn find(call: u16) -> Option<&'static (libc::c_long, &'static str, For)> {
    CALLS.iter().find(|(number, ..)| *number == libc::c_long::from(call))
}

pub fn name(call: u16) -> String {
    find(call).map_or_else(|| format!("call-{call}"), |(_, name, _)| (*name).to_owned())
}

pub fn waits_for(call: u16) -> For {
    find(call).map_or(For::Other, |(.., what)| *what)
}
