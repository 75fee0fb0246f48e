//! Failures around a service: clients, disks, kills. Memory stays bounded, every client gets an
//! answer or a close, and the service serves the next request.

use crate::service::{SEARCH, Service, search, text};
use elfen_rt::signal::service::ServiceReader;
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::signal::Signal;
use nix::unistd::Uid;
use serde_json::Value;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;

/// How much memory a service may grow with few clients: a head and an answer for each, and what the
/// allocator keeps.
const GROWTH_KIB: u64 = 32 * 1024;
/// The additional memory for each of many clients: the longest head.
const CLIENT_KIB: u64 = 16;

/// Starts a service and lets it search once, so that its permanent memory is allocated. Returns its
/// memory.
fn warm(more: &[&str]) -> (Service, u64) {
    let service = Service::start(more);
    assert_eq!(service.get("/search?q=te&n=100").0, 200);
    let memory_kib = service.memory_kib();
    (service, memory_kib)
}

fn assert_bounded(service: &Service, before_kib: u64) {
    assert_grew_less(service, before_kib, GROWTH_KIB);
}

fn assert_grew_less(service: &Service, before_kib: u64, growth_kib: u64) {
    let after_kib = service.memory_kib();
    assert!(after_kib < before_kib + growth_kib, "{before_kib} KiB became {after_kib}");
}

/// Runs `elfen-load` on this service, and returns its report.
fn load(service: &Service, args: &[&str]) -> Value {
    let url = format!("http://{}/search?q=te", service.address);
    let output = Command::new(env!("CARGO_BIN_EXE_elfen-load"))
        .args(args)
        .args(["--json", "--allow-late", &url])
        .output()
        .expect("elfen-load was built");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

/// Goal: ten thousand clients are served with bounded memory. Method: ten thousand connections with
/// two requests each, and one request after them.
#[test]
#[ignore = "needs 10300 open files"]
fn ten_thousand_clients_are_served() {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("Linux has it");
    let enough = hard >= 10_300 || Uid::effective().is_root();
    assert!(enough, "needs 10300 open files: `ulimit -Hn` is {hard}");
    let (service, before_kib) = warm(&["--connections", "10100", "--queue", "20000"]);
    let report = load(
        &service,
        &[
            "--connections",
            "10000",
            "--arrivals",
            "uniform",
            "--rps",
            "4000",
            "--requests",
            "20000",
            // Long enough for slow machines.
            "--timeout",
            "60s",
        ],
    );
    assert_eq!((&report["requests"], &report["errors"]), (&20_000.into(), &0.into()), "{report}");
    assert!(service.get("/metrics").1.contains("elfen_search_accepted_total 1000"));
    assert_grew_less(&service, before_kib, 10_000 * CLIENT_KIB);
}

/// Goal: if a service is killed under load, its clients only lose requests. Each loss is counted,
/// and a new service at the same address serves. Method: SIGKILL after the first answers.
#[test]
fn a_killed_service_is_survived() {
    let service = Service::start(&[]);
    let address = service.address.to_string();
    let page = ServiceReader::open(&service.name).expect("the service made it");
    let slot = page.slot(0).expect("one request lane");
    let args = ["--rps", "500", "--requests", "1000", "--connections", "8", "--timeout", "1s"];
    let report = thread::scope(|scope| {
        let running = scope.spawn(|| load(&service, &args));
        while slot.finished_requests.load(Relaxed) < 10 {
            thread::yield_now();
        }
        service.signal(Signal::SIGKILL);
        running.join().expect("it ends")
    });
    let (requests, errors) = (report["requests"].as_u64(), report["errors"].as_u64());
    assert_eq!(requests, Some(1_000));
    assert!(errors.is_some_and(|errors| 0 < errors && errors < 1_000), "{report}");
    drop(service);
    let next = Service::start_at(&address, &[]);
    assert_eq!(next.get("/search?q=te").0, 200);
}

/// Goal: whatever a client sends, it gets an answer or a close, and the next request is served.
/// Method: every kind of hostile client, each followed by a valid request.
#[test]
fn hostile_clients_are_survived() {
    let (service, before_kib) = warm(&["--idle", "300ms"]);
    let megabyte = format!("GET /search?q={} HTTP/1.1\r\n\r\n", "a".repeat(1 << 20));
    let headers = format!("GET / HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(10_000));
    let noise: Vec<u8> =
        (0..50_000_u32).map(|n| n.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();
    for (bytes, status) in [
        (&b"POST /search HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"[..], "413"),
        (b"DELETE / HTTP/1.1\r\n\r\n", "405"),
        (b"GET /search?q=%ff%fe HTTP/1.1\r\nConnection: close\r\n\r\n", "400"),
        (b"GET /search?q=\xff\xfe HTTP/1.1\r\n\r\n", "400"),
        (b"GET /search HTTP/1.1\r\nConnection: close\r\n\r\n", "400"),
        (b"nonsense\r\n\r\n", "400"),
        (b"GET / HTTP/1.1", ""),
        (b"", ""),
        (megabyte.as_bytes(), "431"),
        (headers.as_bytes(), "431"),
        (&noise, "400"),
    ] {
        let answer = service.exchange(bytes);
        let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(40)]).into_owned();
        // A client that is refused while it sends may only see the close.
        let refused = answer.is_empty() && bytes.len() > 16 * 1024;
        assert!(refused || answer.get(9..12).unwrap_or("") == status, "{shown}: {answer:.80}");
        assert_eq!(service.get("/search?q=te").0, 200, "after {shown}");
    }
    // A client that sends half a request is disconnected.
    let mut half = service.connect();
    half.write_all(b"GET /search?q=te HTTP/1.1\r\nHos").expect("it listens");
    let mut answer = String::new();
    half.read_to_string(&mut answer).expect("a close");
    assert_eq!(answer, "");
    assert_eq!(service.get("/search?q=te").0, 200);
    assert_bounded(&service, before_kib);
}

/// Goal: pipelined requests are answered in order. A client that reads nothing delays no other
/// client, and is disconnected. Method: a thousand large answers are requested and not read, while
/// other clients are served.
#[test]
fn slow_readers_hold_up_nobody() {
    let (service, before_kib) = warm(&["--patience", "300ms"]);
    let request = b"GET /search?q=te&n=100 HTTP/1.1\r\nHost: x\r\n\r\n";
    let mut slow = service.connect();
    slow.set_nonblocking(true).expect("a socket option");
    // Fills the kernel's buffers with requests.
    while slow.write_all(request).is_ok() {}
    for _ in 0..50 {
        assert_eq!(service.get("/search?q=te").0, 200);
    }
    // When the service has disconnected the slow client, only the client of the metrics is left.
    while !service.get("/metrics").1.contains("elfen_search_connections 1\n") {}
    slow.set_nonblocking(false).expect("a socket option");
    let mut got = Vec::new();
    drop(slow.read_to_end(&mut got));
    let answers = String::from_utf8_lossy(&got).matches("HTTP/1.1 200 OK").count();
    assert!(answers > 1, "{answers} answers before the end");
    let mut ahead = service.connect();
    let two = [&request[..], b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"].concat();
    ahead.write_all(&two).expect("it listens");
    let mut answer = String::new();
    ahead.read_to_string(&mut answer).expect("two answers");
    let (first, second) = (answer.find("\"hits\"").expect("the first"), answer.find("{}\n"));
    assert!(second.is_some_and(|second| first < second), "in order");
    assert_bounded(&service, before_kib);
}

/// Goal: requests beyond the bounds are refused with a clear reason, and every client gets an
/// answer. Method: a queue of one, and fifty clients with twenty requests each; then more clients
/// than may connect.
#[test]
fn overload_is_refused() {
    let (service, before_kib) = warm(&["--queue", "1", "--connections", "60"]);
    let counts: Vec<(u32, u32)> = thread::scope(|scope| {
        let ask = || {
            let answers = (0..20).map(|_| service.get("/search?q=te+to+ta+%22te+to%22~9"));
            answers.fold((0, 0), |(good, refused), (status, body)| match status {
                200 => (good + 1, refused),
                503 if body.contains("queue is full") => (good, refused + 1),
                other => panic!("{other}: {body}"),
            })
        };
        let clients: Vec<_> = (0..50).map(|_| scope.spawn(ask)).collect();
        clients.into_iter().map(|client| client.join().expect("all answered")).collect()
    });
    let good: u32 = counts.iter().map(|(good, _)| good).sum();
    let refused: u32 = counts.iter().map(|(_, refused)| refused).sum();
    assert_eq!(good + refused, 1_000);
    assert!(good > 0, "some are served");
    let held: Vec<TcpStream> = (0..60).map(|_| service.connect()).collect();
    let answer = service.exchange(b"GET /health HTTP/1.1\r\n\r\n");
    assert!(
        answer.is_empty() || answer.contains("503") && answer.contains("connections"),
        "{answer}"
    );
    drop(held);
    assert_bounded(&service, before_kib);
}

/// Goal: a killed build leaves nothing that can be served, and the next build succeeds. Method:
/// SIGKILL when the first files of the index exist.
#[test]
fn a_killed_build_is_never_served() {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let dir = scratch.path().join("index");
    let mut child = Command::new(SEARCH)
        .args(["index", "--docs", "1000000", text(&dir)])
        .spawn()
        .expect("elfen-search was built");
    while !scratch.path().join(".index.building/meta.json").exists() {
        thread::yield_now();
    }
    child.kill().expect("it runs");
    child.wait().expect("it was killed");
    for place in [dir.clone(), scratch.path().join(".index.building")] {
        let output = search(&["serve", "--listen", "127.0.0.1:0", text(&place)]);
        assert_eq!(output.status.code(), Some(1));
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(stderr.contains("holds no finished index"), "{stderr}");
    }
    assert!(search(&["index", "--docs", "50", text(&dir)]).status.success());
    assert!(!scratch.path().join(".index.building").exists());
}

/// Goal: if the disk is full, the error of the build names the place, and no files remain. Method:
/// a limit on the size of files, which makes writes fail as a full disk does.
#[test]
fn a_bound_on_files_leaves_nothing() {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let script = "trap '' XFSZ; ulimit -f 64; \"$0\" index --docs 2000 \"$1/index\"; \
                  status=$?; ls -A \"$1\"; exit $status";
    let output = Command::new("sh").args(["-c", script, SEARCH, text(scratch.path())]).output();
    let output = output.expect("a shell");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    let line = stderr.lines().last().expect("a message");
    assert!(line.starts_with("elfen: indexing into ") && line.contains("too large"), "{stderr}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "", "nothing is left");
}
