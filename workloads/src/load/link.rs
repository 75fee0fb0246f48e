//! One connection: a socket that never blocks, what it still has to send, and where its answers
//! end.

use super::protocol::{Parser, Protocol};
use mio::net::TcpStream;
use mio::{Interest, Registry, Token};
use std::io::{self, ErrorKind, Write};
use std::net::SocketAddr;

#[derive(Debug)]
pub(super) struct Link {
    pub(super) stream: Option<TcpStream>,
    pub(super) stands: bool,
    pub(super) parser: Parser,
    /// What the kernel did not take yet.
    unsent: Vec<u8>,
}

impl Link {
    pub(super) fn new(protocol: Protocol) -> Self {
        Self { stream: None, stands: false, parser: Parser::new(protocol), unsent: Vec::new() }
    }

    pub(super) fn open(
        &mut self,
        address: SocketAddr,
        registry: &Registry,
        token: Token,
    ) -> io::Result<()> {
        let mut stream = TcpStream::connect(address)?;
        registry.register(&mut stream, token, Interest::READABLE | Interest::WRITABLE)?;
        self.stream = Some(stream);
        Ok(())
    }

    /// Whether the connection stands now.
    pub(super) fn finish_opening(&mut self) -> io::Result<bool> {
        let Some(stream) = &self.stream else { return Ok(false) };
        if let Some(error) = stream.take_error()? {
            return Err(error);
        }
        match stream.peer_addr() {
            Ok(_) => {
                stream.set_nodelay(true)?;
                self.stands = true;
                Ok(true)
            }
            Err(error) if error.kind() == ErrorKind::NotConnected => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Hands a request to the kernel; false if it took only a part, and `flush` must follow.
    pub(super) fn send(&mut self, request: &[u8]) -> io::Result<bool> {
        if !self.unsent.is_empty() {
            self.unsent.extend_from_slice(request);
            return self.flush();
        }
        let taken = self.write(request)?;
        self.unsent.extend_from_slice(&request[taken..]);
        Ok(self.unsent.is_empty())
    }

    pub(super) fn is_clogged(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Writes what is left; true when nothing is left any more.
    pub(super) fn flush(&mut self) -> io::Result<bool> {
        let unsent = std::mem::take(&mut self.unsent);
        let taken = self.write(&unsent)?;
        self.unsent = unsent;
        self.unsent.drain(..taken);
        Ok(self.unsent.is_empty())
    }

    /// As much as the kernel takes.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let stream = self.stream.as_mut().ok_or(ErrorKind::NotConnected)?;
        let mut at = 0;
        while at < bytes.len() {
            match stream.write(&bytes[at..]) {
                Ok(taken) => at += taken,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(at)
    }

    pub(super) fn close(&mut self, protocol: Protocol) {
        // Dropping the stream takes it out of epoll.
        *self = Self::new(protocol);
    }
}
