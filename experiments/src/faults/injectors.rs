//! Injectors: each puts a fault into a process for some time, and measures this time with its own
//! clock.
//!
//! | injector | fault |
//! | --- | --- |
//! | [`Stop`] | a signal stops the process |
//! | [`Hog`] | a thread takes the process's CPU |
//! | [`PageOut`] | the process's files are evicted from memory |
//! | [`Flood`] | packets keep the process's CPU busy |
//!
//! `client` sends the requests that are faults themselves.

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

/// When a fault happened and which request it affected.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Injection {
    pub from_ns: u64,
    pub to_ns: u64,
    /// For how long the fault had an effect in this time.
    pub effective_ns: u64,
    /// The connection of the affected request, if the fault is one of the injector's own requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connection: Option<u64>,
}

impl Injection {
    /// Returns a fault that affects every request that overlaps with it, for the time of the
    /// overlap.
    pub fn all(from_ns: u64, to_ns: u64) -> Self {
        Self { from_ns, to_ns, effective_ns: to_ns - from_ns, connection: None }
    }
}

/// A process that can be stopped. It continues when this value is dropped.
///
/// The process is held by a pidfd, so signals cannot reach another process that gets the same id.
/// Unlike `elfen_machine::pidfd`, this type reports a refused signal.
#[derive(Debug)]
pub struct Stop {
    process: u32,
    descriptor: OwnedFd,
}

/// The time limit for a stop to take effect. The process may be waiting for its CPU.
const STOP_MAX: Duration = Duration::from_secs(2);

impl Stop {
    pub fn new(process: u32) -> io::Result<Self> {
        let id = libc::pid_t::try_from(process).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: the call only takes numbers.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, id, 0) };
        let fd = i32::try_from(fd).map_err(|_| io::ErrorKind::InvalidData)?;
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call succeeded, so the descriptor is open and only this value owns it.
        let descriptor = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { process, descriptor })
    }

    fn send(&self, signal: i32) -> io::Result<()> {
        let null = std::ptr::null::<libc::siginfo_t>();
        let fd = self.descriptor.as_raw_fd();
        // SAFETY: the call takes numbers and a null pointer, for which the kernel fills in the
        // siginfo.
        let sent = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, fd, signal, null, 0) };
        if sent == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    fn is_stopped(&self) -> bool {
        stat(self.process).is_some_and(|stat| stat.state == 'T')
    }

    pub fn inject(&self, length: Duration) -> io::Result<Vec<Injection>> {
        self.send(libc::SIGSTOP)?;
        let sent_at = Instant::now();
        // The process stops only when it runs. The time that it waits for its CPU belongs to
        // another cause.
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
        // The process may have ended; then this does nothing.
        let _gone = self.send(libc::SIGCONT);
    }
}

/// A thread that uses up a CPU. It runs above all ordinary threads, or at an equal priority.
#[derive(Debug)]
pub struct Hog {
    cpu: u32,
    /// The name of the thread, which the explanation shows.
    name: &'static str,
    priority: Option<i32>,
}

/// A longer iteration of its loop means that the hog lost the CPU.
const DISPLACED_NS: u64 = 20_000;

impl Hog {
    /// Creates a hog that takes the CPU from all threads except real-time threads of a higher
    /// priority.
    pub fn new(cpu: u32) -> Self {
        Self { cpu, name: "elfen-hog", priority: Some(50) }
    }

    /// Creates a hog that shares the CPU by the scheduler's rules.
    pub fn rival(cpu: u32) -> Self {
        Self { cpu, name: "elfen-rival", priority: None }
    }

    /// Runs for `length`. Returns when the hog ran, by its own clock, because it can lose the CPU
    /// too.
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

/// A process whose mapped files can be evicted from memory, so that the next access waits for a
/// disk.
#[derive(Debug)]
pub struct PageOut(Stop);

impl PageOut {
    pub fn new(process: u32) -> io::Result<Self> {
        Stop::new(process).map(Self)
    }

    /// Evicts the data of mapped files, but not their code. Returns how long the eviction took.
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
        // SAFETY: the borrow keeps `range` alive during the call. Its addresses belong to the other
        // process, and the kernel checks them.
        let done = unsafe {
            libc::syscall(libc::SYS_process_madvise, fd, range, 1, libc::MADV_PAGEOUT, 0)
        };
        if done >= 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// Evicts all mappings that can be evicted. Mappings that cannot be evicted (locked, of huge pages,
/// or gone) are skipped. If none could be evicted, returns the last error.
fn evict<T>(ranges: &[T], mut advise: impl FnMut(&T) -> io::Result<()>) -> io::Result<()> {
    let mut refused = io::Error::other("it has no mapped files");
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

/// Parses a line of /proc/PID/maps. Returns `None` unless the mapping is data of a file on a disk.
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

/// The number of sockets that receive each packet. With this number, the kernel needs tens of
/// microseconds for one packet.
const RECEIVERS: usize = 256;
const BURST: u32 = 8;
/// The pause between bursts of packets.
const PAUSE: Duration = Duration::from_micros(20);
/// The time limit for a packet over loopback.
const PACKET_MAX: Duration = Duration::from_millis(20);
/// Loopback's broadcast address. Packets to it do not leave the machine, and other machines cannot
/// send to these sockets.
const BROADCAST: Ipv4Addr = Ipv4Addr::new(127, 255, 255, 255);

/// Returns a socket that shares its port with others. Each of them receives every broadcast.
fn shared(port: u16) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&SocketAddrV4::new(BROADCAST, port).into())?;
    Ok(socket.into())
}

/// Steers loopback's packets to one CPU. Another process restores the old setting when this value
/// is dropped or this process is killed.
#[derive(Debug)]
pub struct Flood {
    restorer: Child,
}

impl Flood {
    pub fn new(cpu: u32) -> io::Result<Self> {
        let before = fs::read_to_string(STEERING)?;
        let mut restorer = Command::new("sh");
        // The standard input of the child ends when this process ends.
        restorer.args(["-c", "cat >/dev/null; echo $0 >$1", before.trim(), STEERING]);
        // The child gets a process group of its own, so that the terminal sends it no signals.
        let restorer = restorer.stdin(Stdio::piped()).process_group(0).spawn()?;
        // From here on, the old setting is restored, even if the write fails.
        let flood = Self { restorer };
        fs::write(STEERING, mask(cpu))?;
        Ok(flood)
    }

    /// Sends packets while `go_on` returns true. Each packet goes to hundreds of sockets, which is
    /// much work for the kernel.
    ///
    /// Packets are sent in bursts, because a burst causes only one interrupt. The next burst waits
    /// until the kernel has handled the last one, so that no work is left at the end.
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
                // If a packet was dropped, this waits for the read timeout.
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
        // If the child was killed, `wait` returns immediately.
        let _ended = self.restorer.wait();
    }
}

/// Returns a set with one CPU in the kernel's format: words of 32 bits, the highest first.
fn mask(cpu: u32) -> String {
    let zeros = ",00000000".repeat((cpu / 32) as usize);
    format!("{:08x}{zeros}", 1_u32 << (cpu % 32))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: mappings that cannot be evicted are skipped, and any other error ends the eviction.
    /// Method: a model of process_madvise(2) that refuses some mappings.
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
