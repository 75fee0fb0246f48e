//! Answers as bytes.

use super::request::Status;
use crate::units::{Nanos, micros};
use serde_json::json;

/// What a search took: the client is told in `Server-Timing`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timing {
    pub(super) queue_ns: Nanos,
    pub(super) service_ns: Nanos,
    /// Of that, what an emulated core made it longer.
    pub(super) added_ns: Option<Nanos>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) status: Status,
    pub(super) head_only: bool,
    pub(super) keep_alive: bool,
    pub(super) timing: Option<Timing>,
}

pub(super) fn write(out: &mut Vec<u8>, shape: Shape, kind: &str, body: &[u8]) {
    let Shape { status, head_only, keep_alive, timing } = shape;
    let (code, reason, length) = (status.code(), status.reason(), body.len());
    let mut head =
        format!("HTTP/1.1 {code} {reason}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n");
    if let Some(Timing { queue_ns, service_ns, added_ns }) = timing {
        // Milliseconds, as the standard has it.
        let dur = |ns| format!("dur={:.6}", micros(ns) / 1e3);
        let (queue, service) = (dur(queue_ns), dur(service_ns));
        let added = added_ns.map_or_else(String::new, |ns| format!(", added;{}", dur(ns)));
        head += &format!("Server-Timing: queue;{queue}, service;{service}{added}\r\n");
    }
    match status {
        Status::Unavailable => head += "Retry-After: 1\r\n",
        Status::MethodNotAllowed => head += "Allow: GET, HEAD\r\n",
        _ => {}
    }
    // Said in either case: a client of HTTP/1.0 does not take it for granted.
    let connection = if keep_alive { "keep-alive" } else { "close" };
    head += &format!("Connection: {connection}\r\n\r\n");
    out.extend_from_slice(head.as_bytes());
    if !head_only {
        out.extend_from_slice(body);
    }
}

pub(super) fn error_body(status: Status, message: &str) -> Vec<u8> {
    let message = if message.is_empty() { status.reason() } else { message };
    (json!({ "error": message }).to_string() + "\n").into_bytes()
}

pub(super) const JSON: &str = "application/json";
pub(super) const METRICS: &str = "text/plain; version=0.0.4";
