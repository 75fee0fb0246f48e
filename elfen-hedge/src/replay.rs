//! Recorded requests, which warm a restarted server. Only with `--replay`.
//!
//! A recorded request has its method, its target and a few fields that affect the kind of answer.
//! Requests with a field that may contain a secret are not recorded. Neither are requests with a
//! body. Requests that failed are not recorded either, because they might have broken the server.

use std::collections::VecDeque;
use std::time::Duration;

use hyper::header::{ACCEPT, ACCEPT_ENCODING, ACCEPT_LANGUAGE, HOST, HeaderMap, USER_AGENT};
use hyper::{Method, StatusCode};

use crate::request::Request;

/// The maximum number of recorded requests. Newer requests replace the oldest ones.
const MAX_KEPT: usize = 256;
/// The minimum time between two requests, which are sent one at a time: at most 500 per second.
pub(crate) const MIN_GAP: Duration = Duration::from_millis(2);

/// Parts of the names of fields that may contain a secret.
const SECRET: [&str; 10] =
    ["auth", "cookie", "token", "key", "secret", "session", "passw", "credential", "csrf", "sign"];

/// The fields that are kept.
const KEPT: [hyper::header::HeaderName; 5] =
    [HOST, ACCEPT, ACCEPT_ENCODING, ACCEPT_LANGUAGE, USER_AGENT];

#[derive(Debug)]
pub(crate) struct RecordedRequests {
    /// How many requests a restarted server gets.
    pub(crate) count: usize,
    kept: VecDeque<Request>,
}

impl RecordedRequests {
    pub(crate) fn new(count: usize) -> Self {
        Self { count, kept: VecDeque::new() }
    }

    pub(crate) fn record(&mut self, request: &Request, status: StatusCode) {
        let is_read = request.method == Method::GET || request.method == Method::HEAD;
        let is_good = status.is_success() || status.is_redirection();
        if self.count == 0 || !is_read || !is_good || !request.body.is_empty() {
            return;
        }
        let is_secret = |name: &str| SECRET.iter().any(|part| name.contains(part));
        if request.fields.keys().any(|name| is_secret(name.as_str())) {
            return;
        }
        let fields: HeaderMap = KEPT
            .iter()
            .filter_map(|name| Some((name.clone(), request.fields.get(name)?.clone())))
            .collect();
        let method = request.method.clone();
        let target = request.target.clone();
        if self.kept.len() == MAX_KEPT {
            self.kept.pop_front();
        }
        let body = hyper::body::Bytes::new();
        self.kept.push_back(Request { method, target, fields, body });
    }

    /// The request to send as number `number`. `None` if enough were sent, or if none is recorded.
    pub(crate) fn nth(&self, number: usize) -> Option<Request> {
        let at = number.checked_rem(self.kept.len())?;
        self.kept.get(at).filter(|_| number < self.count).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::body::Bytes;
    use hyper::header::{HeaderName, HeaderValue};

    fn request(method: Method, fields: &[&'static str]) -> Request {
        let value = HeaderValue::from_static("x");
        let fields = fields.iter().map(|name| (HeaderName::from_static(name), value.clone()));
        let fields = fields.collect();
        Request { method, target: "/a".parse().unwrap(), fields, body: Bytes::new() }
    }

    /// Goal: fields that may contain a secret are never sent again. Method: fields of all kinds.
    #[test]
    fn secrets_are_not_kept() {
        let mut recorded = RecordedRequests::new(10);
        for name in [
            "authorization",
            "cookie",
            "x-api-key",
            "x-auth-token",
            "x-amz-security-token",
            "signature",
            "x-session-id",
            "x-xsrf-token",
            "authentication-info",
        ] {
            recorded.record(&request(Method::GET, &["host", name]), StatusCode::OK);
            assert!(recorded.nth(0).is_none(), "{name}");
        }
        let kept = request(Method::GET, &["host", "accept", "forwarded", "x-request-id", "range"]);
        recorded.record(&kept, StatusCode::OK);
        let fields = &recorded.nth(9).unwrap().fields;
        let mut names: Vec<&str> = fields.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["accept", "host"]);
        assert!(recorded.nth(10).is_none(), "that was enough");
    }

    #[test]
    fn only_harmless_requests_are_kept() {
        let mut recorded = RecordedRequests::new(10);
        for method in [Method::POST, Method::PUT, Method::DELETE, Method::OPTIONS] {
            recorded.record(&request(method, &["host"]), StatusCode::OK);
        }
        for status in [StatusCode::NOT_FOUND, StatusCode::INTERNAL_SERVER_ERROR] {
            recorded.record(&request(Method::GET, &["host"]), status);
        }
        let mut with_body = request(Method::GET, &["host"]);
        with_body.body = Bytes::from_static(b"x");
        recorded.record(&with_body, StatusCode::OK);
        assert!(recorded.nth(0).is_none());
        for _ in 0..2 * MAX_KEPT {
            recorded.record(&request(Method::HEAD, &["host"]), StatusCode::FOUND);
        }
        assert_eq!(recorded.kept.len(), MAX_KEPT);
        let mut off = RecordedRequests::new(0);
        off.record(&request(Method::GET, &["host"]), StatusCode::OK);
        assert!(off.kept.is_empty());
    }
}
