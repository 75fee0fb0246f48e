//! One client's connection: what it sent and was not looked at, what it was answered and has not
//! taken.
//!
//! One request at a time: what a client sends meanwhile waits, first here up to a bound, then in
//! the kernel, then with the client. So no client holds more memory than one head and one answer.

use super::request::LONGEST_HEAD;
use mio::net::TcpStream;
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::time::Instant;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Waiting for a request to be whole.
    Reading,
    /// A worker has the request.
    Working,
    /// The answer is on its way; then either the next request, or the end.
    Writing { then_close: bool },
    /// Answered for good. What the client still sends is thrown away, so that it gets to see the
    /// answer.
    Lingering,
}

pub(super) struct Connection {
    pub(super) stream: TcpStream,
    pub(super) phase: Phase,
    pub(super) input: Vec<u8>,
    output: Vec<u8>,
    sent: usize,
    /// The kernel may have more for us: epoll says so only once.
    readable: bool,
    /// The client will send no more.
    pub(super) ended: bool,
    thrown_away: usize,
    /// When the phase began; while reading, when the request's first byte came.
    pub(super) since: Instant,
}

/// A lingering client may send this much before it is cut off.
const MOST_THROWN_AWAY: usize = 4 * 1024 * 1024;
const READ_BYTES: usize = 4 * 1024;

impl Connection {
    pub(super) fn new(stream: TcpStream, now: Instant) -> Self {
        Self {
            stream,
            phase: Phase::Reading,
            input: Vec::new(),
            output: Vec::new(),
            sent: 0,
            readable: true,
            ended: false,
            thrown_away: 0,
            since: now,
        }
    }

    pub(super) fn became_readable(&mut self) {
        self.readable = true;
    }

    /// Nothing is asked and nothing is owed.
    pub(super) fn is_idle(&self) -> bool {
        self.phase == Phase::Reading && self.input.is_empty()
    }

    /// Reads what there is, up to a whole head's worth. True if anything came.
    pub(super) fn read(&mut self, now: Instant) -> io::Result<bool> {
        let mut buffer = [0; READ_BYTES];
        let mut any = false;
        while self.readable && !self.ended && self.input.len() < LONGEST_HEAD {
            match self.stream.read(&mut buffer) {
                Ok(0) => self.ended = true,
                Ok(got) => {
                    any = true;
                    if self.input.is_empty() {
                        self.since = now;
                    }
                    self.input.extend_from_slice(&buffer[..got]);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.readable = false,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(any)
    }

    /// Drops the request at the front.
    pub(super) fn consume(&mut self, length: usize) {
        self.input.drain(..length);
        if self.input.is_empty() {
            // Ten thousand idle clients shall not hold ten thousand buffers.
            self.input = Vec::new();
        }
    }

    pub(super) fn enter(&mut self, phase: Phase, now: Instant) {
        self.phase = phase;
        self.since = now;
    }

    pub(super) fn answer(&mut self, bytes: Vec<u8>, then_close: bool, now: Instant) {
        self.output = bytes;
        self.sent = 0;
        self.enter(Phase::Writing { then_close }, now);
    }

    /// Writes what the kernel takes; true when the whole answer is sent.
    pub(super) fn write(&mut self) -> io::Result<bool> {
        while self.sent < self.output.len() {
            match self.stream.write(&self.output[self.sent..]) {
                Ok(taken) => self.sent += taken,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.output = Vec::new();
        self.sent = 0;
        Ok(true)
    }

    /// Says goodbye; true if the client has too, so that the connection can go.
    pub(super) fn linger(&mut self, now: Instant) -> io::Result<bool> {
        if self.phase != Phase::Lingering {
            self.enter(Phase::Lingering, now);
            self.input = Vec::new();
            self.stream.shutdown(Shutdown::Write)?;
        }
        let mut buffer = [0; READ_BYTES];
        while !self.ended && self.readable && self.thrown_away < MOST_THROWN_AWAY {
            match self.stream.read(&mut buffer) {
                Ok(0) => self.ended = true,
                Ok(got) => self.thrown_away += got,
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.readable = false,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(self.ended || self.thrown_away >= MOST_THROWN_AWAY)
    }
}
