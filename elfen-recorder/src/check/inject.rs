//! Injectors: each hurts a service for a while, and says by a clock of its own from when to when.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use elfen_machine::affinity;
use elfen_machine::process::stat;
use elfen_rt::clock::{monotonic_ns, nanos};
use serde::{Deserialize, Serialize};

/// A time in which a service was hurt.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Injured {
    pub from_ns: u64,
    pub to_ns: u64,
    /// Of that time, what took effect.
    pub effective_ns: u64,
    /// The only one that was hurt, where it was a request of the injector's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connection: Option<u64>,
}

impl Injured {
    /// Whatever came in that time, for as long as it was there.
    pub fn all(from_ns: u64, to_ns: u64) -> Self {
        Self { from_ns, to_ns, effective_ns: to_ns - from_ns, connection: None }
    }
}

/// A process that can be stopped. It is named by a descriptor, so that no other process of the same
/// id is hurt, and goes on if we are dropped.
#[derive(Debug)]
pub struct Stop {
    process: u32,
    descriptor: OwnedFd,
}

/// For a stop to take effect: the process may be kept from its CPU.
const PATIENCE: Duration = Duration::from_secs(2);

impl Stop {
    pub fn new(process: u32) -> io::Result<Self> {
        let id = libc::pid_t::try_from(process).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: takes numbers.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, id, 0) };
        let fd = i32::try_from(fd).map_err(|_| io::ErrorKind::InvalidData)?;
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call succeeded, so the descriptor is open and ours alone.
        let descriptor = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { process, descriptor })
    }

    /// By which it is named, however soon its number is another's.
    pub fn descriptor(&self) -> &OwnedFd {
        &self.descriptor
    }

    fn send(&self, signal: i32) -> io::Result<()> {
        let null = std::ptr::null::<libc::siginfo_t>();
        let fd = self.descriptor.as_raw_fd();
        // SAFETY: takes numbers; without a siginfo the kernel makes one.
        let sent = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, fd, signal, null, 0) };
        if sent == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    fn is_stopped(&self) -> bool {
        stat(self.process).is_some_and(|stat| stat.state == 'T')
    }

    pub fn hurt(&self, last: Duration) -> io::Result<Injured> {
        self.send(libc::SIGSTOP)?;
        let asked = Instant::now();
        // It stops once it runs, and whoever keeps it from that is another cause.
        while !self.is_stopped() && asked.elapsed() < PATIENCE {
            std::hint::spin_loop();
        }
        let from_ns = monotonic_ns();
        std::thread::sleep(last);
        let to_ns = monotonic_ns();
        self.send(libc::SIGCONT)?;
        Ok(Injured::all(from_ns, to_ns))
    }
}

impl Drop for Stop {
    fn drop(&mut self) {
        // Gone is as good as going on.
        let _gone = self.send(libc::SIGCONT);
    }
}

/// A thread that uses up a CPU: above everybody at an ordinary priority, or as one of them.
#[derive(Debug)]
pub struct Hog {
    cpu: u32,
    name: &'static str,
    priority: Option<i32>,
}

/// Its thread's name, by which it is found.
pub const HOG: &str = "elfen-hog";
pub const RIVAL: &str = "elfen-rival";

/// A turn of its loop takes less: in the time between it was displaced.
const DISPLACED_NS: u64 = 20_000;

impl Hog {
    /// One that takes the CPU from everybody but for real-time threads above it.
    pub fn new(cpu: u32) -> Self {
        Self { cpu, name: HOG, priority: Some(50) }
    }

    /// One that shares it with others by the scheduler's rules.
    pub fn rival(cpu: u32) -> Self {
        Self { cpu, name: RIVAL, priority: None }
    }

    /// From when to when it ran, by its own clock: it can be displaced itself.
    pub fn hurt(&self, last: Duration) -> io::Result<Vec<Injured>> {
        let Self { cpu, name, priority } = *self;
        let hog = std::thread::Builder::new().name(name.to_owned());
        let hog = hog.spawn(move || {
            affinity::pin(cpu)?;
            if let Some(priority) = priority {
                take_precedence(priority)?;
            }
            let mut runs = Vec::new();
            let mut from_ns = monotonic_ns();
            let (mut now_ns, until_ns) = (from_ns, from_ns + nanos(last));
            while now_ns < until_ns {
                let last_ns = std::mem::replace(&mut now_ns, monotonic_ns());
                if now_ns - last_ns >= DISPLACED_NS {
                    runs.push(Injured::all(from_ns, last_ns));
                    from_ns = now_ns;
                }
            }
            runs.push(Injured::all(from_ns, now_ns));
            Ok(runs)
        })?;
        hog.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
    }
}

/// Puts the calling thread, and those that it starts, above all at an ordinary priority.
pub fn take_precedence(priority: i32) -> io::Result<()> {
    let parameter = libc::sched_param { sched_priority: priority };
    // SAFETY: 0 is the calling thread, and the parameter is a live one of ours.
    let set = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &parameter) };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// What the calling thread has had of any CPU.
pub fn own_cpu_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a live timespec of ours, and every thread has this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut now) };
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}
