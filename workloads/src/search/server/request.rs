//! HTTP requests as they arrive: which one it is, or why it is none.
//!
//! Only GET and HEAD without a body are understood. Whatever else comes is answered with the status
//! that says so, and the connection closed: nothing is guessed at.

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

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) ask: Ask,
    /// A HEAD request's answer has no body.
    pub(super) head_only: bool,
    pub(super) keep_alive: bool,
}

/// A request that is understood well enough to answer, and no further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The rest of the connection can't be trusted: answer and close.
    Close(Status),
    /// A well-formed request that asks for nothing we have.
    Keep { status: Status, head_only: bool, keep_alive: bool },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    Ok,
    BadRequest,
    NotFound,
    MethodNotAllowed,
    RequestTimeout,
    ContentTooLarge,
    HeadTooLarge,
    InternalError,
    Unavailable,
}

impl Status {
    pub(super) const ALL: [Self; 9] = [
        Self::Ok,
        Self::BadRequest,
        Self::NotFound,
        Self::MethodNotAllowed,
        Self::RequestTimeout,
        Self::ContentTooLarge,
        Self::HeadTooLarge,
        Self::InternalError,
        Self::Unavailable,
    ];

    pub(super) fn code(self) -> u16 {
        match self {
            Self::Ok => 200,
            Self::BadRequest => 400,
            Self::NotFound => 404,
            Self::MethodNotAllowed => 405,
            Self::RequestTimeout => 408,
            Self::ContentTooLarge => 413,
            Self::HeadTooLarge => 431,
            Self::InternalError => 500,
            Self::Unavailable => 503,
        }
    }

    pub(super) fn reason(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::BadRequest => "Bad Request",
            Self::NotFound => "Not Found",
            Self::MethodNotAllowed => "Method Not Allowed",
            Self::RequestTimeout => "Request Timeout",
            Self::ContentTooLarge => "Content Too Large",
            Self::HeadTooLarge => "Request Header Fields Too Large",
            Self::InternalError => "Internal Server Error",
            Self::Unavailable => "Service Unavailable",
        }
    }
}

/// The request at the start of `bytes` and how long it is; `None` while it is incomplete.
pub(super) fn parse(bytes: &[u8]) -> Option<(usize, Result<Request, Refusal>)> {
    let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    let length = match request.parse(bytes) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) if bytes.len() < LONGEST_HEAD => return None,
        Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
            return Some((bytes.len(), Err(Refusal::Close(Status::HeadTooLarge))));
        }
        Err(_) => return Some((bytes.len(), Err(Refusal::Close(Status::BadRequest)))),
    };
    if length > LONGEST_HEAD {
        return Some((bytes.len(), Err(Refusal::Close(Status::HeadTooLarge))));
    }
    Some((length, understand(&request)))
}

fn understand(request: &httparse::Request<'_, '_>) -> Result<Request, Refusal> {
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
            return Err(Refusal::Close(Status::ContentTooLarge));
        }
    }
    let head_only = match request.method {
        Some("GET") => false,
        Some("HEAD") => true,
        _ => return Err(Refusal::Close(Status::MethodNotAllowed)),
    };
    match route(request.path.unwrap_or_default()) {
        Ok(ask) => Ok(Request { ask, head_only, keep_alive }),
        Err(status) => Err(Refusal::Keep { status, head_only, keep_alive }),
    }
}

fn route(target: &str) -> Result<Ask, Status> {
    let (path, parameters) = target.split_once('?').unwrap_or((target, ""));
    match path {
        "/metrics" => Ok(Ask::Metrics),
        "/health" => Ok(Ask::Health),
        "/search" => {
            let mut query = None;
            let mut limit = DEFAULT_HITS;
            for parameter in parameters.split('&') {
                match parameter.split_once('=') {
                    Some(("q", value)) => query = Some(decode(value).ok_or(Status::BadRequest)?),
                    Some(("n", value)) => {
                        let asked = value.parse().ok().filter(|n| *n <= MOST_HITS);
                        limit = asked.ok_or(Status::BadRequest)?;
                    }
                    _ => {}
                }
            }
            let query = query.ok_or(Status::BadRequest)?.into_owned();
            Ok(Ask::Search { query, limit })
        }
        _ => Err(Status::NotFound),
    }
}

/// Undoes percent-encoding, and `+` for a space; `None` if that is no UTF-8 or not well encoded.
fn decode(text: &str) -> Option<Cow<'_, str>> {
    if !text.contains(['%', '+']) {
        return Some(Cow::Borrowed(text));
    }
    let mut decoded = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        decoded.push(match byte {
            b'+' => b' ',
            b'%' => hex(bytes.next()?)? << 4 | hex(bytes.next()?)?,
            byte => byte,
        });
    }
    String::from_utf8(decoded).ok().map(Cow::Owned)
}

fn hex(digit: u8) -> Option<u8> {
    u8::try_from(char::from(digit).to_digit(16)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ask(target: &str) -> Result<Request, Refusal> {
        let text = format!("GET {target} HTTP/1.1\r\nHost: x\r\n\r\n");
        let (length, request) = parse(text.as_bytes()).expect("complete");
        assert_eq!(length, text.len());
        request
    }

    fn search(query: &str, limit: usize) -> Result<Request, Refusal> {
        let ask = Ask::Search { query: query.to_owned(), limit };
        Ok(Request { ask, head_only: false, keep_alive: true })
    }

    fn keep(status: Status) -> Result<Request, Refusal> {
        Err(Refusal::Keep { status, head_only: false, keep_alive: true })
    }

    /// Goal: targets mean what they say. Method: good ones, and each way of being bad.
    #[test]
    fn targets_are_understood() {
        assert_eq!(ask("/search?q=new+york%21"), search("new york!", 10));
        assert_eq!(ask("/search?n=0&q=%C3%A9&x=y"), search("\u{e9}", 0));
        assert_eq!(ask("/metrics").map(|r| r.ask), Ok(Ask::Metrics));
        assert_eq!(ask("/health?x").map(|r| r.ask), Ok(Ask::Health));
        assert_eq!(ask("/"), keep(Status::NotFound));
        for bad in ["/search", "/search?q", "/search?q=%zz", "/search?q=%c3", "/search?q=a&n=101"] {
            assert_eq!(ask(bad), keep(Status::BadRequest), "{bad}");
        }
    }

    fn refusal(text: &[u8]) -> Refusal {
        parse(text).expect("complete").1.expect_err("refused")
    }

    /// Goal: what isn't a plain GET or HEAD closes the connection with its reason. Method: each
    /// reason.
    #[test]
    fn the_rest_is_refused() {
        let many = format!("GET / HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(65));
        let long = format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(LONGEST_HEAD));
        for (text, status) in [
            (&b"POST /search HTTP/1.1\r\n\r\n"[..], Status::MethodNotAllowed),
            (b"GET / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", Status::ContentTooLarge),
            (b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", Status::ContentTooLarge),
            (b"GET / HTTP/9.9\r\n\r\n", Status::BadRequest),
            (b"\x16\x03\x01\x02\x00\x01", Status::BadRequest),
            (many.as_bytes(), Status::HeadTooLarge),
            (long.as_bytes(), Status::HeadTooLarge),
            (&long.as_bytes()[..LONGEST_HEAD], Status::HeadTooLarge),
        ] {
            let shown = String::from_utf8_lossy(&text[..text.len().min(40)]).into_owned();
            assert_eq!(refusal(text), Refusal::Close(status), "{shown}");
        }
    }

    /// Goal: whether the client keeps the connection is read from version and header. Method: the
    /// four ways.
    #[test]
    fn keeping_is_understood() {
        let keeps = |text: &str| {
            let request = parse(text.as_bytes()).expect("complete").1.expect("good");
            (request.keep_alive, request.head_only)
        };
        assert_eq!(keeps("GET /health HTTP/1.1\r\n\r\n"), (true, false));
        assert_eq!(keeps("HEAD /health HTTP/1.1\r\nconnection: CLOSE\r\n\r\n"), (false, true));
        assert_eq!(keeps("GET /health HTTP/1.0\r\n\r\n"), (false, false));
        assert_eq!(keeps("GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"), (true, false));
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
                if let (Some((_, Ok(whole))), Some((length, first))) = (whole, first) {
                    prop_assert_eq!(first, Ok(whole));
                    prop_assert!(length <= bytes.len());
                }
            }
        }
    }
}
