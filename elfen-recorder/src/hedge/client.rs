//! A client's connection: requests come whole out of it, one at a time, and answers go into it.

use std::io::{self, Read, Write};
use std::rc::Rc;

use mio::net::TcpStream;

use super::body::Body;
use super::head::{self, BAD, LONGEST, Refusal, RequestHead, TOO_LARGE, TOO_LONG};

/// A request is kept until it is answered, since it may have to be sent again.
const MOST_BODY: usize = 1 << 20;
const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// A whole request, as servers get it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Request {
    pub(super) method: String,
    pub(super) bytes: Vec<u8>,
    /// The connection ends with its answer.
    pub(super) closes: bool,
}

/// Bytes on their way out.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    bytes: Vec<u8>,
    sent: usize,
}

impl Outbox {
    pub(super) fn add(&mut self, bytes: &[u8]) {
        if self.sent == self.bytes.len() {
            self.bytes.clear();
            self.sent = 0;
        }
        self.bytes.extend(bytes);
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len() - self.sent
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sends as much as the other side takes.
    pub(super) fn send(&mut self, to: &mut TcpStream) -> io::Result<()> {
        while !self.is_empty() {
            match to.write(&self.bytes[self.sent..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        // What was sent is not kept as long as the connection.
        if self.sent > LONGEST {
            self.bytes.drain(..self.sent);
            self.sent = 0;
        }
        Ok(())
    }
}

/// What came from a connection and is not used yet.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    bytes: Vec<u8>,
    /// Of a head, what was looked through for its end.
    scanned: usize,
    /// The head, what is left of its body, and how much of that is here.
    begun: Option<(RequestHead, Body, usize)>,
}

impl Inbox {
    /// Takes what there is; whether the other side has ended.
    pub(super) fn read(&mut self, from: &mut impl Read) -> io::Result<bool> {
        let mut bytes = [0; 16 << 10];
        while self.bytes.len() < LONGEST + MOST_BODY {
            match from.read(&mut bytes) {
                Ok(0) => return Ok(true),
                Ok(count) => self.bytes.extend(&bytes[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }

    /// The next request, if it is whole; `answers` gets what a client waits for before it goes on.
    pub(super) fn next(&mut self, answers: &mut Outbox) -> Result<Option<Request>, Refusal> {
        if self.begun.is_none() {
            let blank = self.bytes.iter().take_while(|byte| b"\r\n".contains(byte)).count();
            self.bytes.drain(..blank);
            self.scanned = self.scanned.saturating_sub(blank);
            let Some(end) = head::end(&self.bytes, self.scanned) else {
                self.scanned = self.bytes.len();
                return if self.bytes.len() > LONGEST { Err(TOO_LONG) } else { Ok(None) };
            };
            if end > LONGEST {
                return Err(TOO_LONG);
            }
            let head = head::request(&self.bytes[..end])?;
            self.bytes.drain(..end);
            self.scanned = 0;
            if matches!(head.body, Body::Length(length) if length > MOST_BODY as u64) {
                return Err(TOO_LARGE);
            }
            if head.expects && !head.body.is_done() && self.bytes.is_empty() {
                answers.add(CONTINUE);
            }
            let body = head.body;
            self.begun = Some((head, body, 0));
        }
        let Some((_, body, passed)) = &mut self.begun else { return Ok(None) };
        *passed += body.pass(&self.bytes[*passed..]).map_err(|_| BAD)?;
        if *passed > MOST_BODY {
            return Err(TOO_LARGE);
        }
        if !body.is_done() {
            return Ok(None);
        }
        let Some((head, _, passed)) = self.begun.take() else { return Ok(None) };
        let RequestHead { method, mut bytes, closes, .. } = head;
        bytes.extend(self.bytes.drain(..passed));
        Ok(Some(Request { method, bytes, closes }))
    }
}

#[derive(Debug)]
pub(super) struct Client {
    pub(super) stream: TcpStream,
    pub(super) inbox: Inbox,
    pub(super) outbox: Outbox,
    pub(super) exchange: Option<Exchange>,
    /// The connection ends with the answer that is under way.
    pub(super) is_last: bool,
    /// As soon as everything is sent.
    pub(super) closes: bool,
}

/// A request of a client, and who works on it.
#[derive(Debug)]
pub(super) struct Exchange {
    pub(super) id: u64,
    pub(super) request: Rc<Request>,
    /// Its method may be repeated without harm.
    pub(super) repeats: bool,
    /// Of each server: the connection that it was sent by.
    pub(super) links: [Option<usize>; 2],
    pub(super) failed: [bool; 2],
    /// The connection whose answer goes to the client.
    pub(super) winner: Option<usize>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: requests come out whole and apart, wherever the bytes are cut.
    #[test]
    fn requests_come_one_by_one() {
        let bytes: &[u8] = b"\r\nPOST /a HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc\
            GET /b HTTP/1.1\r\n\r\nPUT /c HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n\
            1\r\nx\r\n0\r\n\r\nGET /d HTTP/1.0\r\n\r\n";
        for size in 1..bytes.len() {
            let (mut inbox, mut found) = (Inbox::default(), Vec::new());
            for mut piece in bytes.chunks(size) {
                inbox.read(&mut piece).unwrap();
                while let Some(request) = inbox.next(&mut Outbox::default()).unwrap() {
                    found.push((request.method, request.bytes, request.closes));
                }
            }
            let text = |at: usize| String::from_utf8_lossy(&found[at].1).into_owned();
            assert_eq!(found.len(), 4, "{size}");
            assert_eq!(text(0), "POST /a HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc");
            assert_eq!(text(1), "GET /b HTTP/1.1\r\n\r\n");
            assert!(text(2).ends_with("\r\n\r\n1\r\nx\r\n0\r\n\r\n"), "{}", text(2));
            assert!(found[3].2 && !found[0].2);
        }
    }

    #[test]
    fn what_is_too_large_is_refused_before_it_is_kept() {
        let next = |mut bytes: &[u8]| {
            let (mut inbox, mut outbox) = (Inbox::default(), Outbox::default());
            loop {
                let ended = inbox.read(&mut bytes).unwrap();
                match inbox.next(&mut outbox) {
                    Ok(None) if !ended => {}
                    next => return next.map(|request| request.is_some()),
                }
            }
        };
        let long = [&b"GET / HTTP/1.1\r\nA: "[..], &vec![b'x'; 10 << 20]].concat();
        assert_eq!(next(&long), Err(TOO_LONG));
        assert_eq!(next(b"PUT / HTTP/1.1\r\nContent-Length: 9999999\r\n\r\n"), Err(TOO_LARGE));
        let chunked = [
            &b"PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"[..],
            &b"1000\r\n"
                .iter()
                .chain(&[b'x'; 0x1000])
                .chain(b"\r\n")
                .copied()
                .collect::<Vec<u8>>()
                .repeat(300),
        ];
        assert_eq!(next(&chunked.concat()), Err(TOO_LARGE));
        let mut outbox = Outbox::default();
        let mut inbox = Inbox::default();
        let mut waits: &[u8] =
            b"PUT / HTTP/1.1\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n";
        inbox.read(&mut waits).unwrap();
        assert_eq!(inbox.next(&mut outbox), Ok(None));
        assert_eq!(outbox.bytes, CONTINUE);
    }
}
