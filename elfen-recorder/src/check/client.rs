//! The injector's own requests: each says by its client's clock from when to when it took what.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use elfen_rt::clock::{monotonic_ns, nanos};
use elfen_tailor::request::connection;

use super::inject::Injured;
use super::server::{PIECES, READ, SPIN, TURN, WAITED};

const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(super) struct Asker {
    stream: TcpStream,
    /// As the account names it.
    connection: u64,
}

impl Asker {
    pub(super) fn connect(port: u16) -> io::Result<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let SocketAddr::V4(address) = stream.local_addr()? else {
            return Err(io::ErrorKind::AddrNotAvailable.into());
        };
        Ok(Self { stream, connection: connection(address) })
    }

    /// From when to now, of which so much was the cause's.
    fn injured(&self, from_ns: u64, effective_ns: u64) -> Injured {
        let to_ns = monotonic_ns();
        Injured { from_ns, to_ns, effective_ns, connection: Some(self.connection) }
    }

    /// At once: a request in two pieces is told from two requests by nobody.
    fn ask(&mut self, line: &[u8]) -> io::Result<u64> {
        let from_ns = monotonic_ns();
        self.stream.write_all(line)?;
        Ok(from_ns)
    }

    /// One request with much work.
    pub(super) fn long(&mut self, work: Duration) -> io::Result<Injured> {
        let from_ns = self.ask(format!("{}\n", work.as_micros()).as_bytes())?;
        self.stream.read_exact(&mut [0; 5])?;
        Ok(self.injured(from_ns, nanos(work)))
    }

    /// One that touches the service's file, which says how long it waited.
    pub(super) fn read(&mut self) -> io::Result<Injured> {
        self.waits(READ)
    }

    /// One that spins for so long, which says for how long it was kept from that.
    pub(super) fn spin(&mut self, time: Duration) -> io::Result<Injured> {
        self.waits(format!("{SPIN}{}\n", time.as_micros()).as_bytes())
    }

    /// Has a service in Java collect its heap.
    pub(super) fn collect(&mut self) -> io::Result<()> {
        self.ask(b"collect\n")?;
        self.stream.read_exact(&mut [0; 5])
    }

    /// Has a service in Java load so many classes, which says how long it worked for that.
    pub(super) fn load(&mut self, classes: u32) -> io::Result<Injured> {
        self.waits(format!("load {classes}\n").as_bytes())
    }

    fn waits(&mut self, line: &[u8]) -> io::Result<Injured> {
        let from_ns = self.ask(line)?;
        let waited_ns = self.number()?;
        Ok(self.injured(from_ns, waited_ns))
    }

    /// An answer that says a time.
    fn number(&mut self) -> io::Result<u64> {
        let mut answer = [0; WAITED];
        self.stream.read_exact(&mut answer)?;
        let text = std::str::from_utf8(&answer).map_err(io::Error::other)?;
        text.trim().parse().map_err(io::Error::other)
    }

    /// One whose answer comes in two pieces: what lies between them is how long it was held.
    pub(super) fn pieces(&mut self) -> io::Result<Injured> {
        // By now TCP takes it for a conversation, in which an acknowledgement waits for data.
        for _ in 0..WARM {
            self.ask(b"1\n")?;
            self.stream.read_exact(&mut [0; 5])?;
        }
        let from_ns = self.ask(PIECES)?;
        self.stream.read_exact(&mut [0; 2])?;
        let first_ns = monotonic_ns();
        self.stream.read_exact(&mut [0; 3])?;
        Ok(self.injured(from_ns, monotonic_ns() - first_ns))
    }
}

/// Requests after which a connection is no new one to TCP.
const WARM: u32 = 40;
/// Sending over loopback takes a tenth of that.
const SENT_IN: Duration = Duration::from_micros(100);

/// A request of each, all at once, of which the service says when its turn came. Who was kept from
/// sending does not know when his request came, and says nothing.
pub(super) fn at_once(crowd: &mut [Asker], work_us: u64) -> io::Result<Vec<Injured>> {
    let line = format!("{TURN}{work_us}\n");
    let asked = crowd.iter_mut().map(|asker| {
        let from_ns = asker.ask(line.as_bytes())?;
        Ok((from_ns, monotonic_ns() - from_ns < nanos(SENT_IN)))
    });
    let asked = asked.collect::<io::Result<Vec<(u64, bool)>>>()?;
    let answered = |(asker, (from_ns, knows)): (&mut Asker, (u64, bool))| {
        let turn_ns = asker.number()?;
        let waited_ns = if knows { turn_ns.saturating_sub(from_ns) } else { 0 };
        Ok(asker.injured(from_ns, waited_ns))
    };
    crowd.iter_mut().zip(asked).map(answered).collect()
}
