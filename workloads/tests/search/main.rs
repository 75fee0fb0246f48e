//! Runs `elfen-search` as its users do; `faults` runs it with hostile clients. No test depends on
//! how long anything takes.

mod faults;
mod service;

use elfen_rt::process::Liveness;
use elfen_rt::signal::service::{ServiceReader, Writer};
use nix::sys::signal::Signal;
use serde_json::Value;
use service::{INDEX, Service, search, text};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;

const BATCH: &str = env!("CARGO_BIN_EXE_elfen-batch");

/// Goal: a search finds what the index contains, and reports its times. The only threads are the
/// coordinator and the workers. Method: one search, its headers, and the threads of the process.
#[test]
fn searches_are_answered() {
    let service = Service::start(&[]);
    let answer = service.exchange(b"GET /search?q=te&n=3 HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(answer.contains("\r\nserver-timing: queue;dur="), "{answer}");
    let body: Value =
        serde_json::from_str(answer.split_once("\r\n\r\n").expect("a head").1).expect("JSON");
    assert!(body["hits"].as_u64().is_some_and(|hits| hits > 200), "the commonest word: {body}");
    assert_eq!(body["top"].as_array().map(Vec::len), Some(3));
    let threads = fs::read_dir(format!("/proc/{}/task", service.child.id())).expect("it runs");
    assert_eq!(threads.count(), 2, "the coordinator and one worker");
    assert_eq!(service.get("/search?q=%22open").0, 400);
    assert_eq!((service.get("/nowhere").0, service.get("/health").0), (404, 200));
    let head = service.exchange(b"HEAD /search?q=te HTTP/1.0\r\n\r\n");
    assert!(head.starts_with("HTTP/1.0 200 OK") && head.ends_with("\r\n\r\n"), "{head}");
    let (status, metrics) = service.get("/metrics");
    assert_eq!(status, 200);
    assert!(metrics.contains("elfen_search_answers_total{status=\"200\"} 3\n"), "{metrics}");
}

/// Goal: the service page names the serving process, counts finished requests, and shows that
/// nothing runs or waits. Method: read it around a hundred searches, and after the service was
/// killed.
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
    let work = || [&slot.running_request, &slot.queue_len].map(|word| word.load(Relaxed));
    assert_eq!(work(), [0, 0]);
    let Writer::Process(writer, _) = page.writer(0) else { panic!("nobody writes the page") };
    assert_eq!(writer.pid().unsigned_abs(), service.child.id());
    service.signal(Signal::SIGKILL);
    let mut service = service;
    service.child.wait().expect("it was killed");
    assert!(matches!(page.writer(0), Writer::Process(_, Liveness::Dead)));
}

/// Sends requests over one connection until it closes, and counts the answers. Returns true if the
/// last answer was incomplete.
fn ask_to_the_end(mut stream: TcpStream, answers: &AtomicU64) -> bool {
    loop {
        if stream.write_all(b"GET /search?q=te+to HTTP/1.1\r\nHost: x\r\n\r\n").is_err() {
            return false;
        }
        let mut buffer = [0; 16 * 1024];
        let mut answer = Vec::new();
        while !answer.ends_with(b"]}\n") {
            match stream.read(&mut buffer) {
                // A close before the first byte is a clean end. A close after it means a lost
                // answer.
                Ok(0) | Err(_) => return !answer.is_empty(),
                Ok(got) => answer.extend_from_slice(&buffer[..got]),
            }
        }
        answers.fetch_add(1, Relaxed);
    }
}

/// Goal: after SIGTERM, the service answers all pending requests before it ends. Method: eight
/// clients that send requests until the service closes, and a signal meanwhile.
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

/// Goal: an emulated core slows requests that run next to a batch, and the service reports the
/// emulation. Method: the real kernel. The service runs on CPU 0, and a batch program on CPU 1 has
/// itself counted, until a request ran next to it.
#[test]
#[ignore = "needs root and eBPF"]
fn an_emulated_core_slows_requests() {
    let emulation = ["--beside-slowdown", "1.5", "--beside", "0:1"];
    let alone = Command::new(BATCH).args(["spin", "--iterations", "1"]).args(emulation).output();
    let alone = alone.expect("elfen-batch was built");
    let stderr = String::from_utf8_lossy(&alone.stderr);
    assert!(alone.status.success(), "needs root, eBPF and two CPUs: {stderr}");
    let service = Service::start(&[&["--lanes", "0"], &emulation[..]].concat());
    assert_eq!(service.get("/health").1, "{\"emulated_core\":{\"slowdown\":1.5}}\n");
    let mut batch = Command::new("taskset")
        .args(["-c", "1", BATCH, "spin", "--duration", "60s"])
        .args(emulation)
        .stdout(Stdio::null())
        .spawn()
        .expect("taskset is there");
    let seconds = |metrics: &str, of: &str| -> f64 {
        let name = format!("elfen_search_{of}_seconds_total ");
        let line = metrics.lines().find_map(|line| line.strip_prefix(&name));
        line.expect("the metrics have it").parse().expect("a number")
    };
    let (beside, added) = loop {
        assert_eq!(service.get("/search?q=te+to+ta").0, 200);
        let metrics = service.get("/metrics").1;
        assert!(metrics.contains("\nelfen_search_emulated_slowdown 1.5\n"), "{metrics}");
        let beside = seconds(&metrics, "beside");
        if beside > 0.0 || batch.try_wait().expect("it is ours").is_some() {
            break (beside, seconds(&metrics, "added"));
        }
    };
    assert!(beside > 0.0, "no request met the batch");
    assert!(added >= beside / 3.0 - 1e-6, "{added} s for {beside} s");
    let page = ServiceReader::open(&service.name).expect("the service made it");
    let slot = page.slot(0).expect("one request lane");
    assert!(slot.instructions.load(Relaxed) < slot.cycles.load(Relaxed), "an IPC below 1");
    batch.kill().expect("it runs");
    batch.wait().expect("it was killed");
}

/// Goal: errors have one line and the right status. Method: wrong arguments, and names and
/// addresses that are in use.
#[test]
fn errors_are_one_line() {
    let service = Service::start(&[]);
    let index = INDEX.path().join("index");
    let index = text(&index);
    let (address, name) = (service.address.to_string(), service.name.clone());
    let free = "127.0.0.1:0";
    for (args, status, part) in [
        (&["index", index][..], 2, "exists already"),
        (&["serve", "--queue", "0", index], 2, "--queue"),
        (&["serve", "/nonexistent"], 1, "no finished index"),
        (&["serve", "--listen", &address, index], 1, "free"),
        (&["serve", "--listen", free, "--service-name", &name, index], 1, "writes this slot"),
        (&["serve", "--listen", free, "--service-name", "", "--lanes", "99999", index], 1, "CPU"),
        (&["serve", "--listen", free, "--warmup", "/nonexistent", index], 1, "reading"),
        (&["serve", "--beside", "0:1", index], 2, "--beside-slowdown"),
        (
            &["serve", "--lanes", "0", "--beside-slowdown", "2", "--beside", "8:9", index],
            2,
            "CPU 0",
        ),
    ] {
        let output = search(args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{args:?}: {stderr}");
        assert!(stderr.starts_with("elfen: ") && stderr.contains(part), "{args:?}: {stderr}");
        assert_eq!((stderr.lines().count(), output.stdout.len()), (1, 0), "{args:?}: {stderr}");
    }
}

/// Goal: the bench reports all figures, and they are consistent. Method: one pass over a small
/// index, after the pass that warms it.
#[test]
fn the_bench_reports() {
    let index = INDEX.path().join("index");
    let output = search(&["bench", "--passes", "1", "--json", text(&index)]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let searches = report["searches"].as_u64().expect("a count");
    assert_eq!((searches, report["queries"].as_u64()), (2 * 1_141, Some(1_141)));
    let histogram = report["histogram_ms"].as_array().expect("buckets");
    assert_eq!(histogram.iter().filter_map(Value::as_u64).sum::<u64>(), searches);
    assert!(report["queries_per_second"].as_f64().is_some_and(|rate| rate > 0.0));
}
