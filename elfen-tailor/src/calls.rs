//! Tells what a thread that sleeps in a system call waits for, by the number of the call.

/// What a sleeping thread waits for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum WaitTarget {
    /// A disk or a file system.
    Storage,
    /// A lock, a condition or another thread.
    Lock,
    /// A point in time.
    Time,
    /// Input from a client, another service or another thread.
    Input,
    Other,
}

const CALLS: &[(libc::c_long, &str, WaitTarget)] = &[
    (libc::SYS_read, "read", WaitTarget::Input),
    (libc::SYS_write, "write", WaitTarget::Other),
    (libc::SYS_readv, "readv", WaitTarget::Input),
    (libc::SYS_writev, "writev", WaitTarget::Other),
    (libc::SYS_pread64, "pread64", WaitTarget::Storage),
    (libc::SYS_pwrite64, "pwrite64", WaitTarget::Storage),
    (libc::SYS_preadv, "preadv", WaitTarget::Storage),
    (libc::SYS_pwritev, "pwritev", WaitTarget::Storage),
    (libc::SYS_fsync, "fsync", WaitTarget::Storage),
    (libc::SYS_fdatasync, "fdatasync", WaitTarget::Storage),
    (libc::SYS_sync_file_range, "sync_file_range", WaitTarget::Storage),
    (libc::SYS_msync, "msync", WaitTarget::Storage),
    (libc::SYS_openat, "openat", WaitTarget::Storage),
    (libc::SYS_fallocate, "fallocate", WaitTarget::Storage),
    (libc::SYS_sendfile, "sendfile", WaitTarget::Storage),
    (libc::SYS_io_getevents, "io_getevents", WaitTarget::Storage),
    (libc::SYS_io_uring_enter, "io_uring_enter", WaitTarget::Input),
    (libc::SYS_futex, "futex", WaitTarget::Lock),
    (libc::SYS_flock, "flock", WaitTarget::Lock),
    (libc::SYS_mmap, "mmap", WaitTarget::Other),
    (libc::SYS_munmap, "munmap", WaitTarget::Other),
    (libc::SYS_madvise, "madvise", WaitTarget::Other),
    (libc::SYS_mprotect, "mprotect", WaitTarget::Other),
    (libc::SYS_clone, "clone", WaitTarget::Other),
    (libc::SYS_wait4, "wait4", WaitTarget::Other),
    (libc::SYS_nanosleep, "nanosleep", WaitTarget::Time),
    (libc::SYS_clock_nanosleep, "clock_nanosleep", WaitTarget::Time),
    (libc::SYS_epoll_pwait, "epoll_pwait", WaitTarget::Input),
    (libc::SYS_ppoll, "ppoll", WaitTarget::Input),
    (libc::SYS_pselect6, "pselect6", WaitTarget::Input),
    (libc::SYS_recvfrom, "recvfrom", WaitTarget::Input),
    (libc::SYS_recvmsg, "recvmsg", WaitTarget::Input),
    (libc::SYS_accept4, "accept4", WaitTarget::Input),
    (libc::SYS_accept, "accept", WaitTarget::Input),
    (libc::SYS_connect, "connect", WaitTarget::Input),
    (libc::SYS_sendto, "sendto", WaitTarget::Other),
    (libc::SYS_sendmsg, "sendmsg", WaitTarget::Other),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_epoll_wait, "epoll_wait", WaitTarget::Input),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_poll, "poll", WaitTarget::Input),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_select, "select", WaitTarget::Input),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_open, "open", WaitTarget::Storage),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_fork, "fork", WaitTarget::Other),
];

fn find(call: u16) -> Option<&'static (libc::c_long, &'static str, WaitTarget)> {
    CALLS.iter().find(|(number, ..)| *number == libc::c_long::from(call))
}

pub fn name(call: u16) -> String {
    find(call).map_or_else(|| format!("call-{call}"), |(_, name, _)| (*name).to_owned())
}

pub fn waits_for(call: u16) -> WaitTarget {
    find(call).map_or(WaitTarget::Other, |(.., what)| *what)
}
