//! Keeps a CPU busy with packets: a flood of datagrams over loopback, which the kernel receives on
//! that CPU.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use elfen_rt::clock::{monotonic_ns, nanos};

use super::inject::Injection;

const STEERING: &str = "/sys/class/net/lo/queues/rx-0/rps_cpus";

/// Number of sockets that each packet goes to, so that a packet takes the kernel tens of
/// microseconds.
const RECEIVERS: usize = 256;
const BURST: u32 = 8;
/// Pause between bursts of packets.
const PAUSE: Duration = Duration::from_micros(20);
/// Time limit of a packet over loopback.
const PATIENCE: Duration = Duration::from_millis(20);

/// As in the kernel's socket address.
const FAMILY: libc::sa_family_t = 2;
const ADDRESS_BYTES: libc::socklen_t = 16;
const _: () = assert!(FAMILY as i32 == libc::AF_INET);
const _: () = assert!(size_of::<libc::sockaddr_in>() == ADDRESS_BYTES as usize);

/// Loopback's broadcast address: no other machine is reached, or can reach these sockets.
const BROADCAST: Ipv4Addr = Ipv4Addr::new(127, 255, 255, 255);

/// A socket that shares its port with others, each of which gets every broadcast.
fn shared(port: u16) -> io::Result<UdpSocket> {
    let (family, sort) = (libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC);
    // SAFETY: takes numbers.
    let fd = unsafe { libc::socket(family, sort, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so the descriptor is open, and nothing else owns it.
    let socket = UdpSocket::from(unsafe { OwnedFd::from_raw_fd(fd) });
    let on = 1_i32;
    let length = 4;
    // SAFETY: `on` is a live integer of `length` bytes.
    let set = unsafe {
        let on = (&raw const on).cast();
        libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, on, length)
    };
    let address = libc::sockaddr_in {
        sin_family: FAMILY,
        sin_port: port.to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(BROADCAST.octets()) },
        sin_zero: [0; 8],
    };
    // SAFETY: `address` is a live `sockaddr_in` of `ADDRESS_BYTES`, as asserted above.
    let bound = unsafe { libc::bind(fd, (&raw const address).cast(), ADDRESS_BYTES) };
    if set == 0 && bound == 0 { Ok(socket) } else { Err(io::Error::last_os_error()) }
}

/// Steers loopback's packets to one CPU. Another process restorer the steering when this drops or
/// the holder is killed.
#[derive(Debug)]
pub struct Flood {
    restorer: Child,
}

impl Flood {
    pub fn new(cpu: u32) -> io::Result<Self> {
        let before = fs::read_to_string(STEERING)?;
        let mut restorer = Command::new(std::env::current_exe()?);
        restorer.args(["unsteer", before.trim()]);
        // A process group of its own, so that it gets no signals from the terminal.
        let restorer = restorer.stdin(Stdio::piped()).process_group(0).spawn()?;
        // From here on the steering is restored, also if the write fails.
        let flood = Self { restorer };
        fs::write(STEERING, mask(cpu))?;
        Ok(flood)
    }

    /// Sends packets that are much work for the kernel until `ends` is set: each goes to hundreds
    /// of sockets. They go in bursts, because a burst takes only one interrupt. The next burst
    /// waits until the last one is handled, so that no work is left over.
    pub(super) fn send_until(&self, ends: &AtomicBool) -> io::Result<()> {
        let first = shared(0)?;
        let port = first.local_addr()?.port();
        let others = (1..RECEIVERS).map(|_| shared(port)).collect::<io::Result<Vec<_>>>()?;
        let sender = UdpSocket::bind("127.0.0.1:0")?;
        sender.set_broadcast(true)?;
        first.set_read_timeout(Some(PATIENCE))?;
        // Relaxed: a flag that is polled; nothing is published through it.
        while !ends.load(Relaxed) {
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
        drop(others);
        Ok(())
    }

    pub fn inject(&self, last: Duration) -> io::Result<Injection> {
        let receiver = UdpSocket::bind("127.0.0.1:0")?;
        let sender = UdpSocket::bind("127.0.0.1:0")?;
        sender.connect(receiver.local_addr()?)?;
        let from_ns = monotonic_ns();
        let began = Instant::now();
        while began.elapsed() < last {
            // No thread reads: the kernel drops what does not fit, which is work as well.
            sender.send(&[0; 64])?;
        }
        let to_ns = monotonic_ns().max(from_ns + nanos(last));
        Ok(Injection::all(from_ns, to_ns))
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        drop(self.restorer.stdin.take());
        // If it was killed, `wait` returns at once.
        let _ended = self.restorer.wait();
    }
}

/// Waits until standard input ends, as it does when the parent is gone, and then restorer the
/// steering of loopback's packets.
pub fn unsteer(before: &str) -> io::Result<()> {
    io::copy(&mut io::stdin(), &mut io::sink())?;
    fs::write(STEERING, before)
}

/// A set of CPUs in the kernel's format: words of 32 bits, the highest first.
fn mask(cpu: u32) -> String {
    let zeros = ",00000000".repeat((cpu / 32) as usize);
    format!("{:08x}{zeros}", 1_u32 << (cpu % 32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_have_the_kernels_format() {
        let expected = ["00000001", "80000000", "00000001,00000000", "00000002,00000000,00000000"];
        assert_eq!([0, 31, 32, 65].map(mask), expected);
    }
}
