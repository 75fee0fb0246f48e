//! What keeps a CPU busy with packets: a flood of datagrams over loopback, whose receiving half the
//! kernel does on that CPU.

use std::fs;
use std::io;
use std::net::UdpSocket;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use elfen_rt::clock::{monotonic_ns, nanos};

use super::inject::Injured;

const STEERING: &str = "/sys/class/net/lo/queues/rx-0/rps_cpus";

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
        Ok(Injured { from_ns, to_ns, effective_ns: to_ns - from_ns, connection: None })
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
