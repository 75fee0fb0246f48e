//! The constant load on a service that faults are injected into.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Work of a request, in microseconds.
pub(super) const WORK_US: u64 = 200;
/// Work of one request in sixteen, with an uneven load.
const MUCH_WORK_US: u64 = 2_000;

#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    requests_a_second: u32,
    clients: u32,
    work_us: fn(u32) -> u64,
}

type Client = JoinHandle<io::Result<()>>;

impl Load {
    /// Equal requests: whatever one has more than others is injected.
    pub(super) fn even(requests_a_second: u32) -> Self {
        Self { requests_a_second, clients: 8, work_us: |_| WORK_US }
    }

    /// A load with a p99 of its own: some requests are ten times the work, which is more than what
    /// other users of the machine cost one request in a hundred. It has so many clients that hardly
    /// any is still waiting for an answer when its next request is due. Otherwise a pause would
    /// have an echo.
    pub(super) fn uneven(requests_a_second: u32) -> Self {
        let work_us = |at: u32| match at.wrapping_mul(0x9e37_79b9) >> 28 {
            0 => MUCH_WORK_US,
            _ => WORK_US,
        };
        Self { requests_a_second, clients: 64, work_us }
    }

    /// Starts clients that send at fixed times, or, if their answer comes later, as soon as it
    /// comes.
    pub(super) fn start(self, port: u16, ends: &Arc<AtomicBool>) -> io::Result<Vec<Client>> {
        let Self { requests_a_second, clients, work_us } = self;
        let every = Duration::from_secs(1) * clients / requests_a_second.max(1);
        let begin = Instant::now();
        let client = |number: u32| {
            let ends = Arc::clone(ends);
            let mut stream = TcpStream::connect(("127.0.0.1", port))?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(Duration::from_secs(60)))?;
            Ok(std::thread::spawn(move || {
                let mut next = begin + every * number / clients;
                let mut numbers = (number..).step_by(clients as usize);
                while !ends.load(Relaxed) {
                    std::thread::sleep(next.saturating_duration_since(Instant::now()));
                    next = (next + every).max(Instant::now());
                    let work_us = numbers.next().map_or(WORK_US, work_us);
                    stream.write_all(format!("{work_us}\n").as_bytes())?;
                    let mut answer = [0; 5];
                    stream.read_exact(&mut answer)?;
                }
                Ok(())
            }))
        };
        (0..clients).map(client).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_request_in_sixteen_is_much_work() {
        let Load { work_us, .. } = Load::uneven(400);
        let much = |from: u32| (from..from + 1_600).filter(|at| work_us(*at) > WORK_US).count();
        assert!([0, 1_000, 77_777].map(much).iter().all(|much| (98..=102).contains(much)));
        assert_eq!((Load::even(400).work_us)(0), WORK_US);
    }
}
