//! Injectors: each puts a fault into a process for a while, and measures by its own clock when.
//!
//! | injector | fault |
//! | --- | --- |
//! | [`Stop`] | a signal stops the process |
//! | [`Hog`] | a thread takes the process's CPU |
//! | [`PageOut`] | the process's files are evicted from memory |
//! | [`Flood`] | packets keep the process's CPU busy |
//!
//! `client` has the requests that are faults themselves.

use std::ffi::c_void;
use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use elfen_machine::affinity;
use elfen_machine::placement::set_policy;
use elfen_machine::process::stat;
use elfen_rt::clock::{monotonic_ns, nanos};
use serde::{Deserialize, Serialize};
use socket2::{Domain, Socket, Type};

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

/// A process that can be stopped, and continues when this drops. By a pidfd, no other process with
/// the same id can be hit. Unlike `elfen_machine::pidfd`, this reports a refused signal.
#[derive(Debug)]
pub struct Stop {
    process: u32,
    descriptor: OwnedFd,
}

/// Time for a stop to take effect: the process may be kept from its CPU.
const STOP_MAX: Duration = Duration::from_secs(2);

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

    pub fn inject(&self, length: Duration) -> io::Result<Vec<Injection>> {
        self.send(libc::SIGSTOP)?;
        let sent_at = Instant::now();
        // It stops only when it runs; what keeps it from its CPU is another cause.
        while !self.is_stopped() && sent_at.elapsed() < STOP_MAX {
            std::hint::spin_loop();
        }
        let from_ns = monotonic_ns();
        std::thread::sleep(length);
        let to_ns = monotonic_ns();
        self.send(libc::SIGCONT)?;
        Ok(vec![Injection::all(from_ns, to_ns)])
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
    /// The name of its thread, which the explanation shows.
    name: &'static str,
    priority: Option<i32>,
}

/// One iteration of its loop takes less. After a longer one it had lost the CPU.
const DISPLACED_NS: u64 = 20_000;

impl Hog {
    /// A hog that takes the CPU from all threads but real-time threads above it.
    pub fn new(cpu: u32) -> Self {
        Self { cpu, name: "elfen-hog", priority: Some(50) }
    }

    /// A hog that shares the CPU by the scheduler's rules.
    pub fn rival(cpu: u32) -> Self {
        Self { cpu, name: "elfen-rival", priority: None }
    }

    /// Runs for `length`. Returns when it ran by its own clock, because it can lose the CPU itself.
    pub fn inject(&self, length: Duration) -> io::Result<Vec<Injection>> {
        let Self { cpu, name, priority } = *self;
        let hog = std::thread::Builder::new().name(name.to_owned());
        let hog = hog.spawn(move || {
            affinity::pin(cpu)?;
            if let Some(priority) = priority {
                set_policy(0, libc::SCHED_FIFO, priority)?;
            }
            let mut runs = Vec::new();
            let mut from_ns = monotonic_ns();
            let mut now_ns = from_ns;
            let until_ns = from_ns + nanos(length);
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

/// A process whose mapped files are evicted from memory, so that the next access waits for a disk.
#[derive(Debug)]
pub struct PageOut(Stop);

impl PageOut {
    pub fn new(process: u32) -> io::Result<Self> {
        Stop::new(process).map(Self)
    }

    /// Evicts the data of mapped files, but not their code. Returns how long that took.
    pub fn inject(&self) -> io::Result<Vec<Injection>> {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.0.process))?;
        let ranges: Vec<libc::iovec> = maps.lines().filter_map(range).collect();
        let from_ns = monotonic_ns();
        evict(&ranges, |range| self.advise(range))?;
        Ok(vec![Injection::all(from_ns, monotonic_ns())])
    }

    /// Asks the kernel to evict a range of the process.
    fn advise(&self, range: &libc::iovec) -> io::Result<()> {
        let fd = self.0.descriptor.as_raw_fd();
        // SAFETY: `range` is a live one of ours. Its addresses are in the other process, and the
        // kernel checks them.
        let done = unsafe {
            libc::syscall(libc::SYS_process_madvise, fd, range, 1, libc::MADV_PAGEOUT, 0)
        };
        if done >= 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// Evicts all that can be evicted. A mapping that can't be (locked, of huge pages, or gone) is
/// skipped, unless no other is left.
fn evict<T>(ranges: &[T], mut advise: impl FnMut(&T) -> io::Result<()>) -> io::Result<()> {
    let mut refused = io::Error::other("it has mapped no file's data");
    let mut evicted = 0;
    for range in ranges {
        match advise(range) {
            Ok(()) => evicted += 1,
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOMEM)) => {
                refused = error;
            }
            Err(error) => return Err(error),
        }
    }
    if evicted > 0 { Ok(()) } else { Err(refused) }
}

/// Parses a line of /proc/PID/maps. Returns `None` unless it is data of a file on a disk.
fn range(line: &str) -> Option<libc::iovec> {
    let mut fields = line.split_whitespace();
    let range = fields.next()?;
    let rights = fields.next()?;
    let path = fields.nth(3)?;
    let is_data = rights.starts_with('r') && !rights.contains('x') && path.starts_with('/');
    if !is_data || path.starts_with("/dev/") || path.starts_with("/memfd:") {
        return None;
    }
    let (from, to) = range.split_once('-')?;
    let from = usize::from_str_radix(from, 16).ok()?;
    let to = usize::from_str_radix(to, 16).ok()?;
    let iov_base = std::ptr::without_provenance_mut::<c_void>(from);
    Some(libc::iovec { iov_base, iov_len: to.checked_sub(from)? })
}

const STEERING: &str = "/sys/class/net/lo/queues/rx-0/rps_cpus";

/// Number of sockets that each packet goes to, so that a packet takes the kernel tens of
/// microseconds.
const RECEIVERS: usize = 256;
const BURST: u32 = 8;
/// Pause between bursts of packets.
const PAUSE: Duration = Duration::from_micros(20);
/// Time limit of a packet over loopback.
const PACKET_MAX: Duration = Duration::from_millis(20);
/// Loopback's broadcast address: no other machine is reached, or can reach these sockets.
const BROADCAST: Ipv4Addr = Ipv4Addr::new(127, 255, 255, 255);

/// A socket that shares its port with others, each of which gets every broadcast.
fn shared(port: u16) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&SocketAddrV4::new(BROADCAST, port).into())?;
    Ok(socket.into())
}

/// Steers loopback's packets to one CPU. Another process restores the steering when this drops or
/// the holder is killed.
#[derive(Debug)]
pub struct Flood {
    restorer: Child,
}

impl Flood {
    pub fn new(cpu: u32) -> io::Result<Self> {
        let before = fs::read_to_string(STEERING)?;
        let mut restorer = Command::new("sh");
        // Its standard input ends when this process is gone.
        restorer.args(["-c", "cat >/dev/null; echo $0 >$1", before.trim(), STEERING]);
        // A process group of its own, so that it gets no signals from the terminal.
        let restorer = restorer.stdin(Stdio::piped()).process_group(0).spawn()?;
        // From here on the steering is restored, also if the write fails.
        let flood = Self { restorer };
        fs::write(STEERING, mask(cpu))?;
        Ok(flood)
    }

    /// Sends packets that are much work for the kernel while `go_on`: each goes to hundreds of
    /// sockets. They go in bursts, because a burst takes only one interrupt. The next burst waits
    /// until the last one is handled, so that no work is left over.
    pub(super) fn send_while(&self, go_on: impl Fn() -> bool) -> io::Result<()> {
        let first = shared(0)?;
        let port = first.local_addr()?.port();
        let _others = (1..RECEIVERS).map(|_| shared(port)).collect::<io::Result<Vec<_>>>()?;
        let sender = UdpSocket::bind("127.0.0.1:0")?;
        sender.set_broadcast(true)?;
        first.set_read_timeout(Some(PACKET_MAX))?;
        while go_on() {
            for _ in 0..BURST {
                sender.send_to(&[0; 64], (BROADCAST, port))?;
            }
            for _ in 0..BURST {
                // A dropped packet costs only the read timeout.
                let _dropped = first.recv(&mut [0; 64]);
            }
            let next = Instant::now() + PAUSE;
            while Instant::now() < next {
                std::hint::spin_loop();
            }
        }
        Ok(())
    }

    pub fn inject(&self, length: Duration) -> io::Result<Vec<Injection>> {
        let from_ns = monotonic_ns();
        let began = Instant::now();
        self.send_while(|| began.elapsed() < length)?;
        Ok(vec![Injection::all(from_ns, monotonic_ns())])
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        drop(self.restorer.stdin.take());
        // If it was killed, `wait` returns at once.
        let _ended = self.restorer.wait();
    }
}

/// A set of CPUs in the kernel's format: words of 32 bits, the highest first.
fn mask(cpu: u32) -> String {
    let zeros = ",00000000".repeat((cpu / 32) as usize);
    format!("{:08x}{zeros}", 1_u32 << (cpu % 32))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: mappings that can't be evicted are skipped; another error ends it. Method: a model of
    /// process_madvise(2) that refuses some.
    #[test]
    fn refused_mappings_are_skipped() {
        let all: Vec<usize> = (0..10).collect();
        let run = |refuses: &dyn Fn(usize) -> bool, error: i32| {
            let mut evicted = Vec::new();
            let result = evict(&all, |&at| {
                if refuses(at) {
                    return Err(io::Error::from_raw_os_error(error));
                }
                evicted.push(at);
                Ok(())
            });
            (evicted, result.map_err(|error| error.raw_os_error()))
        };
        let some = run(&|at| [0, 7, 8].contains(&at), libc::EINVAL);
        assert_eq!(some, (vec![1, 2, 3, 4, 5, 6, 9], Ok(())));
        assert_eq!(run(&|_| true, libc::ENOMEM), (Vec::new(), Err(Some(libc::ENOMEM))));
        assert_eq!(run(&|at| at > 5, libc::ESRCH).1, Err(Some(libc::ESRCH)));
        assert!(evict(&[0; 0], |_| Ok(())).is_err(), "nothing is mapped");
    }

    #[test]
    fn masks_have_the_kernels_format() {
        let expected = ["00000001", "80000000", "00000001,00000000", "00000002,00000000,00000000"];
        assert_eq!([0, 31, 32, 65].map(mask), expected);
    }

    #[test]
    fn only_data_of_files_is_evicted() {
        let line = |rights: &str, path: &str| {
            let line = format!("7f0000001000-7f0000003000 {rights} 00000000 fe:00 12 {path}");
            range(&line).map(|range| (range.iov_base.addr(), range.iov_len))
        };
        assert_eq!(line("r--s", "/srv/index"), Some((0x7f00_0000_1000, 0x2000)));
        for (rights, path) in [("r-xp", "/usr/lib/a.so"), ("---p", "/srv/index")] {
            assert_eq!(line(rights, path), None);
        }
        let kernels = ["[heap]", "", "/dev/shm/a", "/memfd:a"];
        assert!(kernels.iter().all(|path| line("rw-p", path).is_none()));
    }
}
