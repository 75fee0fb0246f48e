//! Goal: no byte of a client's framing reaches a server, so that a server cannot read a request
//! that the proxy did not read. Method: raw sockets, and servers that record every byte.

use std::io::{BufRead, Write};

use crate::rig::{Backend, Client, Hedge};

/// The request that an attacker would smuggle to a server.
const NEXT: &str = "GET /next HTTP/1.1\r\nHost: a\r\n\r\n";

/// Sends bytes on a new connection. Returns the status of the first answer, if any.
fn status(hedge: &Hedge, bytes: &[u8]) -> Option<u16> {
    let mut client = Client::connect(hedge.at);
    // The proxy may have answered and closed the connection before everything was sent.
    drop(client.stream.get_mut().write_all(bytes));
    client.half_close();
    let mut line = String::new();
    drop(client.stream.read_line(&mut line));
    let status = line.split(' ').nth(1).and_then(|code| code.parse().ok());
    // Reads to the end, so that all consequences have happened.
    while client.stream.read_line(&mut line).is_ok_and(|count| count > 0) {}
    status
}

fn post(fields: &str, body: &str) -> String {
    format!("POST /first HTTP/1.1\r\nHost: a\r\n{fields}\r\n\r\n{body}")
}

fn get(fields: &str) -> String {
    format!("GET /first HTTP/1.1\r\n{fields}\r\n\r\n")
}

/// Whether a request has the form that the proxy writes.
fn is_the_proxys(request: &str) -> bool {
    let lines = request.replace("\r\n", "");
    let (head, _) = request.split_once("\r\n\r\n").expect("a whole head");
    request.matches("forwarded: for=127.0.0.1;").count() == 1
        && !lines.contains(['\r', '\n'])
        && !head.contains("transfer-encoding")
        && request.matches(" HTTP/1.1\r\n").count() == 1
}

#[test]
fn no_framing_of_a_client_reaches_a_server() {
    const CHUNKED: &str = "Transfer-Encoding: chunked";
    let backend = Backend::echo();
    let other = Backend::echo();
    let hedge = Hedge::start(backend.at, other.at, &["--policy", "none"]);
    let refused = [
        ("a bare LF in a chunk extension", post(CHUNKED, "1;a\nb\r\nx\r\n0\r\n\r\n"), 400),
        ("a bare LF that ends an extension", post(CHUNKED, "1;a\nx\r\n0\r\n\r\n"), 400),
        ("a bare CR in an extension", post(CHUNKED, "1;a\rb\r\nx\r\n0\r\n\r\n"), 400),
        ("a bare LF after a size", post(CHUNKED, "1\nx\r\n0\r\n\r\n"), 400),
        ("a bare LF after data", post(CHUNKED, "1\r\nx\n0\r\n\r\n"), 400),
        ("a bare LF after the last size", post(CHUNKED, "1\r\nx\r\n0\n\r\n"), 400),
        ("a size without digits", post(CHUNKED, "\r\nx\r\n0\r\n\r\n"), 400),
        ("a size with a sign", post(CHUNKED, "+1\r\nx\r\n0\r\n\r\n"), 400),
        ("a size as in C", post(CHUNKED, "0x1\r\nx\r\n0\r\n\r\n"), 400),
        ("a size that overflows", post(CHUNKED, "10000000000000001\r\nx\r\n0\r\n\r\n"), 400),
        ("data that is longer than its size", post(CHUNKED, "1\r\nxyz\r\n0\r\n\r\n"), 400),
        ("a malformed trailer", post(CHUNKED, "0\r\nGET / HTTP/1.1\r\n\r\n"), 400),
        ("a bare LF in trailers", post(CHUNKED, "1\r\nx\r\n0\r\nA: b\nC: d\r\n\r\n"), 400),
        ("chunks of HTTP/1.0", post(CHUNKED, "0\r\n\r\n").replace("1.1", "1.0"), 400),
        ("chunked, then not", post("Transfer-Encoding: chunked, identity", "0\r\n\r\n"), 400),
        ("a coding before chunked", post("Transfer-Encoding: gzip, chunked", "0\r\n\r\n"), 501),
        ("two codings", post(&format!("Transfer-Encoding: gzip\r\n{CHUNKED}"), "0\r\n\r\n"), 501),
        ("chunked twice", post(&format!("{CHUNKED}\r\n{CHUNKED}"), "0\r\n\r\n"), 501),
        ("a coding that looks like it", post("Transfer-Encoding: xchunked", "0\r\n\r\n"), 400),
        ("two lengths", post("Content-Length: 1\r\nContent-Length: 2", "xy"), 400),
        ("a list of lengths", post("Content-Length: 1, 1", "x"), 400),
        ("a length with a sign", post("Content-Length: +1", "x"), 400),
        ("no length in the field", post("Content-Length:", "x"), 400),
        ("a length that overflows", post("Content-Length: 99999999999999999999", "x"), 400),
        ("a body that breaks off", post("Content-Length: 900", "x"), 400),
        ("a folded line", get("Host: a\r\nA: b\r\n c"), 400),
        ("a space before a colon", get("Host: a\r\nA : b"), 400),
        ("a space in front of a name", get(" Host: a"), 400),
        ("NUL in a value", get("Host: a\r\nA: b\0c"), 400),
        ("NUL in a name", get("Host: a\r\nA\0: b"), 400),
        ("a bare CR in a value", get("Host: a\r\nA: b\rc"), 400),
        ("no Host", get("A: b"), 400),
        ("two Hosts", get("Host: a\r\nHost: a"), 400),
        ("a malformed Host", get("Host: a/b"), 400),
        ("an unknown version", get("Host: a").replace("1.1", "1.2"), 400),
        ("an upgrade", get("Host: a\r\nConnection: upgrade\r\nUpgrade: websocket"), 501),
        ("a tunnel", get("Host: a").replace("GET /first", "CONNECT a:80"), 501),
        ("HTTP/2", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_owned(), 505),
        ("many fields", get(&format!("Host: a\r\n{}A: b", "A: b\r\n".repeat(130))), 431),
        ("a long head", get(&format!("Host: a\r\nA: {}", "x".repeat(70_000))), 431),
        ("a large body", post("Content-Length: 9999999", "x"), 413),
        (
            "a large body in chunks",
            post(CHUNKED, &format!("100001\r\n{}\r\n0\r\n\r\n", "x".repeat(0x10_0001))),
            413,
        ),
    ];
    let count = refused.len();
    for (what, bytes, expected) in refused {
        let got = status(&hedge, (bytes + NEXT).as_bytes());
        // If the client was still sending, the kernel may have reset the connection.
        let is_long = matches!(expected, 413 | 431);
        assert!(got == Some(expected) || is_long && got.is_none(), "{what}: {got:?}");
        assert_eq!((backend.requests(), other.requests()), (vec![], vec![]), "{what}");
    }
    let (done, _) = hedge.end();
    assert_eq!((&done["requests"], &done["refused"]), (&0.into(), &count.into()), "{done}");
}

/// The proxy passes on unambiguous requests in its own framing. The bytes that follow are another
/// request, or are not read at all.
#[test]
fn accepted_requests_are_framed_again() {
    const CHUNKED: &str = "Transfer-Encoding: chunked";
    let both = format!("Content-Length: 4\r\n{CHUNKED}");
    let reversed = format!("{CHUNKED}\r\nContent-Length: 4");
    let accepted = [
        ("an extension", post(CHUNKED, "2;a=\"b\" ;c\r\nxy\r\n0\r\n\r\n"), "xy", 2),
        ("leading zeros", post(CHUNKED, "0002\r\nxy\r\n00\r\n\r\n"), "xy", 2),
        ("trailers", post(CHUNKED, "2\r\nxy\r\n0\r\nContent-Length: 9\r\nA: b\r\n\r\n"), "xy", 2),
        ("one length twice", post("Content-Length: 2\r\nContent-Length: 2", "xy"), "xy", 2),
        ("an empty body", post("Content-Length: 0", ""), "", 2),
        ("bare LFs in a head", get("Host: a").replace("\r\n", "\n"), "", 2),
        // The chunked framing counts, and the connection ends with the answer.
        ("a length beside chunks", post(&both, "2\r\nxy\r\n0\r\n\r\n"), "xy", 1),
        ("chunks beside a length", post(&reversed, "2\r\nxy\r\n0\r\n\r\n"), "xy", 1),
        ("a tunnel's target", get("Host: b").replace("/first", "http://a/first"), "", 2),
    ];
    for (what, bytes, body, reached) in accepted {
        let (backend, other) = (Backend::echo(), Backend::echo());
        let hedge = Hedge::start(backend.at, other.at, &["--policy", "none"]);
        let is_post = bytes.starts_with("POST");
        assert_eq!(status(&hedge, (bytes + NEXT).as_bytes()), Some(200), "{what}");
        let requests = backend.requests();
        assert_eq!(requests.len(), reached, "{what}: {requests:?}");
        assert!(requests.iter().all(|request| is_the_proxys(request)), "{what}: {requests:?}");
        assert!(requests[0].contains("host: a\r\n"), "{what}: {requests:?}");
        assert!(requests[0].ends_with(&format!("\r\n\r\n{body}")), "{what}: {requests:?}");
        let length = format!("content-length: {}\r\n", body.len());
        assert_eq!(requests[0].contains(&length), is_post, "{what}: {requests:?}");
        let (done, _) = hedge.end();
        assert_eq!(done["requests"], reached, "{what}: {done}");
    }
}
