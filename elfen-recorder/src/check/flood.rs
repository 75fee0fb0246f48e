//! What keeps a CPU busy with packets: a flood of datagrams over loopback, whose receiving half the
//! kernel does on that CPU.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use elfen_rt::clock::{monotonic_ns, nanos};

use super::inject::Injured;

const STEERING: &str = "/sys/class/net/lo/queues/rx-0/rps_cpus";

/// Sockets that a packet goes to: then it takes the kernel tens of microseconds.
const RECEIVERS: usize = 256;
const AT_ONCE: u32 = 8;
/// Between the last of some packets and the next ones.
const PAUSE: Duration = Duration::from_micros(20);
/// For a packet over loopback.
const PATIENCE: Duration = Duration::from_millis(20);

/// As the kernel writes them into an address.
const FAMILY: libc::sa_family_t = 2;
const ADDRESS_BYTES: libc::socklen_t = 16;
const _: () = assert!(FAMILY as i32 == libc::AF_INET);
const _: () = assert!(size_of::<libc::sockaddr_in>() == ADDRESS_BYTES as usize);

/// Loopback's: nobody else is spoken to, and nobody but this machine can speak to those sockets.
const EVERYBODY: Ipv4Addr = Ipv4Addr::new(127, 255, 255, 255);

/// A socket that shares its port with others, all of which are given what goes to everybody.
fn shared(port: u16) -> io::Result<UdpSocket> {
    let (family, sort) = (libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC);
    // SAFETY: takes numbers.
    let fd = unsafe { libc::socket(family, sort, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so the descriptor is open and ours alone.
    let socket = UdpSocket::from(unsafe { OwnedFd::from_raw_fd(fd) });
    let (on, length) = (1_i32, 4);
    // SAFETY: `on` is a live integer of the length that is given.
    let set = unsafe {
        let on = (&raw const on).cast();
        libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, on, length)
    };
    let address = libc::sockaddr_in {
        sin_family: FAMILY,
        sin_port: port.to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(EVERYBODY.octets()) },
        sin_zero: [0; 8],
    };
    // SAFETY: `address` is a live one of ours, of the length that is given.
    let bound = unsafe { libc::bind(fd, (&raw const address).cast(), ADDRESS_BYTES) };
    if set == 0 && bound == 0 { Ok(socket) } else { Err(io::Error::last_os_error()) }
}

/// Loopback's packets are steered to one CPU; where they went before, when this is dropped, or
/// whoever holds it is killed: a process of its own waits for that.
#[derive(Debug)]
pub struct Flood {
    restores: Child,
}

impl Flood {
    pub fn new(cpu: u32) -> io::Result<Self> {
        let before = fs::read_to_string(STEERING)?;
        let mut restores = Command::new(std::env::current_exe()?);
        restores.args(["tailor", "unsteer", before.trim()]);
        // What a terminal sends is not for it.
        let restores = restores.stdin(Stdio::piped()).process_group(0).spawn()?;
        // From now on it is put back, also if the next line fails.
        let flood = Self { restores };
        fs::write(STEERING, mask(cpu))?;
        Ok(flood)
    }

    /// Packets that each are much work for the kernel, until told to stop: every one goes to all
    /// of some hundred sockets. Some come at once, as one interrupt is all that they take then, and
    /// the next ones when these were handled, so no work is left behind.
    pub(super) fn spread(&self, ends: &AtomicBool) -> io::Result<()> {
        let first = shared(0)?;
        let port = first.local_addr()?.port();
        let others = (1..RECEIVERS).map(|_| shared(port)).collect::<io::Result<Vec<_>>>()?;
        let sender = UdpSocket::bind("127.0.0.1:0")?;
        sender.set_broadcast(true)?;
        first.set_read_timeout(Some(PATIENCE))?;
        // Relaxed: a flag that is polled; nothing is published through it.
        while !ends.load(Relaxed) {
            for _ in 0..AT_ONCE {
                sender.send_to(&[0; 64], (EVERYBODY, port))?;
            }
            for _ in 0..AT_ONCE {
                // One that was dropped is waited for in vain, and no more.
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

    pub fn hurt(&self, last: Duration) -> io::Result<Injured> {
        let receiver = UdpSocket::bind("127.0.0.1:0")?;
        let sender = UdpSocket::bind("127.0.0.1:0")?;
        sender.connect(receiver.local_addr()?)?;
        let (from_ns, began) = (monotonic_ns(), Instant::now());
        while began.elapsed() < last {
            // Nobody reads: what does not fit is dropped there, which is work as well.
            sender.send(&[0; 64])?;
        }
        let to_ns = monotonic_ns().max(from_ns + nanos(last));
        Ok(Injured::all(from_ns, to_ns))
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        drop(self.restores.stdin.take());
        // Who was killed himself leaves nothing to wait for.
        let _ended = self.restores.wait();
    }
}

/// Waits until standard input ends, which it does when whoever started this is gone, and has
/// loopback's packets go where they went before.
pub fn unsteer(before: &str) -> io::Result<()> {
    io::copy(&mut io::stdin(), &mut io::sink())?;
    fs::write(STEERING, before)
}

/// As the kernel reads a set of CPUs: words of 32 bits, the highest first.
fn mask(cpu: u32) -> String {
    let zeros = ",00000000".repeat((cpu / 32) as usize);
    format!("{:08x}{zeros}", 1_u32 << (cpu % 32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_as_the_kernel_reads_them() {
        let expected = ["00000001", "80000000", "00000001,00000000", "00000002,00000000,00000000"];
        assert_eq!([0, 31, 32, 65].map(mask), expected);
    }
}
