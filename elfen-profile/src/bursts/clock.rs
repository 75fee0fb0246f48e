//! The clock of one thread: it sends signals to the thread, by the CPU time of the thread.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use perf_event::Builder;
use perf_event::events::Software;

use super::inside::FIRST_FD;

/// From linux/perf_event.h.
const IOC_ENABLE: libc::Ioctl = 0x2400;
const IOC_DISABLE: libc::Ioctl = 0x2401;
pub(crate) const IOC_PERIOD: libc::Ioctl = 0x4008_2404;

/// An event of perf_event_open(2) that counts the CPU time of a thread. It fires only while the
/// thread executes its own code, so no system call of the thread is interrupted.
#[derive(Debug)]
pub(super) struct Clock(OwnedFd);

/// Long enough that the first signal comes only once the clock was set.
const NEVER_NS: u64 = 1 << 40;
/// From asm-generic/fcntl.h.
const F_SETSIG: i32 = 10;
const F_SETOWN_EX: i32 = 15;
const F_OWNER_TID: i32 = 0;

#[repr(C)]
struct Owner {
    kind: i32,
    thread: libc::pid_t,
}

impl Clock {
    /// A clock that does not run yet. Its descriptor has the number of the slot.
    pub(super) fn open(thread: u32, slot: u32) -> io::Result<Self> {
        let thread = libc::pid_t::try_from(thread).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut builder = Builder::new(Software::TASK_CLOCK);
        builder.observe_pid(thread).any_cpu().sample_period(NEVER_NS).wakeup_events(1);
        // A program that the thread executes has no handler for the signal.
        builder.exclude_kernel(true).exclude_hv(true).remove_on_exec(true);
        let counter = builder.build()?;
        let wanted = FIRST_FD + i32::try_from(slot).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: takes numbers.
        let fd = unsafe { libc::fcntl(counter.as_raw_fd(), libc::F_DUPFD_CLOEXEC, wanted) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor has just been made.
        let clock = Self(unsafe { OwnedFd::from_raw_fd(fd) });
        if fd != wanted {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        let owner = Owner { kind: F_OWNER_TID, thread };
        // SAFETY: the kernel reads the owner, which is a local variable.
        clock.done(unsafe { libc::fcntl(fd, F_SETOWN_EX, &raw const owner) })?;
        // SAFETY: takes numbers.
        clock.done(unsafe { libc::fcntl(fd, F_SETSIG, libc::SIGURG) })?;
        // SAFETY: takes numbers.
        clock.done(unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_ASYNC | libc::O_NONBLOCK) })?;
        Ok(clock)
    }

    pub(super) fn start(&self) -> io::Result<()> {
        // SAFETY: takes numbers.
        self.done(unsafe { libc::ioctl(self.0.as_raw_fd(), IOC_ENABLE, 0) })
    }

    pub(super) fn stop(&self) -> io::Result<()> {
        // SAFETY: takes numbers.
        self.done(unsafe { libc::ioctl(self.0.as_raw_fd(), IOC_DISABLE, 0) })
    }

    /// Sends the next signals after this much CPU time each.
    pub(super) fn set(&self, period_ns: u64) -> io::Result<()> {
        let fd = self.0.as_raw_fd();
        // SAFETY: the kernel reads the period, which is a local variable.
        self.done(unsafe { libc::ioctl(fd, IOC_PERIOD, &raw const period_ns) })
    }

    fn done(&self, result: i32) -> io::Result<()> {
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}
