//! The parsers of the generator's protocols, HTTP/1.1 and RESP. They find where an answer ends and
//! what it reports.
//!
//! A parser accepts the bytes of a socket in pieces of any size. It stores only a partial line or
//! head, and never a body. Invalid bytes from the service only make it return [`Malformed`].

use crate::units::nanos_from_f64;
use std::fmt;

/// The maximum length of a head, or of a line of either protocol.
const LONGEST: usize = 64 * 1024;
const MOST_HEADERS: usize = 128;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    Http,
    Redis,
}

impl Protocol {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Redis => "redis",
        }
    }
}

/// Why a request failed, in the words of the table, the JSON and the CSV.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    /// An HTTP status other than 2xx.
    Status(u16),
    /// An error reply of Redis.
    Refused,
    /// Bytes that violate the protocol.
    Malformed,
    /// The connection ended before the answer did.
    Closed,
    /// No answer within the timeout, counted from the intended send time.
    Timeout,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status(status) => write!(f, "{status}"),
            Self::Refused => f.write_str("refused"),
            Self::Malformed => f.write_str("malformed"),
            Self::Closed => f.write_str("closed"),
            Self::Timeout => f.write_str("timeout"),
        }
    }
}

/// The times that the service reports for a request. Missing times are `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Timing {
    pub(crate) queue_ns: Option<u64>,
    pub(crate) service_ns: Option<u64>,
    /// The part of the service time that an emulated core added.
    pub(crate) added_ns: Option<u64>,
}

/// A complete answer, successful or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) result: Result<(), Fault>,
    pub(crate) timing: Timing,
    /// The service will close the connection after this answer.
    pub(crate) closes: bool,
}

impl Reply {
    pub(crate) fn bare(result: Result<(), Fault>) -> Self {
        Self { result, timing: Timing::default(), closes: false }
    }
}

/// The bytes violate the protocol, and the connection cannot be used any further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Malformed;

/// Finds the ends of answers in one connection's stream.
#[derive(Debug)]
pub(crate) struct Parser {
    protocol: Protocol,
    expects: Expects,
    /// The incomplete head or line.
    partial: Vec<u8>,
    /// Bytes of a body to drop before the next line.
    skip: u64,
    /// The number of elements that are missing from an answer in RESP. Elements can be nested. The
    /// end of the answer needs no stack: counting the missing elements suffices.
    missing: u64,
    /// The answer that is being read.
    reply: Reply,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expects {
    /// The head of an HTTP answer, or the first line of an element in RESP.
    Start,
    ChunkSize,
    /// The line end after a chunk.
    ChunkEnd,
    Trailer,
    /// The line end after a bulk string.
    BulkEnd,
    /// A body without a length ends with the connection.
    Close,
    /// The answer is complete.
    Nothing,
}

impl Parser {
    pub(crate) fn new(protocol: Protocol) -> Self {
        Self {
            protocol,
            expects: Expects::Start,
            partial: Vec::new(),
            skip: 0,
            missing: 0,
            reply: Reply::bare(Ok(())),
        }
    }

    /// Returns how many of `bytes` were consumed, and the answer that ended there. Without an
    /// answer, all bytes were consumed.
    pub(crate) fn feed(&mut self, bytes: &[u8]) -> Result<(usize, Option<Reply>), Malformed> {
        let mut at = 0;
        loop {
            let dropped = (bytes.len() - at).min(usize::try_from(self.skip).unwrap_or(usize::MAX));
            self.skip -= dropped as u64;
            at += dropped;
            if self.skip == 0 && self.expects == Expects::Nothing {
                self.expects = Expects::Start;
                let reply = std::mem::replace(&mut self.reply, Reply::bare(Ok(())));
                return Ok((at, Some(reply)));
            }
            if at == bytes.len() || self.expects == Expects::Close {
                return Ok((bytes.len(), None));
            }
            at += self.take_line(&bytes[at..])?;
        }
    }

    /// Handles the end of the stream. Returns the answer that it completes, if any.
    pub(crate) fn end_of_stream(&mut self) -> Option<Reply> {
        let is_whole = std::mem::replace(&mut self.expects, Expects::Start) == Expects::Close;
        is_whole.then_some(self.reply)
    }

    /// Consumes bytes up to the end of the line, and parses the line or head that ends there.
    fn take_line(&mut self, bytes: &[u8]) -> Result<usize, Malformed> {
        let newline = bytes.iter().position(|byte| *byte == b'\n');
        let taken = newline.map_or(bytes.len(), |at| at + 1);
        if self.partial.len() + taken > LONGEST {
            return Err(Malformed);
        }
        self.partial.extend_from_slice(&bytes[..taken]);
        if newline.is_some() {
            let mut partial = std::mem::take(&mut self.partial);
            let line = partial.strip_suffix(b"\n").unwrap_or(&partial);
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            let in_head = self.protocol == Protocol::Http && self.expects == Expects::Start;
            if !in_head {
                self.expects = self.read_line(line)?;
                partial.clear();
            } else if line.is_empty() || line.ends_with(b"\n") {
                self.expects = self.read_head(&partial)?;
                partial.clear();
            }
            self.partial = partial;
        }
        Ok(taken)
    }

    /// Parses a line without its line end, and returns what follows it.
    fn read_line(&mut self, line: &[u8]) -> Result<Expects, Malformed> {
        match self.expects {
            Expects::Start => self.read_element(line),
            Expects::BulkEnd if line.is_empty() => Ok(self.after_element()),
            Expects::ChunkEnd if line.is_empty() => Ok(Expects::ChunkSize),
            Expects::Trailer if line.is_empty() => Ok(Expects::Nothing),
            Expects::Trailer => Ok(Expects::Trailer),
            Expects::ChunkSize => {
                // Hexadecimal digits, which end at an optional extension.
                let digits = line.split(|byte| *byte == b';').next().unwrap_or(line).trim_ascii();
                self.skip = number(digits, 16)?;
                Ok(if self.skip == 0 { Expects::Trailer } else { Expects::ChunkEnd })
            }
            _ => Err(Malformed),
        }
    }

    /// Parses an HTTP head, and returns what follows it.
    fn read_head(&mut self, bytes: &[u8]) -> Result<Expects, Malformed> {
        let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
        let mut response = httparse::Response::new(&mut headers);
        if !response.parse(bytes).is_ok_and(|status| status.is_complete()) {
            return Err(Malformed);
        }
        let status = response.code.ok_or(Malformed)?;
        let is_good = (200..300).contains(&status);
        let mut reply = Reply::bare(if is_good { Ok(()) } else { Err(Fault::Status(status)) });
        reply.closes = response.version == Some(0);
        let (mut length, mut chunked) = (None, None);
        for httparse::Header { name, value } in response.headers.iter() {
            let value = value.trim_ascii();
            if name.eq_ignore_ascii_case("content-length") {
                let announced = number(value, 10)?;
                if length.replace(announced).is_some_and(|earlier| earlier != announced) {
                    return Err(Malformed);
                }
            } else if name.eq_ignore_ascii_case("transfer-encoding") {
                let last = value.rsplit(|byte| *byte == b',').next().unwrap_or(value);
                chunked = Some(last.trim_ascii().eq_ignore_ascii_case(b"chunked"));
            } else if name.eq_ignore_ascii_case("connection") {
                reply.closes = match value {
                    value if value.eq_ignore_ascii_case(b"close") => true,
                    value if value.eq_ignore_ascii_case(b"keep-alive") => false,
                    _ => reply.closes,
                };
            } else if name.eq_ignore_ascii_case("server-timing") {
                read_timing(value, &mut reply.timing);
            }
        }
        let expects = match (status, chunked, length) {
            // An interim answer. The final answer follows.
            (100..200, ..) => return Ok(Expects::Start),
            (204 | 304, ..) => Expects::Nothing,
            (_, Some(true), _) => Expects::ChunkSize,
            (_, Some(false), _) | (_, None, None) => Expects::Close,
            (_, None, Some(length)) => {
                self.skip = length;
                Expects::Nothing
            }
        };
        reply.closes |= expects == Expects::Close;
        self.reply = reply;
        Ok(expects)
    }

    /// Parses the first line of an element in version 2 of RESP, and returns what follows it.
    /// Servers use version 3 only on request.
    fn read_element(&mut self, line: &[u8]) -> Result<Expects, Malformed> {
        let (&kind, rest) = line.split_first().ok_or(Malformed)?;
        if self.missing == 0 && kind == b'-' {
            self.reply.result = Err(Fault::Refused);
        }
        self.missing = self.missing.saturating_sub(1);
        // A length of -1 means null in RESP.
        let length = || if rest == b"-1" { Ok(None) } else { number(rest, 10).map(Some) };
        let elements = match kind {
            b'+' | b':' | b'-' => 0,
            b'$' => {
                if let Some(length) = length()? {
                    self.skip = length;
                    return Ok(Expects::BulkEnd);
                }
                0
            }
            b'*' => length()?.unwrap_or(0),
            _ => return Err(Malformed),
        };
        self.missing = self.missing.checked_add(elements).ok_or(Malformed)?;
        Ok(self.after_element())
    }

    fn after_element(&self) -> Expects {
        if self.missing == 0 { Expects::Nothing } else { Expects::Start }
    }
}

/// Parses digits. Other characters and numbers above 64 bits are malformed.
fn number(digits: &[u8], radix: u32) -> Result<u64, Malformed> {
    let text = std::str::from_utf8(digits).map_err(|_| Malformed)?;
    if !text.chars().all(|digit| digit.is_digit(radix)) {
        return Err(Malformed);
    }
    u64::from_str_radix(text, radix).map_err(|_| Malformed)
}

/// Reads the `Server-Timing` header, as in `queue;dur=0.25, service;dur=1.5`. The standard's unit
/// is milliseconds. Other entries, and entries without a time, are ignored.
fn read_timing(value: &[u8], timing: &mut Timing) {
    let Ok(value) = std::str::from_utf8(value) else { return };
    for entry in value.split(',') {
        let mut parts = entry.split(';').map(str::trim);
        let name = parts.next();
        let ms = parts.find_map(|part| part.strip_prefix("dur=")?.parse::<f64>().ok());
        let ns = ms.and_then(|ms| nanos_from_f64(ms * 1e6));
        match name {
            Some("queue") => timing.queue_ns = ns,
            Some("service") => timing.service_ns = ns,
            Some("added") => timing.added_ns = ns,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// All answers in `stream`, which is passed in pieces that end at `cuts`.
    fn parse(protocol: Protocol, stream: &[u8], cuts: &[usize]) -> Result<Vec<Reply>, Malformed> {
        let mut parser = Parser::new(protocol);
        let mut replies = Vec::new();
        let mut ends: Vec<usize> = cuts.iter().map(|cut| cut % (stream.len() + 1)).collect();
        ends.push(stream.len());
        ends.sort_unstable();
        let mut start = 0;
        for end in ends {
            while start < end {
                let (taken, reply) = parser.feed(&stream[start..end])?;
                assert!(taken > 0 && taken <= end - start, "no progress, or more than was given");
                assert!(reply.is_some() || taken == end - start, "bytes left without an answer");
                start += taken;
                replies.extend(reply);
            }
        }
        replies.extend(parser.end_of_stream());
        Ok(replies)
    }

    fn parse_http(stream: &[u8]) -> Result<Vec<Reply>, Malformed> {
        parse(Protocol::Http, stream, &[])
    }

    /// Goal: an answer without a length ends with the connection. Version and header say whether
    /// the service closes the connection. Method: each combination.
    #[test]
    fn closing_is_understood() {
        let mut parser = Parser::new(Protocol::Http);
        assert_eq!(parser.feed(b"HTTP/1.1 200 OK\r\n\r\nhello"), Ok((24, None)));
        let reply = parser.end_of_stream().expect("the answer is whole");
        assert!(reply.closes && reply.result.is_ok());
        assert_eq!(parser.end_of_stream(), None, "and there is no second one");
        for (head, closes) in [
            ("HTTP/1.1 200 OK\r\nConnection: Close", true),
            ("HTTP/1.0 200 OK", true),
            ("HTTP/1.0 200 OK\r\nConnection: keep-alive", false),
            ("HTTP/1.1 200 OK", false),
        ] {
            let stream = format!("{head}\r\nContent-Length: 0\r\n\r\n");
            let replies = parse_http(stream.as_bytes()).expect("well formed");
            assert_eq!(replies.iter().map(|reply| reply.closes).collect::<Vec<_>>(), [closes]);
        }
    }

    /// Goal: contradictory and endless heads are refused. Method: one example of each.
    #[test]
    fn bad_heads_are_malformed() {
        let endless = vec![b'a'; LONGEST + 1];
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
            assert_eq!(parse_http(stream), Err(Malformed), "{}", String::from_utf8_lossy(stream));
        }
    }

    /// Goal: the known times are read and other entries are ignored. Method: additional entries,
    /// and invalid numbers.
    #[test]
    fn server_timing_is_read() {
        for (value, queue_ns, service_ns, added_ns) in [
            (
                "db;dur=9, service;desc=x;dur=2.5 , queue;dur=0, added;dur=1",
                Some(0),
                Some(2_500_000),
                Some(1_000_000),
            ),
            ("queue;dur=-1, service", None, None, None),
            ("queue;dur=NaN, service;dur=1e300", None, None, None),
        ] {
            let mut timing = Timing::default();
            read_timing(value.as_bytes(), &mut timing);
            assert_eq!(timing, Timing { queue_ns, service_ns, added_ns }, "{value}");
        }
    }

    fn http_reply() -> impl Strategy<Value = (Vec<u8>, Reply)> {
        let body = proptest::collection::vec(any::<u8>(), 0..80);
        (body, 0..4, 1usize..9).prop_map(|(body, kind, chunk)| {
            let mut bytes;
            let mut reply = Reply::bare(Ok(()));
            match kind {
                0 => {
                    bytes = format!(
                        "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\
                         Server-Timing: queue;dur=0.25, service;dur=1.5\r\n\r\n",
                        body.len()
                    )
                    .into_bytes();
                    bytes.extend(&body);
                    reply.timing.queue_ns = Some(250_000);
                    reply.timing.service_ns = Some(1_500_000);
                }
                1 => {
                    bytes = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
                    for piece in body.chunks(chunk) {
                        bytes.extend(format!("{:x};x=y\r\n", piece.len()).bytes());
                        bytes.extend(piece);
                        bytes.extend(b"\r\n");
                    }
                    bytes.extend(b"0\r\nTrailer: 1\r\n\r\n");
                }
                2 => {
                    bytes =
                        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n".to_vec();
                }
                _ => {
                    bytes = b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n".to_vec();
                    reply.result = Err(Fault::Status(503));
                }
            }
            (bytes, reply)
        })
    }

    fn redis_reply() -> impl Strategy<Value = (Vec<u8>, Reply)> {
        let element = prop_oneof![
            Just(b":7\r\n".to_vec()),
            Just(b"+OK\r\n".to_vec()),
            Just(b"$-1\r\n".to_vec()),
            Just(b"*-1\r\n".to_vec()),
            proptest::collection::vec(any::<u8>(), 0..40).prop_map(|value| {
                [format!("${}\r\n", value.len()).as_bytes(), &value, b"\r\n"].concat()
            }),
        ];
        let nested = element.prop_recursive(4, 24, 4, |inner| {
            proptest::collection::vec(inner, 0..4).prop_map(|elements| {
                [format!("*{}\r\n", elements.len()).as_bytes(), &elements.concat()].concat()
            })
        });
        prop_oneof![
            4 => nested.prop_map(|bytes| (bytes, Reply::bare(Ok(())))),
            1 => Just((b"-ERR no\r\n".to_vec(), Reply::bare(Err(Fault::Refused)))),
        ]
    }

    fn any_reply() -> impl Strategy<Value = (Protocol, Vec<(Vec<u8>, Reply)>)> {
        prop_oneof![
            (Just(Protocol::Http), proptest::collection::vec(http_reply(), 0..6)),
            (Just(Protocol::Redis), proptest::collection::vec(redis_reply(), 0..6)),
        ]
    }

    proptest! {
        /// Goal: answers are found completely and in order, however the stream is cut. Method: any
        /// answers, any cuts.
        #[test]
        fn cuts_do_not_matter(
            (protocol, answers) in any_reply(),
            cuts in proptest::collection::vec(any::<usize>(), 0..40),
        ) {
            let (bytes, expected): (Vec<_>, Vec<_>) = answers.into_iter().unzip();
            let stream = bytes.concat();
            prop_assert_eq!(parse(protocol, &stream, &cuts), Ok(expected.clone()));
            let every_byte: Vec<usize> = (0..stream.len()).collect();
            prop_assert_eq!(parse(protocol, &stream, &every_byte), Ok(expected));
        }

        /// Goal: whatever the bytes, a parser does not panic and makes progress. Its result does
        /// not depend on the cuts. Method: arbitrary bytes, and answers with changed bytes, cut
        /// anywhere.
        #[test]
        fn arbitrary_bytes_are_survived(
            noise in proptest::collection::vec(any::<u8>(), 0..200),
            (_, answers) in any_reply(),
            hits in proptest::collection::vec((any::<usize>(), any::<u8>()), 0..4),
            cuts in proptest::collection::vec(any::<usize>(), 0..20),
        ) {
            let mut damaged: Vec<u8> = answers.into_iter().flat_map(|(bytes, _)| bytes).collect();
            for (at, byte) in hits {
                let len = damaged.len().max(1);
                if let Some(slot) = damaged.get_mut(at % len) {
                    *slot = byte;
                }
            }
            for protocol in [Protocol::Http, Protocol::Redis] {
                for stream in [&noise, &damaged] {
                    prop_assert_eq!(parse(protocol, stream, &cuts), parse(protocol, stream, &[]));
                }
            }
        }
    }
}
