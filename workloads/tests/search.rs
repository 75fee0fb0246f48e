//! `elfen-search` as users and hostile clients meet it. Nothing here looks at how long anything
//! took.

use elfen_rt::signal::service::{ServiceReader, Writer};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::LazyLock;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use tempfile::TempDir;

const SEARCH: &str = env!("CARGO_BIN_EXE_elfen-search");

fn search(args: &[&str]) -> Output {
    Command::new(SEARCH).args(args).output().expect("elfen-search was built")
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

/// A small index of the built-in corpus, made once.
static INDEX: LazyLock<TempDir> = LazyLock::new(|| {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let output = search(&["index", "--docs", "300", text(&scratch.path().join("index"))]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    scratch
});

/// A running service, ended with the test.
struct Service {
    child: Child,
    stdout: BufReader<ChildStdout>,
    address: SocketAddr,
    name: String,
}

impl Service {
    fn start(more: &[&str]) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Relaxed);
        let name = format!("search-test-{}-{number}", std::process::id());
        let index = INDEX.path().join("index");
        let mut child = Command::new(SEARCH)
            .args(["serve", "--listen", "127.0.0.1:0", "--service-name", &name])
            .args(more)
            .arg(&index)
            .stdout(Stdio::piped())
            .spawn()
            .expect("elfen-search was built");
        let mut stdout = BufReader::new(child.stdout.take().expect("it is piped"));
        let mut line = String::new();
        stdout.read_line(&mut line).expect("it says where it serves");
        let address = line.trim().strip_prefix("serving on ").expect("its address");
        let address = address.parse().expect("an address");
        Self { child, stdout, address, name }
    }

    fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).expect("it listens")
    }

    /// What the service answers to these bytes, up to the close of the connection.
    fn exchange(&self, bytes: &[u8]) -> String {
        let mut stream = self.connect();
        // It may close before it has read everything.
        drop(stream.write_all(bytes));
        drop(stream.shutdown(Shutdown::Write));
        let mut answer = Vec::new();
        drop(stream.read_to_end(&mut answer));
        String::from_utf8_lossy(&answer).into_owned()
    }

    fn get(&self, target: &str) -> (u16, String) {
        let request = format!("GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        let answer = self.exchange(request.as_bytes());
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        (head[9..12].parse().expect("a status"), body.to_owned())
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).expect("a pid"));
        kill(pid, signal).expect("it runs");
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if self.child.try_wait().expect("it is ours").is_none() {
            self.child.kill().expect("it runs");
            self.child.wait().expect("it was killed");
        }
        let page = elfen_rt::service::Service::open(&self.name, 1);
        if let Ok(page) = page {
            page.remove().expect("it is ours");
        }
    }
}

/// Goal: a search finds what is there, and says what it took; nobody but coordinator and workers
/// runs. Method: one search, its headers, and the threads of the process.
#[test]
fn searches_are_answered() {
    let service = Service::start(&[]);
    let answer = service.exchange(b"GET /search?q=te&n=3 HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(answer.contains("\r\nServer-Timing: queue;dur="), "{answer}");
    let body: Value =
        serde_json::from_str(answer.split_once("\r\n\r\n").expect("a head").1).expect("JSON");
    assert!(body["hits"].as_u64().is_some_and(|hits| hits > 200), "the commonest word: {body}");
    assert_eq!(body["top"].as_array().map(Vec::len), Some(3));
    let threads = fs::read_dir(format!("/proc/{}/task", service.child.id())).expect("it runs");
    assert_eq!(threads.count(), 2, "the coordinator and one worker");
    assert_eq!(service.get("/search?q=%22open").0, 400);
    assert_eq!((service.get("/nowhere").0, service.get("/health").0), (404, 200));
    let head = service.exchange(b"HEAD /search?q=te HTTP/1.0\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 200 OK") && head.ends_with("\r\n\r\n"), "{head}");
    let (status, metrics) = service.get("/metrics");
    assert_eq!(status, 200);
    assert!(metrics.contains("elfen_search_answers_total{status=\"200\"} 3\n"), "{metrics}");
}

/// Goal: the service page tells who serves, how much was done, and that nothing runs or waits.
/// Method: read it around a hundred searches, and after the service was killed.
#[test]
fn the_page_is_published() {
    let service = Service::start(&[]);
    let page = ServiceReader::open(&service.name).expect("the service made it");
    let slot = page.slot(0).expect("one request lane");
    for n in 0..100 {
        assert_eq!(service.get(&format!("/search?q=te&n={}", n % 10)).0, 200);
    }
    assert_eq!(slot.finished_requests.load(Relaxed), 100);
    assert_eq!(slot.latency.count(), 100);
    assert!(!page.is_busy(0));
    let Writer::Process(writer, _) = page.writer(0) else { panic!("nobody writes the page") };
    assert_eq!(writer.pid().unsigned_abs(), service.child.id());
    service.signal(Signal::SIGKILL);
    let mut service = service;
    service.child.wait().expect("it was killed");
    assert!(!page.is_busy(0), "the dead are not busy");
}

/// Goal: whatever a client sends, it gets an answer or a close, and the next request is served.
/// Method: every kind of hostile client, each followed by a good one.
#[test]
fn hostile_clients_are_survived() {
    let service = Service::start(&["--patience", "300ms"]);
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
        // A client that is still sending when it is refused may see the close alone.
        let refused = answer.is_empty() && bytes.len() > 16 * 1024;
        assert!(refused || answer.get(9..12).unwrap_or("") == status, "{shown}: {answer:.80}");
        assert_eq!(service.get("/search?q=te").0, 200, "after {shown}");
    }
    // Half a request, and then nothing: told so, and let go.
    let mut half = service.connect();
    half.write_all(b"GET /search?q=te HTTP/1.1\r\nHos").expect("it listens");
    let mut answer = String::new();
    half.read_to_string(&mut answer).expect("an answer and a close");
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    assert_eq!(service.get("/search?q=te").0, 200);
}

/// Goal: requests sent ahead are answered in order, a client that reads nothing holds up nobody,
/// and is let go. Method: a thousand large answers asked for and not read, with others served
/// meanwhile.
#[test]
fn slow_readers_hold_up_nobody() {
    let service = Service::start(&["--patience", "300ms"]);
    let request = b"GET /search?q=te&n=100 HTTP/1.1\r\nHost: x\r\n\r\n";
    let mut slow = service.connect();
    slow.set_nonblocking(true).expect("a socket option");
    // As much as the kernel takes.
    while slow.write_all(request).is_ok() {}
    for _ in 0..50 {
        assert_eq!(service.get("/search?q=te").0, 200);
    }
    // In the end the service closes: only the client that asks for the metrics is left.
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
}

/// Goal: beyond its bounds the service refuses clearly, and forgets nobody. Method: a queue of one
/// and fifty clients at once, each asking twenty times; then more clients than may connect.
#[test]
fn overload_is_refused() {
    let service = Service::start(&["--queue", "1", "--connections", "60"]);
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
}

/// Asks over one connection until it ends, and counts the answers. True if one was broken off.
fn ask_to_the_end(mut stream: TcpStream, answers: &AtomicU64) -> bool {
    loop {
        if stream.write_all(b"GET /search?q=te+to HTTP/1.1\r\nHost: x\r\n\r\n").is_err() {
            return false;
        }
        let mut buffer = [0; 16 * 1024];
        let mut answer = Vec::new();
        while !answer.ends_with(b"]}\n") {
            match stream.read(&mut buffer) {
                // A close before the first byte is a clean end; later, a lost answer.
                Ok(0) | Err(_) => return !answer.is_empty(),
                Ok(got) => answer.extend_from_slice(&buffer[..got]),
            }
        }
        answers.fetch_add(1, Relaxed);
    }
}

/// Goal: SIGTERM ends the service only after all that was asked is answered. Method: eight clients
/// that ask until they are turned away, and the signal in their midst.
#[test]
fn draining_loses_nothing() {
    let mut service = Service::start(&[]);
    let answers = AtomicU64::new(0);
    let clients: Vec<TcpStream> = (0..8).map(|_| service.connect()).collect();
    let broken_off = thread::scope(|scope| {
        let answers = &answers;
        let start = |client| scope.spawn(move || ask_to_the_end(client, answers));
        let clients: Vec<_> = clients.into_iter().map(start).collect();
        while answers.load(Relaxed) < 100 {
            thread::yield_now();
        }
        service.signal(Signal::SIGTERM);
        clients
            .into_iter()
            .map(|client| client.join().expect("no panic"))
            .filter(|lost| *lost)
            .count()
    });
    assert_eq!(broken_off, 0);
    assert!(service.child.wait().expect("it ends").success());
    let mut rest = String::new();
    service.stdout.read_to_string(&mut rest).expect("it closed its output");
    assert_eq!(rest, "");
}

/// Goal: a killed build leaves nothing that could be served, and the next build succeeds. Method:
/// SIGKILL at the first files of the index.
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

/// Goal: a full disk is an error that says where, and leaves nothing. Method: a bound on the size
/// of files, which fails writes as a full disk does.
#[test]
fn a_full_disk_leaves_nothing() {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let dir = scratch.path().join("index");
    let script = "trap '' XFSZ; ulimit -f 64; exec \"$0\" index --docs 2000 \"$1\"";
    let output =
        Command::new("sh").args(["-c", script, SEARCH, text(&dir)]).output().expect("a shell");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    let line = stderr.lines().last().expect("a message");
    assert!(line.starts_with("elfen-search: indexing into ") && line.contains("large"), "{stderr}");
    assert_eq!(fs::read_dir(scratch.path()).expect("readable").count(), 0);
}

/// Goal: dumps and line files are indexed, whole or up to --docs; a truncated .bz2 says where it
/// ends. Method: small files, packed by bzip2's own format.
#[test]
fn dumps_are_indexed() {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let path = |name: &str| text(&scratch.path().join(name)).to_owned();
    let page = |n: u32| {
        format!(
            "<page><title>T{n}</title><ns>0</ns><revision><text>words {n}</text></revision></page>"
        )
    };
    let pages: String = (0..3_000).map(page).collect();
    let xml = format!("<mediawiki>{pages}</mediawiki>");
    let mut packer = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
    packer.write_all(xml.as_bytes()).expect("memory");
    let packed = packer.finish().expect("memory");
    fs::write(path("dump.bz2"), &packed).expect("writable");
    fs::write(path("cut.bz2"), &packed[..packed.len() / 2]).expect("writable");
    fs::write(path("lines"), "A\td\tone\nB\td\ttwo\nbroken\n").expect("writable");
    let index = |kind: &str, file: &str, docs: &str, name: &str| {
        search(&["index", kind, &path(file), "--docs", docs, &path(name)])
    };
    let good = index("--wikipedia", "dump.bz2", "100000", "a");
    assert!(String::from_utf8_lossy(&good.stdout).contains("3000 documents"));
    assert!(index("--wikipedia", "dump.bz2", "10", "b").status.success());
    assert!(index("--line-docs", "lines", "2", "c").status.success());
    for (kind, file, part) in [
        ("--wikipedia", "cut.bz2", "near byte"),
        ("--line-docs", "lines", "line 3"),
        ("--wikipedia", "lines", "articles"),
        ("--wikipedia", "absent", "opening"),
    ] {
        let bad = index(kind, file, "100000", "bad");
        let stderr = String::from_utf8_lossy(&bad.stderr);
        assert_eq!(bad.status.code(), Some(1), "{file}: {stderr}");
        assert!(stderr.contains(part) && stderr.lines().count() == 1, "{file}: {stderr}");
        assert!(!scratch.path().join("bad").exists());
    }
}

/// Goal: errors are one line with the right status. Method: wrong arguments, taken names and
/// addresses.
#[test]
fn errors_are_one_line() {
    let service = Service::start(&[]);
    let index = INDEX.path().join("index");
    let index = text(&index);
    let (address, name) = (service.address.to_string(), service.name.clone());
    let free = "127.0.0.1:0";
    for (args, status, part) in [
        (&[][..], 2, "subcommand"),
        (&["index", index], 2, "exists already"),
        (&["serve", "--queue", "0", index], 2, "--queue"),
        (&["serve", "/nonexistent"], 1, "no finished index"),
        (&["serve", "--listen", &address, index], 1, "free"),
        (&["serve", "--listen", free, "--service-name", &name, index], 1, "writes this slot"),
        (&["serve", "--listen", free, "--service-name", "", "--lanes", "99999", index], 1, "CPU"),
        (&["serve", "--listen", free, "--warmup", "/nonexistent", index], 1, "reading"),
    ] {
        let output = search(args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{args:?}: {stderr}");
        assert!(
            stderr.starts_with("elfen-search: ") && stderr.contains(part),
            "{args:?}: {stderr}"
        );
        assert_eq!((stderr.lines().count(), output.stdout.len()), (1, 0), "{args:?}: {stderr}");
    }
}

/// Goal: the bench's figures are there and agree. Method: one pass over a small index.
#[test]
fn the_bench_reports() {
    let index = INDEX.path().join("index");
    let output = search(&["bench", "--passes", "1", "--json", text(&index)]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let searches = report["searches"].as_u64().expect("a count");
    assert_eq!((searches, report["queries"].as_u64()), (3 * 1_141, Some(1_141)));
    let histogram = report["histogram_ms"].as_array().expect("buckets");
    assert_eq!(histogram.iter().filter_map(Value::as_u64).sum::<u64>(), searches);
    assert!(report["queries_per_second"].as_f64().is_some_and(|rate| rate > 0.0));
}
