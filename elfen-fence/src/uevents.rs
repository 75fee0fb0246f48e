//! The kernel's notices that a CPU went offline or online.
//!
//! The kernel moves the tasks of a batch lane that goes offline to any other CPU, so the daemon
//! must not wait for its next check. No udev is needed: the kernel broadcasts these notices.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// The multicast group of the kernel; 2 would be udev's.
const KERNEL_GROUP: u32 = 1;
const LONGEST: usize = 8192;

#[derive(Debug)]
pub(super) struct Uevents(OwnedFd);

impl Uevents {
    pub(super) fn open() -> io::Result<Self> {
        let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: socket takes numbers.
        let fd = unsafe { libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_KOBJECT_UEVENT) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just created this descriptor for us.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: a sockaddr_nl consists of integers, for which zeros are valid.
        let mut address: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
        address.nl_family = libc::sa_family_t::try_from(libc::AF_NETLINK).unwrap_or(16);
        address.nl_groups = KERNEL_GROUP;
        let length = libc::socklen_t::try_from(size_of::<libc::sockaddr_nl>()).unwrap_or(0);
        // SAFETY: the kernel reads `length` bytes of `address`.
        match unsafe { libc::bind(fd, (&raw const address).cast(), length) } {
            0 => Ok(Self(socket)),
            _ => Err(io::Error::last_os_error()),
        }
    }

    pub(super) fn descriptor(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Whether there was a notice about a CPU since the last call; also if notices were lost.
    pub(super) fn cpu_changed(&mut self) -> bool {
        let mut of_a_cpu = false;
        let mut text = [0_u8; LONGEST];
        loop {
            // SAFETY: the kernel writes at most `LONGEST` bytes into `text`.
            let got =
                unsafe { libc::recv(self.descriptor(), text.as_mut_ptr().cast(), LONGEST, 0) };
            let Ok(length) = usize::try_from(got) else {
                let lost = io::Error::last_os_error().raw_os_error() == Some(libc::ENOBUFS);
                of_a_cpu |= lost;
                if lost {
                    continue;
                }
                return of_a_cpu;
            };
            of_a_cpu |= is_of_a_cpu(&text[..length]);
        }
    }
}

fn is_of_a_cpu(message: &[u8]) -> bool {
    message.split(|&byte| byte == 0).any(|word| word == b"SUBSYSTEM=cpu")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notice_about_a_cpu_is_recognised() {
        let message = |subsystem: &str| {
            format!("offline@/devices/x\0ACTION=offline\0SUBSYSTEM={subsystem}\0SEQNUM=1\0")
        };
        assert!(is_of_a_cpu(message("cpu").as_bytes()));
        assert!(!is_of_a_cpu(message("cpuid").as_bytes()) && !is_of_a_cpu(b""));
    }
}
