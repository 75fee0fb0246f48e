//! Runs `elfen-load` as a user does, on small services that work and some that fail.
//!
//! No test depends on how long anything takes, because the machine may be busy. The unit tests of
//! the crate verify the figures with a simulated clock.

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Output, Stdio};
use std::thread;

const LOAD: &str = env!("CARGO_BIN_EXE_elfen-load");

fn load(args: &[&str]) -> Output {
    Command::new(LOAD).args(args).output().expect("elfen-load was built")
}

/// Runs `elfen-load` without a bound on lateness, and returns its JSON.
fn json(args: &[&str]) -> Value {
    let output = load(&[args, &["--json", "--allow-late"]].concat());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {stderr}");
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

/// The reference server. It is killed when the test ends.
struct Service {
    child: Child,
    url: String,
}

impl Service {
    fn start() -> Self {
        let mut child = Command::new(LOAD)
            .args(["--reference-server", "127.0.0.1:0", "--service", "fixed:10us"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("elfen-load was built");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("it is piped");
        BufReader::new(stdout).read_line(&mut line).expect("it says where it serves");
        let address = line.trim().strip_prefix("serving on ").expect("its address").to_owned();
        Self { child, url: format!("http://{address}") }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.child.kill().expect("it is still ours");
        self.child.wait().expect("it was killed");
    }
}

/// Serves each connection with `serve` until the test process ends.
fn service(serve: impl Fn(TcpStream) + Clone + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("it is bound");
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let serve = serve.clone();
            thread::spawn(move || serve(stream));
        }
    });
    address
}

/// Sends these bytes after each read.
fn answer_all(mut stream: TcpStream, reply: &[u8], each: impl Fn()) {
    let mut buffer = [0; 1024];
    while stream.read(&mut buffer).is_ok_and(|got| got > 0) && stream.write_all(reply).is_ok() {
        each();
    }
}

fn refuse(stream: TcpStream) {
    answer_all(stream, b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", || ());
}

/// Goal: the JSON has the keys that scripts use, and their values are consistent. Method: three
/// runs of 200 requests.
#[test]
fn json_has_its_keys() {
    let service = Service::start();
    let args = ["--rps", "2000", "--requests", "200", "--runs", "3", "--seed", "7"];
    let report = json(&[&args[..], &[&service.url]].concat());
    assert_eq!((&report["requests"], &report["errors"]), (&600.into(), &0.into()));
    assert_eq!((&report["intended_rps"], &report["seed"]), (&2000.0.into(), &7.into()));
    let runs = report["runs"].as_array().expect("an array");
    assert_eq!(runs.iter().map(|one| one["seed"].clone()).collect::<Vec<_>>(), [7, 8, 9]);
    for one in runs.iter().chain([&report]) {
        assert!(one["achieved_rps"].as_f64().expect("a rate") > 0.0);
        let at = |key: &str| one["latency_us"][key].as_f64().expect("a latency");
        assert!(0.0 < at("p50") && at("p50") <= at("p90") && at("p90") <= at("p99"));
        assert!(at("p99") <= at("p999") && at("p999") <= at("max") && at("mean") <= at("max"));
        let late = |key: &str| one["late_us"][key].as_f64().expect("a lateness");
        assert!(late("p50") <= late("p99") && late("p99") <= late("max"));
    }
    let mut p90: Vec<f64> =
        runs.iter().filter_map(|one| one["latency_us"]["p90"].as_f64()).collect();
    p90.sort_by(f64::total_cmp);
    assert_eq!(report["latency_us"]["p90"].as_f64(), Some(p90[1]), "the median of three");
    assert_eq!(report["latency_us_ci95"]["p90"].as_array().map(Vec::len), Some(2));
    assert_eq!(runs[0]["service_us"]["p50"].as_f64(), Some(10.0), "the service reports it");
}

/// Goal: equal seeds send the same requests at the same times. Method: compare the CSVs of a run,
/// of its repetition, and of another seed.
#[test]
fn runs_can_be_repeated() {
    let service = Service::start();
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let path = |name: &str| scratch.path().join(name).to_str().expect("a plain path").to_owned();
    std::fs::write(path("queries"), "alpha\nbeta gamma\ndelta\n").expect("scratch is writable");
    let common = ["--queries", &path("queries"), "--template", "/s?q={}"];
    let run = |csv: &str, more: &[&str]| -> Vec<[String; 4]> {
        let args = [&common[..], more, &["--csv", csv, &service.url]].concat();
        assert_eq!(json(&args)["errors"], 0);
        let text = std::fs::read_to_string(csv).expect("the CSV was written");
        let columns = |line: &str| -> Vec<String> { line.split(',').map(str::to_owned).collect() };
        let rows = text.lines().skip(1).map(columns);
        // Columns: query, intended time, service time, outcome.
        rows.map(|row| [2, 4, 10, 11].map(|at| row[at].clone())).collect()
    };
    let poisson = ["--rps", "3000", "--requests", "300", "--seed", "5"];
    let first = run(&path("first"), &poisson);
    assert_eq!(first.len(), 300);
    assert!(first.iter().all(|row| row[2] == "10.000" && row[3] == "ok"));
    assert_eq!(run(&path("again"), &poisson), first);
    let other = run(&path("other"), &["--rps", "3000", "--requests", "300", "--seed", "6"]);
    assert_ne!(other[0][1], first[0][1], "another seed, other times");
}

/// Goal: requests and answers follow Redis's protocol. Method: a service that verifies each
/// command's bytes and answers one byte at a time.
#[test]
fn redis_is_spoken() {
    fn answer(mut stream: TcpStream, request: &[u8], reply: &[u8]) {
        stream.set_nodelay(true).expect("a socket option");
        let mut got = vec![0; request.len()];
        while stream.read_exact(&mut got).is_ok() {
            assert_eq!(got, request);
            if !reply.iter().all(|byte| stream.write_all(&[*byte]).is_ok()) {
                return;
            }
        }
    }
    let redis =
        service(|stream| answer(stream, b"*1\r\n$4\r\nPING\r\n", b"*2\r\n$3\r\na\r\n\r\n$-1\r\n"));
    let url = format!("redis://{redis}");
    let report = json(&["--rps", "2000", "--requests", "100", "--pipeline", "4", &url]);
    assert_eq!((&report["requests"], &report["errors"]), (&100.into(), &0.into()));
}

/// Goal: whatever a service does wrong, every request is counted by its kind of failure, and the
/// run ends. Method: a service that alternately answers, refuses, closes, announces a close, sends
/// invalid bytes and sends nothing.
#[test]
fn misbehaviour_is_counted() {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    static TURN: AtomicUsize = AtomicUsize::new(0);
    fn misbehave(mut stream: TcpStream) {
        let mut buffer = [0; 1024];
        while stream.read(&mut buffer).is_ok_and(|got| got > 0) {
            let reply: &[u8] = match TURN.fetch_add(1, Relaxed) % 6 {
                0 => b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
                1 => b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n",
                2 => return,
                3 => b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
                4 => b"\x00\x01nonsense\r\n\r\n",
                _ => continue,
            };
            if stream.write_all(reply).is_err() {
                return;
            }
        }
    }
    let url = format!("http://{}", service(misbehave));
    let report = json(&["--rps", "1000", "--requests", "60", "--timeout", "500ms", &url]);
    assert_eq!(report["requests"], 60);
    let kinds = report["runs"][0]["error_kinds"].as_object().expect("an object");
    let counted: u64 = kinds.values().filter_map(Value::as_u64).sum();
    assert_eq!(report["errors"], counted);
    for kind in ["503", "closed", "malformed", "timeout"] {
        assert!(kinds.contains_key(kind), "{kind} is missing in {kinds:?}");
    }
    assert!(report["warnings"].to_string().contains("requests failed"));
}

/// Goal: errors have one line and the right status. Method: wrong arguments, a missing file, an
/// address without a listener.
#[test]
fn errors_are_one_line() {
    let nobody = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = nobody.local_addr().expect("it is bound");
    drop(nobody);
    let nobody = format!("http://{address}/");
    for (args, status, part) in [
        (&[][..], 2, "<URL>"),
        (&["--rps", "0", &nobody], 2, "rate"),
        (&["--requests", "5", "--duration", "1s", &nobody], 2, "cannot be used with"),
        (&["--queries", "/nonexistent", &nobody], 1, "reading queries"),
        (&["--csv", "/nonexistent/x", &nobody], 1, "can be written"),
        (&["--cpu", "100000", &nobody], 1, "pinning"),
        (&["--cpu", "1023", &nobody], 1, "the kernel refused"),
        (&[nobody.as_str()], 1, "check that the service runs"),
    ] {
        let output = load(args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{args:?}: {stderr}");
        assert!(stderr.starts_with("elfen: ") && stderr.contains(part), "{args:?}: {stderr}");
        assert_eq!((stderr.lines().count(), output.stdout.len()), (1, 0), "{args:?}: {stderr}");
    }
}

/// Goal: a run that cannot keep its schedule fails, unless --allow-late is given. Method: one
/// connection to a service that never answers, so that the second request must wait.
#[test]
fn a_late_run_fails() {
    let url = format!("http://{}", service(|mut stream| drop(stream.read_to_end(&mut Vec::new()))));
    let args = ["--rps", "1000", "--requests", "50", "--connections", "1", "--timeout", "300ms"];
    let output = load(&[&args[..], &[&url]].concat());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("late") && stderr.contains("--allow-late"), "{stderr}");
    let report = json(&[&args[..], &[&url]].concat());
    assert_eq!((&report["requests"], &report["errors"]), (&50.into(), &50.into()));
}

/// Goal: the table shows the rate, the latencies, the send schedule's error and the warnings.
/// Method: a run with failures.
#[test]
fn people_get_a_table() {
    let url = format!("http://{}", service(refuse));
    let output = load(&["--rps", "1000", "--requests", "30", "--allow-late", &url]);
    assert!(output.status.success());
    let table = String::from_utf8_lossy(&output.stdout);
    for part in [
        "rate: 1000.0 rps intended, 0.0 rps achieved; 30 requests, 30 errors; seed 1\n",
        "  p50  ",
        "\nlatency  ",
        "\nsend schedule's error: p50 ",
        "\nwarning: 30 of 30 requests failed (503: 30); the latencies exclude them\n",
    ] {
        assert!(table.contains(part), "{part:?} is missing in\n{table}");
    }
}

/// Goal: a run that receives SIGINT ends early and prints its report. Method: interrupt a run of an
/// hour after its first answers.
#[test]
fn an_interrupted_run_reports() {
    let (tell, heard) = std::sync::mpsc::channel();
    let url = format!(
        "http://{}",
        service(move |stream| {
            let reply = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
            // Sending fails when the test no longer receives.
            answer_all(stream, reply, || {
                let _enough = tell.send(());
            });
        })
    );
    let child = Command::new(LOAD)
        .args(["--rps", "500", "--duration", "3600s", "--json", "--allow-late", &url])
        .stdout(Stdio::piped())
        .spawn()
        .expect("elfen-load was built");
    heard.iter().take(20).for_each(drop);
    let pid = i32::try_from(child.id()).expect("a pid");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGINT)
        .expect("it runs");
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(130));
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert!(report["requests"].as_u64().is_some_and(|requests| requests >= 20));
    assert!(report["warnings"][0].as_str().is_some_and(|text| text.contains("interrupted")));
}
