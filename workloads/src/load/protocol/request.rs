//! One line of a query file as the bytes of one request.
//!
//! HTTP lines are a target (`/search?q=a`) or a method, a target and a body (`POST /x body`); Redis
//! lines are the command as a person types it.

use thiserror::Error;

#[derive(Debug, Error, PartialEq, Eq)]
pub(crate) enum RequestError {
    #[error(
        "`{0}` is no HTTP request: write a target that begins with `/`, or METHOD /target [body]"
    )]
    NoTarget(String),
    #[error("`{0}` gets no answer that can be matched to it: leave it out")]
    NoAnswer(String),
    #[error("`{0}` has a control character in it: percent-encode it, or leave it out")]
    Control(String),
}

pub(super) fn http(line: &str, host: &str) -> Result<Vec<u8>, RequestError> {
    let mut words = line.splitn(3, ' ');
    let first = words.next().unwrap_or_default();
    let (method, target, body) = if first.starts_with('/') {
        ("GET", line, None)
    } else {
        (first, words.next().unwrap_or_default(), words.next())
    };
    let is_method = !method.is_empty() && method.bytes().all(|byte| byte.is_ascii_uppercase());
    // An answer to HEAD has a length and no body: where it ends can't be told from the answer
    // alone.
    if method == "HEAD" || method == "CONNECT" {
        return Err(RequestError::NoAnswer(line.to_owned()));
    }
    if !is_method || !target.starts_with('/') || target.contains(' ') {
        return Err(RequestError::NoTarget(line.to_owned()));
    }
    if target.bytes().any(|byte| byte.is_ascii_control()) {
        return Err(RequestError::Control(line.to_owned()));
    }
    let length = body.map(|body| format!("Content-Length: {}\r\n", body.len())).unwrap_or_default();
    let head = format!("{method} {target} HTTP/1.1\r\nHost: {host}\r\n{length}\r\n");
    Ok([head.as_bytes(), body.unwrap_or_default().as_bytes()].concat())
}

pub(super) fn redis(line: &str) -> Result<Vec<u8>, RequestError> {
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    let command = words.first().copied().unwrap_or_default().to_ascii_uppercase();
    // These turn the connection into a stream of messages, or end it.
    let streams =
        ["SUBSCRIBE", "PSUBSCRIBE", "SSUBSCRIBE", "MONITOR", "QUIT", "SHUTDOWN", "SYNC", "PSYNC"];
    if streams.contains(&command.as_str()) || line.to_ascii_uppercase().starts_with("CLIENT REPLY")
    {
        return Err(RequestError::NoAnswer(line.to_owned()));
    }
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend(format!("${}\r\n{word}\r\n", word.len()).bytes());
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(bytes: Result<Vec<u8>, RequestError>) -> String {
        String::from_utf8(bytes.expect("a good line")).expect("text")
    }

    /// Goal: each protocol's request is written as its specification has it. Method: one of each
    /// kind.
    #[test]
    fn requests_are_written() {
        assert_eq!(text(http("/s?q=a", "h:1")), "GET /s?q=a HTTP/1.1\r\nHost: h:1\r\n\r\n");
        assert_eq!(
            text(http("POST /p a b", "h")),
            "POST /p HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\na b"
        );
        assert_eq!(text(redis("SET k  v")), "*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1\r\nv\r\n");
    }

    /// Goal: a line whose answer could not be matched, or that would smuggle a second request, is
    /// refused. Method: each such line.
    #[test]
    fn bad_lines_are_refused() {
        for line in ["", "search", "get /x", "/a b", "GET http://x/", "HEAD /x", "/a\r\nX: y"] {
            assert!(http(line, "h").is_err(), "{line}");
        }
        for line in ["subscribe x", "client reply off", "QUIT"] {
            assert!(redis(line).is_err(), "{line}");
        }
    }
}
