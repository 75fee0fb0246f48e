//! What keeps a CPU busy with packets: a flood of datagrams over loopback, whose receiving half the
//! kernel does on that CPU.

use std::fs;
use std::io;
use std::net::UdpSocket;
use std::time::{Duration, Instant};

use elfen_rt::clock::{monotonic_ns, nanos};

use super::inject::Injured;

const STEERING: &str = "/sys/class/net/lo/queues/rx-0/rps_cpus";

/// Loopback's packets are steered to one CPU; where they went before, when this is dropped.
#[derive(Debug)]
pub struct Flood {
    before: String,
}

impl Flood {
    pub fn new(cpu: u32) -> io::Result<Self> {
        let before = fs::read_to_string(STEERING)?;
        fs::write(STEERING, mask(cpu))?;
        Ok(Self { before })
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
        // Who could write it before can do so again, unless the kernel is going down.
        let _restored = fs::write(STEERING, self.before.trim());
    }
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
