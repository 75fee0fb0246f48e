//! Parses requests and creates answers.
//!
//! The service accepts GET and HEAD without a body. Other requests get an answer with the matching
//! error status.

use crate::units::{Nanos, micros};
use http_body_util::Full;
use hyper::body::{Body, Bytes};
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderName, HeaderValue, RETRY_AFTER};
use hyper::{Method, Request, Response, StatusCode, Uri};
use percent_encoding::percent_decode_str;
use serde_json::json;

const DEFAULT_HITS: usize = 10;
const MOST_HITS: usize = 100;
const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");

pub(super) type Answer = Response<Full<Bytes>>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    Search { query: String, limit: usize },
    Metrics,
    Health,
}

/// Parses a request, or returns the status of its refusal.
pub(super) fn understand(request: &Request<impl Body>) -> Result<Ask, StatusCode> {
    if !request.body().is_end_stream() {
        return Err(StatusCode::PAYLOAD_TOO_LARGE);
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return Err(StatusCode::METHOD_NOT_ALLOWED);
    }
    route(request.uri())
}

fn route(target: &Uri) -> Result<Ask, StatusCode> {
    match target.path() {
        "/metrics" => return Ok(Ask::Metrics),
        "/health" => return Ok(Ask::Health),
        "/search" => {}
        _ => return Err(StatusCode::NOT_FOUND),
    }
    let mut query = None;
    let mut limit = DEFAULT_HITS;
    for parameter in target.query().unwrap_or_default().split('&') {
        match parameter.split_once('=') {
            Some(("q", value)) => {
                let value = value.replace('+', " ");
                let decoded = percent_decode_str(&value).decode_utf8();
                query = Some(decoded.map_err(|_| StatusCode::BAD_REQUEST)?.into_owned());
            }
            Some(("n", value)) => {
                let asked = value.parse().ok().filter(|n| *n <= MOST_HITS);
                limit = asked.ok_or(StatusCode::BAD_REQUEST)?;
            }
            _ => {}
        }
    }
    let query = query.ok_or(StatusCode::BAD_REQUEST)?;
    Ok(Ask::Search { query, limit })
}

/// The times of a search. The answer reports them in `Server-Timing`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timing {
    pub(super) queue_ns: Nanos,
    pub(super) service_ns: Nanos,
    /// The part of the service time that an emulated core added.
    pub(super) added_ns: Option<Nanos>,
}

impl Timing {
    pub(super) fn add_to(self, answer: &mut Answer) {
        // The standard's unit is milliseconds.
        let dur = |ns| format!("dur={:.6}", micros(ns) / 1e3);
        let (queue, service) = (dur(self.queue_ns), dur(self.service_ns));
        let added = self.added_ns.map_or_else(String::new, |ns| format!(", added;{}", dur(ns)));
        let timing = HeaderValue::try_from(format!("queue;{queue}, service;{service}{added}"));
        answer.headers_mut().insert(SERVER_TIMING, timing.expect("numbers are visible ASCII"));
    }
}

pub(super) fn json(status: StatusCode, body: Vec<u8>) -> Answer {
    answer(status, "application/json", body)
}

pub(super) fn metrics(text: String) -> Answer {
    answer(StatusCode::OK, "text/plain; version=0.0.4", text.into_bytes())
}

/// An error with this message. If the message is empty, the status gives the reason.
pub(super) fn error(status: StatusCode, message: &str) -> Answer {
    let reason = status.canonical_reason().unwrap_or_default();
    let message = if message.is_empty() { reason } else { message };
    json(status, (json!({ "error": message }).to_string() + "\n").into_bytes())
}

fn answer(status: StatusCode, kind: &'static str, body: Vec<u8>) -> Answer {
    let mut answer = Response::new(Full::from(body));
    *answer.status_mut() = status;
    let fields = answer.headers_mut();
    fields.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    match status {
        StatusCode::SERVICE_UNAVAILABLE => {
            fields.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        StatusCode::METHOD_NOT_ALLOWED => {
            fields.insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        }
        _ => {}
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: targets are parsed correctly. Method: valid targets, and each kind of invalid target.
    #[test]
    fn targets_are_understood() {
        let ask = |target: &str| route(&target.parse().expect("a target"));
        let search = |query: &str, limit| Ok(Ask::Search { query: query.to_owned(), limit });
        assert_eq!(ask("/search?q=new+york%21"), search("new york!", 10));
        assert_eq!(ask("/search?n=0&q=%C3%A9&x=y"), search("\u{e9}", 0));
        assert_eq!(ask("/metrics"), Ok(Ask::Metrics));
        assert_eq!(ask("/health?x"), Ok(Ask::Health));
        assert_eq!(ask("/"), Err(StatusCode::NOT_FOUND));
        for bad in ["/search", "/search?q", "/search?q=%c3", "/search?q=a&n=101"] {
            assert_eq!(ask(bad), Err(StatusCode::BAD_REQUEST), "{bad}");
        }
    }
}
