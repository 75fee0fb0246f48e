//! Heads of requests and answers: what they say of the message, and as they are passed on.
//!
//! A head goes on as it is but for what concerns one connection only. What two readers could
//! understand in two ways, such as a body with two lengths, goes nowhere.

use httparse::{EMPTY_HEADER, Header, Status};

use super::body::Body;

/// No head is longer.
pub(super) const LONGEST: usize = 64 << 10;
const MOST_FIELDS: usize = 128;

/// Why a request is not passed on: the answer's status, and its words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Refusal(pub u16, pub &'static str);

pub(super) const BAD: Refusal = Refusal(400, "Bad Request");
pub(super) const TOO_LONG: Refusal = Refusal(431, "Request Header Fields Too Large");
pub(super) const TOO_LARGE: Refusal = Refusal(413, "Content Too Large");
const OTHER_VERSION: Refusal = Refusal(505, "HTTP/2 Not Supported: Use HTTP/1.1");
/// How every connection of HTTP/2 begins whose client has not asked first.
const SECOND_VERSION: &[u8] = b"PRI * HTTP/2.0\r\n";
const NOT_IMPLEMENTED: Refusal = Refusal(501, "Not Implemented");
pub(super) const NO_SERVER: Refusal = Refusal(502, "Bad Gateway");
pub(super) const TOO_LATE: Refusal = Refusal(504, "Gateway Timeout");

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct RequestHead {
    pub(super) method: String,
    /// As the servers get it.
    pub(super) bytes: Vec<u8>,
    pub(super) body: Body,
    /// The client closes after its answer.
    pub(super) closes: bool,
    /// It waits for a word before it sends the body.
    pub(super) expects: bool,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct AnswerHead {
    pub(super) code: u16,
    /// As the client gets it, without the empty line at its end.
    pub(super) bytes: Vec<u8>,
    pub(super) body: Body,
    /// The server closes after it.
    pub(super) closes: bool,
}

/// Where a head ends, if it does; `from` is what was looked through before.
pub(super) fn end(bytes: &[u8], from: usize) -> Option<usize> {
    let start = from.saturating_sub(3);
    let lines = (start..bytes.len()).filter(|&at| bytes[at] == b'\n');
    lines.map(|at| at + 1).find_map(|at| match bytes[at..] {
        [b'\n', ..] => Some(at + 1),
        [b'\r', b'\n', ..] => Some(at + 2),
        _ => None,
    })
}

fn is(name: &str, one_of: &[&str]) -> bool {
    one_of.iter().any(|known| name.eq_ignore_ascii_case(known))
}

/// Fields of one connection, which the next has its own of.
fn is_of_connection(name: &str) -> bool {
    is(name, &["connection", "keep-alive", "proxy-connection", "expect", "upgrade", "te"])
}

fn has_token(headers: &[Header<'_>], name: &str, token: &str) -> bool {
    let of_name = headers.iter().filter(|header| header.name.eq_ignore_ascii_case(name));
    let mut tokens = of_name.flat_map(|header| header.value.split(|byte| *byte == b','));
    tokens.any(|found| found.trim_ascii().eq_ignore_ascii_case(token.as_bytes()))
}

/// The length or the chunks that a head announces; `None` for neither.
fn body(headers: &[Header<'_>]) -> Result<Option<Body>, Refusal> {
    let mut found = None;
    for header in headers {
        let body = if is(header.name, &["content-length"]) {
            let digits = header.value.trim_ascii();
            let plain = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
            let text = std::str::from_utf8(digits).ok().filter(|_| plain);
            Body::Length(text.and_then(|text| text.parse().ok()).ok_or(BAD)?)
        } else if is(header.name, &["transfer-encoding"]) {
            if !header.value.trim_ascii().eq_ignore_ascii_case(b"chunked") {
                return Err(NOT_IMPLEMENTED);
            }
            Body::CHUNKED
        } else {
            continue;
        };
        // Two that say the same could be meant; two that differ are an attack, or broken.
        if found.replace(body).is_some_and(|before| before != body) {
            return Err(BAD);
        }
    }
    Ok(found)
}

fn write(out: &mut Vec<u8>, headers: &[Header<'_>]) {
    for header in headers.iter().filter(|header| !is_of_connection(header.name)) {
        out.extend(header.name.as_bytes());
        out.extend(b": ");
        out.extend(header.value);
        out.extend(b"\r\n");
    }
}

/// Reads a whole head.
pub(super) fn request(bytes: &[u8]) -> Result<RequestHead, Refusal> {
    if bytes.starts_with(SECOND_VERSION) {
        return Err(OTHER_VERSION);
    }
    let mut fields = [EMPTY_HEADER; MOST_FIELDS];
    let mut request = httparse::Request::new(&mut fields);
    match request.parse(bytes) {
        Ok(Status::Complete(_)) => {}
        Err(httparse::Error::TooManyHeaders) => return Err(TOO_LONG),
        Ok(Status::Partial) | Err(_) => return Err(BAD),
    }
    let (Some(method), Some(path), Some(version)) = (request.method, request.path, request.version)
    else {
        return Err(BAD);
    };
    let headers = &*request.headers;
    if method == "CONNECT" || headers.iter().any(|header| is(header.name, &["upgrade"])) {
        return Err(NOT_IMPLEMENTED);
    }
    let mut out = format!("{method} {path} HTTP/1.{version}\r\n").into_bytes();
    write(&mut out, headers);
    out.extend(b"\r\n");
    Ok(RequestHead {
        method: method.to_owned(),
        bytes: out,
        body: body(headers)?.unwrap_or(Body::EMPTY),
        // One of HTTP/1.0 may have its connection kept, and need not.
        closes: version == 0 || has_token(headers, "connection", "close"),
        expects: version == 1 && has_token(headers, "expect", "100-continue"),
    })
}

/// Reads a whole head of an answer to a method; `None` if it is none.
pub(super) fn answer(bytes: &[u8], to: &str) -> Option<AnswerHead> {
    let mut fields = [EMPTY_HEADER; MOST_FIELDS];
    let mut response = httparse::Response::new(&mut fields);
    if !matches!(response.parse(bytes), Ok(Status::Complete(_))) {
        return None;
    }
    let (code, version) = (response.code?, response.version?);
    let headers = &*response.headers;
    let announced = body(headers).ok()?;
    let has_none = to == "HEAD" || matches!(code, 100..=199 | 204 | 304);
    let body = match announced {
        _ if has_none => Body::EMPTY,
        Some(body) => body,
        None => Body::UntilClose,
    };
    let reason = response.reason.unwrap_or("");
    let mut out = format!("HTTP/1.{version} {code} {reason}\r\n").into_bytes();
    write(&mut out, headers);
    let keeps = version == 1 || has_token(headers, "connection", "keep-alive");
    let closes = !keeps || has_token(headers, "connection", "close") || body == Body::UntilClose;
    // A protocol that nobody asked for.
    (code != 101).then_some(AnswerHead { code, bytes: out, body, closes })
}

/// An answer of our own; the connection ends with it.
pub(super) fn refused(Refusal(code, reason): Refusal) -> Vec<u8> {
    format!("HTTP/1.1 {code} {reason}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_goes_on_without_what_is_its_connections() {
        let head = request(
            b"GET /a?b HTTP/1.1\r\nHost: x\r\nconnection: close\r\nKeep-Alive: 5\r\nA:  b \r\n\r\n",
        )
        .unwrap();
        assert_eq!(head.bytes, b"GET /a?b HTTP/1.1\r\nHost: x\r\nA: b\r\n\r\n");
        assert!(head.closes && head.body == Body::EMPTY && head.method == "GET");
        let old = request(b"GET / HTTP/1.0\r\n\r\n").unwrap();
        assert!(old.closes && old.bytes == b"GET / HTTP/1.0\r\n\r\n");
        let post = request(b"POST / HTTP/1.1\r\nContent-Length: 7\r\nExpect: 100-continue\r\n\r\n");
        assert_eq!(post.map(|post| (post.body, post.expects)), Ok((Body::Length(7), true)));
    }

    #[test]
    fn what_could_be_understood_in_two_ways_goes_nowhere() {
        let refused = |fields: &str| {
            let head = format!("POST / HTTP/1.1\r\n{fields}\r\n\r\n");
            request(head.as_bytes()).map(|head| head.body)
        };
        for wrong in [
            "Content-Length: 1\r\nContent-Length: 2",
            "Content-Length: 1\r\nTransfer-Encoding: chunked",
            "Content-Length: +1",
            "Content-Length: 1, 1",
            "Content-Length: 99999999999999999999",
            "Content-Length:",
            "A b: c",
            "A: b\r\n c",
        ] {
            assert_eq!(refused(wrong), Err(BAD), "{wrong}");
        }
        assert_eq!(refused("Transfer-Encoding: gzip, chunked"), Err(NOT_IMPLEMENTED));
        assert_eq!(refused("Upgrade: websocket"), Err(NOT_IMPLEMENTED));
        assert_eq!(refused("Content-Length: 1\r\nContent-Length: 1"), Ok(Body::Length(1)));
        assert_eq!(refused(&"a: b\r\n".repeat(200)), Err(TOO_LONG));
        assert_eq!(request(b"PRI * HTTP/2.0\r\n\r\n"), Err(OTHER_VERSION));
    }

    #[test]
    fn an_answer_says_how_it_ends() {
        let read = |head: &str, to: &str| {
            answer(head.as_bytes(), to).map(|answer| (answer.code, answer.body, answer.closes))
        };
        let ends = |body, closes| Some((200, body, closes));
        let length = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n";
        assert_eq!(read(length, "GET"), ends(Body::Length(3), false));
        assert_eq!(read(length, "HEAD"), ends(Body::EMPTY, false));
        assert_eq!(read("HTTP/1.1 200 OK\r\n\r\n", "GET"), ends(Body::UntilClose, true));
        let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n";
        assert_eq!(read(chunked, "GET"), ends(Body::CHUNKED, true));
        let old = "HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\n";
        assert_eq!(read(old, "GET"), ends(Body::Length(3), true));
        let none = "HTTP/1.1 204 No Content\r\n\r\n";
        assert_eq!(read(none, "GET"), Some((204, Body::EMPTY, false)));
        let both = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n";
        assert_eq!(read(both, "GET"), None);
        assert_eq!(read("HTTP/1.1 101 Switching Protocols\r\n\r\n", "GET"), None);
        assert_eq!(read("SSH-2.0-OpenSSH\r\n\r\n", "GET"), None);
    }

    #[test]
    fn a_head_ends_wherever_it_is_cut() {
        let head = b"GET / HTTP/1.1\r\nA: b\r\n\r\nrest";
        for cut in 0..head.len() {
            let expected = (cut >= 24).then_some(24);
            assert_eq!(end(&head[..cut], 0), expected, "{cut}");
            assert_eq!(end(head, cut.min(23)), Some(24), "{cut}");
        }
        assert_eq!(end(b"a\n\n", 0), Some(3));
    }
}
