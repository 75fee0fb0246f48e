//! HTTP requests as they arrive, and answers as bytes.
//!
//! The service takes GET and HEAD without a body. Whatever else comes is answered with the status
//! that says so, and the connection is closed.

use crate::units::{Nanos, micros};
use http::StatusCode;
use serde_json::json;
use std::borrow::Cow;

/// A query of 4 KB, percent-encoded, fits.
pub(super) const LONGEST_HEAD: usize = 16 * 1024;
const MOST_HEADERS: usize = 64;
const DEFAULT_HITS: usize = 10;
const MOST_HITS: usize = 100;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    Search { query: String, limit: usize },
    Metrics,
    Health,
}

/// How the answer to a request is to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Delivery {
    /// A HEAD request's answer has no body.
    pub(super) head_only: bool,
    pub(super) keep_alive: bool,
}

/// The rest of the connection cannot be trusted.
pub(super) const CLOSE: Delivery = Delivery { head_only: false, keep_alive: false };

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Request {
    /// Or the status that the request is refused with.
    pub(super) ask: Result<Ask, StatusCode>,
    pub(super) delivery: Delivery,
}

impl Request {
    pub(super) fn refused(status: StatusCode) -> Self {
        Self { ask: Err(status), delivery: CLOSE }
    }
}

/// The request at the start of `bytes` and how long it is; `None` while it is incomplete.
pub(super) fn parse(bytes: &[u8]) -> Option<(usize, Request)> {
    let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    let refused = |status| Some((bytes.len(), Request::refused(status)));
    match request.parse(bytes) {
        Ok(httparse::Status::Partial) if bytes.len() < LONGEST_HEAD => None,
        Ok(httparse::Status::Complete(length)) if length <= LONGEST_HEAD => {
            Some((length, understand(&request)))
        }
        Ok(_) | Err(httparse::Error::TooManyHeaders) => {
            refused(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE)
        }
        Err(_) => refused(StatusCode::BAD_REQUEST),
    }
}

fn understand(request: &httparse::Request<'_, '_>) -> Request {
    let mut keep_alive = request.version == Some(1);
    for header in request.headers.iter() {
        let value = header.value.trim_ascii();
        if header.name.eq_ignore_ascii_case("connection") {
            keep_alive = match value {
                value if value.eq_ignore_ascii_case(b"close") => false,
                value if value.eq_ignore_ascii_case(b"keep-alive") => true,
                _ => keep_alive,
            };
        }
        let is_length = header.name.eq_ignore_ascii_case("content-length");
        if header.name.eq_ignore_ascii_case("transfer-encoding") || (is_length && value != b"0") {
            return Request::refused(StatusCode::PAYLOAD_TOO_LARGE);
        }
    }
    let head_only = match request.method {
        Some("GET") => false,
        Some("HEAD") => true,
        _ => return Request::refused(StatusCode::METHOD_NOT_ALLOWED),
    };
    let ask = route(request.path.unwrap_or_default());
    Request { ask, delivery: Delivery { head_only, keep_alive } }
}

fn route(target: &str) -> Result<Ask, StatusCode> {
    let (path, parameters) = target.split_once('?').unwrap_or((target, ""));
    match path {
        "/metrics" => return Ok(Ask::Metrics),
        "/health" => return Ok(Ask::Health),
        "/search" => {}
        _ => return Err(StatusCode::NOT_FOUND),
    }
    let mut query = None;
    let mut limit = DEFAULT_HITS;
    for parameter in parameters.split('&') {
        match parameter.split_once('=') {
            Some(("q", value)) => query = Some(decode(value).ok_or(StatusCode::BAD_REQUEST)?),
            Some(("n", value)) => {
                let asked = value.parse().ok().filter(|n| *n <= MOST_HITS);
                limit = asked.ok_or(StatusCode::BAD_REQUEST)?;
            }
            _ => {}
        }
    }
    let query = query.ok_or(StatusCode::BAD_REQUEST)?.into_owned();
    Ok(Ask::Search { query, limit })
}

/// Undoes percent-encoding, and `+` for a space; `None` if that is no UTF-8 or not well encoded.
fn decode(text: &str) -> Option<Cow<'_, str>> {
    if !text.contains(['%', '+']) {
        return Some(Cow::Borrowed(text));
    }
    let mut decoded = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    let hex = |digit: u8| u8::try_from(char::from(digit).to_digit(16)?).ok();
    while let Some(byte) = bytes.next() {
        decoded.push(match byte {
            b'+' => b' ',
            b'%' => hex(bytes.next()?)? << 4 | hex(bytes.next()?)?,
            byte => byte,
        });
    }
    String::from_utf8(decoded).ok().map(Cow::Owned)
}

/// What a search took. The client is told in `Server-Timing`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timing {
    pub(super) queue_ns: Nanos,
    pub(super) service_ns: Nanos,
    /// The part of the service time that an emulated core added.
    pub(super) added_ns: Option<Nanos>,
}

#[derive(Clone, Debug)]
pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) kind: &'static str,
    pub(super) body: Vec<u8>,
    pub(super) timing: Option<Timing>,
}

impl Answer {
    pub(super) fn json(status: StatusCode, body: Vec<u8>) -> Self {
        Self { status, kind: "application/json", body, timing: None }
    }

    pub(super) fn metrics(text: String) -> Self {
        let kind = "text/plain; version=0.0.4";
        Self { status: StatusCode::OK, kind, body: text.into_bytes(), timing: None }
    }

    /// An error in the words of the status, or more exactly.
    pub(super) fn error(status: StatusCode, message: Option<&str>) -> Self {
        let message = message.or(status.canonical_reason()).unwrap_or_default();
        Self::json(status, (json!({ "error": message }).to_string() + "\n").into_bytes())
    }

    pub(super) fn bytes(&self, delivery: Delivery) -> Vec<u8> {
        let reason = self.status.canonical_reason().unwrap_or_default();
        let mut head = format!(
            "HTTP/1.1 {} {reason}\r\nContent-Type: {}\r\nContent-Length: {}\r\n",
            self.status.as_u16(),
            self.kind,
            self.body.len()
        );
        if let Some(Timing { queue_ns, service_ns, added_ns }) = self.timing {
            // The standard counts in milliseconds.
            let dur = |ns| format!("dur={:.6}", micros(ns) / 1e3);
            let (queue, service) = (dur(queue_ns), dur(service_ns));
            let added = added_ns.map_or_else(String::new, |ns| format!(", added;{}", dur(ns)));
            head += &format!("Server-Timing: queue;{queue}, service;{service}{added}\r\n");
        }
        match self.status {
            StatusCode::SERVICE_UNAVAILABLE => head += "Retry-After: 1\r\n",
            StatusCode::METHOD_NOT_ALLOWED => head += "Allow: GET, HEAD\r\n",
            _ => {}
        }
        // A client of HTTP/1.0 takes neither for granted.
        let connection = if delivery.keep_alive { "keep-alive" } else { "close" };
        head += &format!("Connection: {connection}\r\n\r\n");
        let mut bytes = head.into_bytes();
        if !delivery.head_only {
            bytes.extend_from_slice(&self.body);
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse_whole(text: &str) -> Request {
        let (length, request) = parse(text.as_bytes()).expect("complete");
        assert_eq!(length, text.len());
        request
    }

    /// Goal: targets mean what they say. Method: good ones, and each way of being bad.
    #[test]
    fn targets_are_understood() {
        let ask = |target: &str| parse_whole(&format!("GET {target} HTTP/1.1\r\nHost: x\r\n\r\n"));
        let search = |query: &str, limit| Ok(Ask::Search { query: query.to_owned(), limit });
        assert_eq!(ask("/search?q=new+york%21").ask, search("new york!", 10));
        assert_eq!(ask("/search?n=0&q=%C3%A9&x=y").ask, search("\u{e9}", 0));
        assert_eq!(ask("/metrics").ask, Ok(Ask::Metrics));
        assert_eq!(ask("/health?x").ask, Ok(Ask::Health));
        let kept = Delivery { head_only: false, keep_alive: true };
        let missing = Request { ask: Err(StatusCode::NOT_FOUND), delivery: kept };
        assert_eq!(ask("/"), missing, "the connection is good for more");
        for bad in ["/search", "/search?q", "/search?q=%zz", "/search?q=%c3", "/search?q=a&n=101"] {
            assert_eq!(ask(bad).ask, Err(StatusCode::BAD_REQUEST), "{bad}");
        }
    }

    /// Goal: what isn't a plain GET or HEAD closes the connection with its reason. Method: each
    /// reason.
    #[test]
    fn the_rest_is_refused() {
        let many = format!("GET / HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(65));
        let long = format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(LONGEST_HEAD));
        for (text, status) in [
            (&b"POST /search HTTP/1.1\r\n\r\n"[..], 405),
            (b"GET / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", 413),
            (b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 413),
            (b"GET / HTTP/9.9\r\n\r\n", 400),
            (b"\x16\x03\x01\x02\x00\x01", 400),
            (many.as_bytes(), 431),
            (long.as_bytes(), 431),
            (&long.as_bytes()[..LONGEST_HEAD], 431),
        ] {
            let shown = String::from_utf8_lossy(&text[..text.len().min(40)]).into_owned();
            let status = StatusCode::from_u16(status).expect("a status");
            assert_eq!(parse(text).expect("complete").1, Request::refused(status), "{shown}");
        }
    }

    /// Goal: whether the client keeps the connection is read from version and header. Method: the
    /// four ways.
    #[test]
    fn keeping_is_understood() {
        for (text, keep_alive, head_only) in [
            ("GET /health HTTP/1.1\r\n\r\n", true, false),
            ("HEAD /health HTTP/1.1\r\nconnection: CLOSE\r\n\r\n", false, true),
            ("GET /health HTTP/1.0\r\n\r\n", false, false),
            ("GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", true, false),
        ] {
            assert_eq!(parse_whole(text).delivery, Delivery { head_only, keep_alive }, "{text}");
        }
    }

    proptest! {
        /// Goal: no bytes make the parser panic or wait past its bound, and a request is found at
        /// the same place however its bytes arrive. Method: noise, and damaged requests, at every
        /// length.
        #[test]
        fn any_bytes_are_survived(
            noise in proptest::collection::vec(any::<u8>(), 0..120),
            hits in proptest::collection::vec((any::<usize>(), any::<u8>()), 0..4),
        ) {
            let mut damaged = b"GET /search?q=a%20b&n=5 HTTP/1.1\r\nHost: x\r\n\r\n".to_vec();
            for (at, byte) in hits {
                let len = damaged.len();
                damaged[at % len] = byte;
            }
            for bytes in [noise, damaged] {
                let whole = parse(&bytes);
                let first = (0..=bytes.len()).find_map(|end| parse(&bytes[..end]));
                prop_assert_eq!(whole.is_some(), first.is_some());
                if let (Some((_, whole)), Some((length, first))) = (whole, first) {
                    prop_assert!(first == whole || whole.ask.is_err());
                    prop_assert!(length <= bytes.len());
                }
            }
        }
    }
}
