//! Injectors: each puts a fault into a service for a while, and measures by its own clock when.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use elfen_machine::affinity;
use elfen_machine::process::stat;
use elfen_rt::clock::{monotonic_ns, nanos};
use serde::{Deserialize, Serialize};

/// The time of a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Injection {
    pub from_ns: u64,
    pub to_ns: u64,
    /// How much of that time the fault had effect.
    pub effective_ns: u64,
    /// The only affected request, if the fault is in a request of the injector's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connection: Option<u64>,
}

impl Injection {
    /// A fault that affects every request that was there, for as long as the two overlap.
    pub fn all(from_ns: u64, to_ns: u64) -> Self {
        Self { from_ns, to_ns, effective_ns: to_ns - from_ns, connection: None }
    }
}

/// A process that can be stopped. It is held by a pidfd, so that no other process with the same id
/// can be hit. It continues when this drops.
#[derive(Debug)]
pub struct Stop {
    process: u32,
    descriptor: OwnedFd,
}

/// Time for a stop to take effect: the process may be kept from its CPU.
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

    /// The pidfd, which stays valid when the process id is reused.
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

    pub fn inject(&self, last: Duration) -> io::Result<Injection> {
        self.send(libc::SIGSTOP)?;
        let sent_at = Instant::now();
        // It stops only when it runs; what keeps it from its CPU is another cause.
        while !self.is_stopped() && sent_at.elapsed() < PATIENCE {
            std::hint::spin_loop();
        }
        let from_ns = monotonic_ns();
        std::thread::sleep(last);
        let to_ns = monotonic_ns();
        self.send(libc::SIGCONT)?;
        Ok(Injection::all(from_ns, to_ns))
    }
}

impl Drop for Stop {
    fn drop(&mut self) {
        // It may have ended; then there is nothing to continue.
        let _gone = self.send(libc::SIGCONT);
    }
}

/// A thread that uses up a CPU: above all ordinary threads, or as one of them.
#[derive(Debug)]
pub struct Hog {
    cpu: u32,
    name: &'static str,
    priority: Option<i32>,
}

/// The name of its thread, which the explanation shows.
pub const HOG: &str = "elfen-hog";
pub const RIVAL: &str = "elfen-rival";

/// One iteration of its loop takes less. After a longer one it had lost the CPU.
const DISPLACED_NS: u64 = 20_000;

impl Hog {
    /// A hog that takes the CPU from all threads but real-time threads above it.
    pub fn new(cpu: u32) -> Self {
        Self { cpu, name: HOG, priority: Some(50) }
    }

    /// A hog that shares the CPU by the scheduler's rules.
    pub fn rival(cpu: u32) -> Self {
        Self { cpu, name: RIVAL, priority: None }
    }

    /// Runs for `last`. Returns when it ran, by its own clock, because it can lose the CPU itself.
    pub fn inject(&self, last: Duration) -> io::Result<Vec<Injection>> {
        let Self { cpu, name, priority } = *self;
        let hog = std::thread::Builder::new().name(name.to_owned());
        let hog = hog.spawn(move || {
            affinity::pin(cpu)?;
            if let Some(priority) = priority {
                use_realtime_priority(priority)?;
            }
            let mut runs = Vec::new();
            let mut from_ns = monotonic_ns();
            let mut now_ns = from_ns;
            let until_ns = from_ns + nanos(last);
            while now_ns < until_ns {
                let last_ns = std::mem::replace(&mut now_ns, monotonic_ns());
                if now_ns - last_ns >= DISPLACED_NS {
                    runs.push(Injection::all(from_ns, last_ns));
                    from_ns = now_ns;
                }
            }
            runs.push(Injection::all(from_ns, now_ns));
            Ok(runs)
        })?;
        hog.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
    }
}

/// Puts the calling thread, and threads that it starts, above all ordinary threads.
pub fn use_realtime_priority(priority: i32) -> io::Result<()> {
    let parameter = libc::sched_param { sched_priority: priority };
    // SAFETY: 0 is the calling thread, and the parameter is a live one of ours.
    let set = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &parameter) };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
