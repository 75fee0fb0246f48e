//! Sends the injector's own requests. Their times are measured by the client's clock.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use elfen_rt::clock::{monotonic_ns, nanos};
use elfen_tailor::request::connection;

use super::injectors::Injection;
use super::server::{NUMBER_BYTES, PIECES, READ, SPIN, START};

const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(super) struct InjectorClient {
    stream: TcpStream,
    /// The number of the connection in the trace.
    connection: u64,
}

impl InjectorClient {
    pub(super) fn connect(port: u16) -> io::Result<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let SocketAddr::V4(address) = stream.local_addr()? else {
            return Err(io::ErrorKind::AddrNotAvailable.into());
        };
        Ok(Self { stream, connection: connection(address) })
    }

    /// Returns a fault from `from_ns` until now that had an effect for `effective_ns`.
    fn injection(&self, from_ns: u64, effective_ns: u64) -> Injection {
        let to_ns = monotonic_ns();
        Injection { from_ns, to_ns, effective_ns, connection: Some(self.connection) }
    }

    /// Sends a line in one write. Several writes would look like several requests.
    fn send(&mut self, line: &[u8]) -> io::Result<u64> {
        let from_ns = monotonic_ns();
        self.stream.write_all(line)?;
        Ok(from_ns)
    }

    /// Sends a request with a long service time.
    pub(super) fn long(&mut self, work: Duration) -> io::Result<Injection> {
        let from_ns = self.send(format!("{}\n", work.as_micros()).as_bytes())?;
        self.stream.read_exact(&mut [0; 5])?;
        Ok(self.injection(from_ns, nanos(work)))
    }

    /// Sends a request that reads the service's file. The answer is the time that the service
    /// waited for it.
    pub(super) fn read(&mut self) -> io::Result<Injection> {
        self.request_time(READ)
    }

    /// Sends a request that spins. The answer is the time during which the service did not run.
    pub(super) fn spin(&mut self, time: Duration) -> io::Result<Injection> {
        self.request_time(format!("{SPIN}{}\n", time.as_micros()).as_bytes())
    }

    /// Makes a service in Java collect its heap.
    pub(super) fn collect(&mut self) -> io::Result<()> {
        self.send(b"collect\n")?;
        self.stream.read_exact(&mut [0; 5])
    }

    /// Makes a service in Java load this many classes. The answer is the CPU time of the loading.
    pub(super) fn load(&mut self, classes: u32) -> io::Result<Injection> {
        self.request_time(format!("load {classes}\n").as_bytes())
    }

    fn request_time(&mut self, line: &[u8]) -> io::Result<Injection> {
        let from_ns = self.send(line)?;
        let waited_ns = self.read_number()?;
        Ok(self.injection(from_ns, waited_ns))
    }

    /// Reads an answer that is a number.
    fn read_number(&mut self) -> io::Result<u64> {
        let mut answer = [0; NUMBER_BYTES];
        self.stream.read_exact(&mut answer)?;
        let text = std::str::from_utf8(&answer).map_err(io::Error::other)?;
        text.trim().parse().map_err(io::Error::other)
    }

    /// Sends a request with an answer in two pieces. The time between the pieces is the time for
    /// which TCP delayed the second.
    pub(super) fn pieces(&mut self) -> io::Result<Injection> {
        // After these requests, TCP treats the connection as interactive and delays its
        // acknowledgements.
        for _ in 0..WARM {
            self.send(b"1\n")?;
            self.stream.read_exact(&mut [0; 5])?;
        }
        let from_ns = self.send(PIECES)?;
        self.stream.read_exact(&mut [0; 2])?;
        let first_ns = monotonic_ns();
        self.stream.read_exact(&mut [0; 3])?;
        Ok(self.injection(from_ns, monotonic_ns() - first_ns))
    }
}

/// The number of requests after which TCP does not treat a connection as new.
const WARM: u32 = 40;
/// If sending takes longer, the client was delayed. Sending over loopback takes a tenth of this
/// time.
const SENT_IN: Duration = Duration::from_micros(100);

/// Sends a request from each client at the same time. The service reports when each request
/// started. If a client was delayed while sending, it does not know when its request arrived, and
/// reports 0.
pub(super) fn send_burst(
    clients: &mut [InjectorClient],
    work_us: u64,
) -> io::Result<Vec<Injection>> {
    let line = format!("{START}{work_us}\n");
    let sent = clients.iter_mut().map(|client| {
        let from_ns = client.send(line.as_bytes())?;
        Ok((from_ns, monotonic_ns() - from_ns < nanos(SENT_IN)))
    });
    let sent = sent.collect::<io::Result<Vec<(u64, bool)>>>()?;
    let answered = |(client, (from_ns, knows)): (&mut InjectorClient, (u64, bool))| {
        let started_ns = client.read_number()?;
        let waited_ns = if knows { started_ns.saturating_sub(from_ns) } else { 0 };
        Ok(client.injection(from_ns, waited_ns))
    };
    clients.iter_mut().zip(sent).map(answered).collect()
}
