//! The entry point of the fuzzer: a client's connection, and the requests that servers would
//! receive.

use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use http_body_util::Empty;
use hyper::Response;
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_LENGTH, HOST};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::AsyncWriteExt;

use crate::proxy::{builder, receive};
use crate::request::{Origin, Request, remove_hop_by_hop};

const ORIGIN: Origin = Origin { client: IpAddr::V4(Ipv4Addr::LOCALHOST), trusted: false };
const ROOM: usize = 1 << 20;

/// Handles all bytes of a client that then closes its side.
pub fn connection(bytes: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    runtime.expect("a runtime").block_on(async {
        let (mut client, ours) = tokio::io::duplex(ROOM);
        if client.write_all(bytes).await.is_err() || client.shutdown().await.is_err() {
            return;
        }
        let answer = service_fn(|request: hyper::Request<Incoming>| async {
            if let Ok(request) = receive(request, ORIGIN, Duration::from_secs(1)).await {
                is_safe(&request);
            }
            Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new()))
        });
        let _ended = builder().serve_connection(TokioIo::new(ours), answer).await;
    });
}

/// Checks that a server must read the request as this one request.
fn is_safe(request: &Request) {
    let lengths: Vec<_> = request.fields.get_all(CONTENT_LENGTH).iter().collect();
    match lengths.as_slice() {
        [] => assert!(request.body.is_empty(), "{request:?}"),
        [length] => assert_eq!(length.as_bytes(), request.body.len().to_string().as_bytes()),
        _ => panic!("{request:?}"),
    }
    assert!(request.fields.get_all(HOST).iter().count() <= 1, "{request:?}");
    let mut fields = request.fields.clone();
    remove_hop_by_hop(&mut fields);
    assert_eq!(fields.len(), request.fields.len(), "{request:?}");
    let target = request.target.to_string();
    assert!(target.starts_with('/') || target == "*", "{request:?}");
    let has_line_ends = |bytes: &[u8]| bytes.iter().any(|byte| matches!(byte, b'\r' | b'\n' | 0));
    assert!(!has_line_ends(target.as_bytes()), "{request:?}");
    for (name, value) in &request.fields {
        assert!(!has_line_ends(name.as_str().as_bytes()) && !has_line_ends(value.as_bytes()));
    }
}
