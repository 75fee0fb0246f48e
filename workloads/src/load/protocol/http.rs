//! HTTP/1.1 answers: where each ends, its status, and what `Server-Timing` says of it.
//!
//! Only a head is kept, and only while it is incomplete; bodies are counted and dropped. A service
//! reports what a request waited and took as `Server-Timing: queue;dur=0.25, service;dur=1.5`
//! (milliseconds, as the standard says).

use super::line::{Line, decimal};
use crate::load::outcome::{Failure, Malformed, Reply};
use crate::units::nanos_from_f64;

const LONGEST_HEAD: usize = 64 * 1024;
const LONGEST_CHUNK_LINE: usize = 4 * 1024;
const MOST_HEADERS: usize = 128;

#[derive(Debug)]
pub(crate) struct Parser {
    state: State,
    /// The head so far; empty outside `State::Head`.
    head: Vec<u8>,
    /// The head's last line is empty so far.
    at_line_start: bool,
    line: Line,
    /// The answer whose body is being read.
    reply: Reply,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Head,
    Body { left: u64 },
    UntilClose,
    ChunkSize,
    Chunk { left: u64 },
    ChunkEnd,
    Trailer,
}

impl Default for Parser {
    fn default() -> Self {
        Self {
            state: State::Head,
            head: Vec::new(),
            at_line_start: false,
            line: Line::new(LONGEST_CHUNK_LINE),
            reply: Reply::bare(Ok(())),
        }
    }
}

impl Parser {
    pub(super) fn feed(&mut self, bytes: &[u8]) -> Result<(usize, Option<Reply>), Malformed> {
        let mut at = 0;
        while at < bytes.len() {
            let (taken, done) = self.step(&bytes[at..])?;
            at += taken;
            if done {
                return Ok((at, Some(self.finish())));
            }
        }
        Ok((at, None))
    }

    /// A body without a length ends with the connection.
    pub(super) fn end_of_stream(&mut self) -> Option<Reply> {
        (self.state == State::UntilClose).then(|| self.finish())
    }

    fn finish(&mut self) -> Reply {
        self.state = State::Head;
        self.reply
    }

    /// Takes some bytes; true when the answer ended with them.
    fn step(&mut self, bytes: &[u8]) -> Result<(usize, bool), Malformed> {
        match self.state {
            State::Head => self.step_head(bytes),
            State::UntilClose => Ok((bytes.len(), false)),
            State::Body { left } => {
                let (taken, left) = skip(left, bytes)?;
                self.state = State::Body { left };
                Ok((taken, left == 0))
            }
            State::Chunk { left } => {
                let (taken, left) = skip(left, bytes)?;
                self.state = if left == 0 { State::ChunkEnd } else { State::Chunk { left } };
                Ok((taken, false))
            }
            State::ChunkSize | State::ChunkEnd | State::Trailer => {
                let (taken, ended) = self.line.feed(bytes)?;
                Ok((taken, ended && self.chunk_line_ended()?))
            }
        }
    }

    fn chunk_line_ended(&mut self) -> Result<bool, Malformed> {
        let line = self.line.content();
        self.state = match self.state {
            State::ChunkEnd if line.is_empty() => State::ChunkSize,
            State::Trailer if line.is_empty() => return Ok(true),
            State::Trailer => State::Trailer,
            State::ChunkSize => match chunk_size(line)? {
                0 => State::Trailer,
                left => State::Chunk { left },
            },
            _ => return Err(Malformed),
        };
        Ok(false)
    }

    fn step_head(&mut self, bytes: &[u8]) -> Result<(usize, bool), Malformed> {
        let end = bytes.iter().position(|byte| {
            let empty_line = *byte == b'\n' && self.at_line_start;
            self.at_line_start = *byte == b'\n' || (*byte == b'\r' && self.at_line_start);
            empty_line
        });
        let taken = end.map_or(bytes.len(), |at| at + 1);
        if self.head.len() + taken > LONGEST_HEAD {
            return Err(Malformed);
        }
        self.head.extend_from_slice(&bytes[..taken]);
        if end.is_none() {
            return Ok((taken, false));
        }
        self.at_line_start = false;
        let head = read_head(&self.head);
        self.head.clear();
        match head? {
            // An interim answer: the one that counts follows.
            Head { state: None, .. } => Ok((taken, false)),
            Head { state: Some(state), reply } => {
                (self.state, self.reply) = (state, reply);
                Ok((taken, state == State::Body { left: 0 }))
            }
        }
    }
}

struct Head {
    /// What follows; `None` after an interim (1xx) head.
    state: Option<State>,
    reply: Reply,
}

fn read_head(bytes: &[u8]) -> Result<Head, Malformed> {
    let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
    let mut response = httparse::Response::new(&mut headers);
    match response.parse(bytes) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) | Err(_) => return Err(Malformed),
    }
    let status = response.code.ok_or(Malformed)?;
    let result = if (200..300).contains(&status) { Ok(()) } else { Err(Failure::Status(status)) };
    let mut reply = Reply::bare(result);
    reply.closes = response.version == Some(0);
    let mut length = None;
    let mut chunked = None;
    for header in response.headers.iter() {
        let name = header.name;
        if name.eq_ignore_ascii_case("content-length") {
            let announced = decimal(header.value.trim_ascii()).ok_or(Malformed)?;
            if length.replace(announced).is_some_and(|earlier| earlier != announced) {
                return Err(Malformed);
            }
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            chunked = Some(last_word(header.value).eq_ignore_ascii_case(b"chunked"));
        } else if name.eq_ignore_ascii_case("connection") {
            reply.closes = match header.value.trim_ascii() {
                value if value.eq_ignore_ascii_case(b"close") => true,
                value if value.eq_ignore_ascii_case(b"keep-alive") => false,
                _ => reply.closes,
            };
        } else if name.eq_ignore_ascii_case("server-timing") {
            read_timing(header.value, &mut reply);
        }
    }
    let state = match (status, chunked, length) {
        (100..200, ..) => None,
        (204 | 304, ..) => Some(State::Body { left: 0 }),
        (_, Some(true), _) => Some(State::ChunkSize),
        (_, Some(false), _) | (_, None, None) => Some(State::UntilClose),
        (_, None, Some(left)) => Some(State::Body { left }),
    };
    reply.closes |= state == Some(State::UntilClose);
    Ok(Head { state, reply })
}

/// `queue;dur=0.25, service;dur=1.5`; other entries, and those without a time, are left out.
fn read_timing(value: &[u8], reply: &mut Reply) {
    let Ok(value) = std::str::from_utf8(value) else { return };
    for entry in value.split(',') {
        let mut parts = entry.split(';').map(str::trim);
        let name = parts.next();
        let ms = parts.find_map(|part| part.strip_prefix("dur=")?.parse::<f64>().ok());
        let ns = ms.and_then(|ms| nanos_from_f64(ms * 1e6));
        match name {
            Some("queue") => reply.timing.queue_ns = ns,
            Some("service") => reply.timing.service_ns = ns,
            Some("added") => reply.timing.added_ns = ns,
            _ => {}
        }
    }
}

fn skip(left: u64, bytes: &[u8]) -> Result<(usize, u64), Malformed> {
    let here = left.min(bytes.len() as u64);
    Ok((usize::try_from(here).map_err(|_| Malformed)?, left - here))
}

fn last_word(value: &[u8]) -> &[u8] {
    value.rsplit(|byte| *byte == b',').next().unwrap_or(value).trim_ascii()
}

/// Hexadecimal digits up to an extension.
fn chunk_size(line: &[u8]) -> Result<u64, Malformed> {
    let digits = line.split(|byte| *byte == b';').next().unwrap_or(line).trim_ascii();
    let digits = std::str::from_utf8(digits).map_err(|_| Malformed)?;
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(Malformed);
    }
    u64::from_str_radix(digits, 16).map_err(|_| Malformed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(stream: &[u8]) -> Result<(usize, Option<Reply>), Malformed> {
        Parser::default().feed(stream)
    }

    /// Goal: an answer without a length lasts until the connection ends, and says that it does.
    /// Method: one.
    #[test]
    fn a_body_without_length_ends_with_the_connection() {
        let mut parser = Parser::default();
        assert_eq!(parser.feed(b"HTTP/1.1 200 OK\r\n\r\nhello"), Ok((24, None)));
        let reply = parser.end_of_stream().expect("the answer is whole");
        assert!(reply.closes && reply.result.is_ok());
        assert_eq!(parser.end_of_stream(), None, "and there is no second one");
    }

    /// Goal: whether the service closes the connection is read from version and header. Method: the
    /// three ways of saying it.
    #[test]
    fn closing_is_understood() {
        let closes = |head: &str| {
            let stream = format!("{head}\r\nContent-Length: 0\r\n\r\n");
            one(stream.as_bytes()).expect("well formed").1.expect("whole").closes
        };
        assert!(closes("HTTP/1.1 200 OK\r\nConnection: Close"));
        assert!(closes("HTTP/1.0 200 OK"));
        assert!(!closes("HTTP/1.0 200 OK\r\nConnection: keep-alive"));
        assert!(!closes("HTTP/1.1 200 OK"));
    }

    /// Goal: heads that contradict themselves, and those without end, are refused. Method: one of
    /// each.
    #[test]
    fn bad_heads_are_malformed() {
        let endless = vec![b'a'; LONGEST_HEAD + 1];
        for stream in [
            b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n".as_slice(),
            b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n",
            b"\r\n\r\n",
            b"no http at all\r\n\r\n",
            &endless,
        ] {
            assert_eq!(one(stream), Err(Malformed), "{}", String::from_utf8_lossy(stream));
        }
    }

    /// Goal: times are taken where they stand and nowhere else. Method: entries around ours, and a
    /// wrong number.
    #[test]
    fn server_timing_is_read() {
        let timing = |value: &str| {
            let mut reply = Reply::bare(Ok(()));
            read_timing(value.as_bytes(), &mut reply);
            (reply.timing.queue_ns, reply.timing.service_ns, reply.timing.added_ns)
        };
        assert_eq!(
            timing("db;dur=9, service;desc=x;dur=2.5 , queue;dur=0, added;dur=1"),
            (Some(0), Some(2_500_000), Some(1_000_000))
        );
        assert_eq!(timing("queue;dur=-1, service"), (None, None, None));
        assert_eq!(timing("queue;dur=NaN, service;dur=1e300"), (None, None, None));
    }
}
