//! The protocols that the generator speaks: how a request is written, and where an answer ends.
//!
//! A parser is fed whatever the socket gave, in pieces of any size, and keeps only what it needs to
//! find the end: a partial line or head, never a body. What the service sends can make it report
//! [`Malformed`], nothing worse.

mod http;
mod line;
mod redis;
mod request;

use super::outcome::{Malformed, Reply};
pub(crate) use request::RequestError;

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

    pub(crate) fn default_port(self) -> u16 {
        match self {
            Self::Http => 80,
            Self::Redis => 6_379,
        }
    }

    /// One line of a query file as the bytes of a request.
    pub(crate) fn encode(self, line: &str, host: &str) -> Result<Vec<u8>, RequestError> {
        match self {
            Self::Http => request::http(line, host),
            Self::Redis => request::redis(line),
        }
    }
}

/// Finds the ends of answers in one connection's stream.
#[derive(Debug)]
pub(crate) enum Parser {
    Http(http::Parser),
    Redis(redis::Parser),
}

impl Parser {
    pub(crate) fn new(protocol: Protocol) -> Self {
        match protocol {
            Protocol::Http => Self::Http(http::Parser::default()),
            Protocol::Redis => Self::Redis(redis::Parser::default()),
        }
    }

    /// How many of `bytes` were taken, and the answer that ended there. Without an answer, all were
    /// taken.
    pub(crate) fn feed(&mut self, bytes: &[u8]) -> Result<(usize, Option<Reply>), Malformed> {
        match self {
            Self::Http(parser) => parser.feed(bytes),
            Self::Redis(parser) => parser.feed(bytes),
        }
    }

    /// The answer that the end of the stream completes, if it completes one.
    pub(crate) fn end_of_stream(&mut self) -> Option<Reply> {
        match self {
            Self::Http(parser) => parser.end_of_stream(),
            Self::Redis(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::outcome::Failure;
    use proptest::prelude::*;

    const ALL: [Protocol; 2] = [Protocol::Http, Protocol::Redis];

    /// Every answer in `stream`, fed in pieces that end at `cuts`.
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
                assert!(
                    reply.is_some() || taken == end - start,
                    "left bytes behind without an answer"
                );
                start += taken;
                replies.extend(reply);
            }
        }
        replies.extend(parser.end_of_stream());
        Ok(replies)
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
                    reply.result = Err(Failure::Status(503));
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
                let mut bytes = format!("${}\r\n", value.len()).into_bytes();
                bytes.extend(value);
                bytes.extend(b"\r\n");
                bytes
            }),
        ];
        let nested = element.prop_recursive(4, 24, 4, |inner| {
            proptest::collection::vec(inner, 0..4).prop_map(|elements| {
                let mut bytes = format!("*{}\r\n", elements.len()).into_bytes();
                elements.iter().for_each(|element| bytes.extend(element));
                bytes
            })
        });
        prop_oneof![
            4 => nested.prop_map(|bytes| (bytes, Reply::bare(Ok(())))),
            1 => Just((b"-ERR no\r\n".to_vec(), Reply::bare(Err(Failure::Refused)))),
        ]
    }

    fn any_reply() -> impl Strategy<Value = (Protocol, Vec<(Vec<u8>, Reply)>)> {
        prop_oneof![
            (Just(Protocol::Http), proptest::collection::vec(http_reply(), 0..6)),
            (Just(Protocol::Redis), proptest::collection::vec(redis_reply(), 0..6)),
        ]
    }

    proptest! {
        /// Goal: answers are found whole and in order however the stream is cut. Method: any
        /// answers, any cuts.
        #[test]
        fn cuts_do_not_matter(
            (protocol, answers) in any_reply(),
            cuts in proptest::collection::vec(any::<usize>(), 0..40),
        ) {
            let stream: Vec<u8> = answers.iter().flat_map(|(bytes, _)| bytes.clone()).collect();
            let expected: Vec<Reply> = answers.iter().map(|(_, reply)| *reply).collect();
            prop_assert_eq!(parse(protocol, &stream, &cuts), Ok(expected.clone()));
            let every_byte: Vec<usize> = (0..stream.len()).collect();
            prop_assert_eq!(parse(protocol, &stream, &every_byte), Ok(expected));
        }

        /// Goal: no bytes make a parser panic, stand still, or answer differently by the cut.
        /// Method: arbitrary bytes, and answers with bytes changed, cut anywhere.
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
            for protocol in ALL {
                for stream in [&noise, &damaged] {
                    prop_assert_eq!(parse(protocol, stream, &cuts), parse(protocol, stream, &[]));
                }
            }
        }
    }
}
