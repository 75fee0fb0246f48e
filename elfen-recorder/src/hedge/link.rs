//! A connection to a server: one request at a time goes in, and its answer is told apart from what
//! follows.

use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::rc::Rc;

use elfen_hedge_policy::Server;
use mio::net::TcpStream;

use super::body::Body;
use super::client::Request;
use super::head::{self, AnswerHead, LONGEST};

/// For whom a connection works.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum For {
    /// A client, by its place.
    Client(usize),
    /// Its server, which was started anew and is to be warm.
    Warming,
    /// Nobody any more: the answer came from the other server first.
    Nobody,
}

#[derive(Debug)]
pub(super) struct Link {
    pub(super) stream: TcpStream,
    pub(super) server: Server,
    /// It has had no answer before, so a failure is the server's.
    pub(super) fresh: bool,
    /// `None` while it waits for a request.
    pub(super) works_for: Option<For>,
    /// Its client takes no more for now.
    pub(super) stalled: bool,
    /// What nobody waits for, of this answer.
    pub(super) drained: usize,
    request: Option<Rc<Request>>,
    sent: usize,
    inbox: Vec<u8>,
    scanned: usize,
    body: Option<Body>,
    closes: bool,
    heard: bool,
}

/// What came of an answer.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum Piece<'a> {
    /// Its head; the body follows.
    Head(AnswerHead),
    Body(&'a [u8]),
}

/// How a connection goes on after what has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Next {
    /// More is to come.
    Reads,
    /// The answer is whole, and the next request may come.
    Rests,
    /// The answer is whole, and so is the connection's life.
    Ends,
    /// There is no whole answer, and there will be none.
    Broken,
}

/// How a connection to a server ended without an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Failure {
    pub(super) server: Server,
    pub(super) fresh: bool,
    pub(super) unsent: bool,
    pub(super) heard: bool,
}

impl Link {
    pub(super) fn connect(server: Server, to: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect(to)?;
        // A kernel that can't send at once sends later.
        let _slower = stream.set_nodelay(true);
        Ok(Self {
            stream,
            server,
            fresh: true,
            works_for: None,
            stalled: false,
            drained: 0,
            request: None,
            sent: 0,
            inbox: Vec::new(),
            scanned: 0,
            body: None,
            closes: false,
            heard: false,
        })
    }

    pub(super) fn begin(&mut self, request: Rc<Request>, works_for: For) {
        self.works_for = Some(works_for);
        self.request = Some(request);
        (self.sent, self.scanned, self.drained) = (0, 0, 0);
        (self.body, self.heard, self.stalled) = (None, false, false);
        self.inbox.clear();
    }

    /// Nothing of the request can have reached the server.
    pub(super) fn is_unsent(&self) -> bool {
        self.sent == 0
    }

    /// The server has said something of the answer.
    pub(super) fn is_heard(&self) -> bool {
        self.heard
    }

    /// Sends what the server takes of the request. That it takes no more is told by what is read.
    pub(super) fn write(&mut self) -> io::Result<()> {
        let Some(request) = &self.request else { return Ok(()) };
        while self.sent < request.bytes.len() {
            match self.stream.write(&request.bytes[self.sent..]) {
                Ok(0) => break,
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::NotConnected
                    ) =>
                {
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads once; 0 bytes: the server has ended it.
    pub(super) fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.stream.read(bytes) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => return read,
            }
        }
    }

    /// Takes what was read, and hands on what is of the answer.
    pub(super) fn take(
        &mut self,
        bytes: &[u8],
        mut hand_on: impl FnMut(&mut Self, Piece<'_>),
    ) -> Next {
        let Some(request) = self.request.clone() else { return Next::Broken };
        self.heard = true;
        if self.body.is_some() {
            return self.pass(bytes, &mut hand_on);
        }
        self.inbox.extend(bytes);
        loop {
            let Some(end) = head::end(&self.inbox, self.scanned) else {
                self.scanned = self.inbox.len();
                return if self.inbox.len() > LONGEST { Next::Broken } else { Next::Reads };
            };
            let Some(head) = head::answer(&self.inbox[..end], &request.method) else {
                return Next::Broken;
            };
            self.inbox.drain(..end);
            self.scanned = 0;
            // The one that counts is still to come.
            if head.code < 200 {
                continue;
            }
            (self.body, self.closes) = (Some(head.body), head.closes);
            hand_on(self, Piece::Head(head));
            let rest = std::mem::take(&mut self.inbox);
            return self.pass(&rest, &mut hand_on);
        }
    }

    fn pass(&mut self, bytes: &[u8], hand_on: &mut impl FnMut(&mut Self, Piece<'_>)) -> Next {
        let Some(body) = &mut self.body else { return Next::Broken };
        let Ok(passed) = body.pass(bytes) else { return Next::Broken };
        let is_done = body.is_done();
        if passed > 0 {
            hand_on(self, Piece::Body(&bytes[..passed]));
        }
        match (is_done, self.closes || passed < bytes.len()) {
            (false, _) => Next::Reads,
            // More than was asked for: nothing that follows could be trusted.
            (true, true) => Next::Ends,
            (true, false) => Next::Rests,
        }
    }

    /// The server has ended the connection: of some answers that is the end.
    pub(super) fn ended(&self) -> Next {
        if self.body == Some(Body::UntilClose) { Next::Ends } else { Next::Broken }
    }

    /// Waits for the next request.
    pub(super) fn rest(&mut self) {
        (self.works_for, self.request, self.body) = (None, None, None);
        self.fresh = false;
    }
}
