//! Goal: the Lucene service is built by its script, has the first cause of the thesis's table and
//! is found to have it, and says what it does with its requests. Method: answers that wait for
//! acknowledgements, recorded by the port; then the same service by its marks.

mod served;

use std::fs;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use served::{Ends, Load};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// The native methods.
fn library() -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("lucene");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["build", "--offline", "--quiet", "-p", "elfen-lucene", "--target-dir"]);
    let output = command.arg(&target).current_dir(root()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    target.join("debug/libelfen_lucene.so")
}

/// Compiles the service; the words that start it, without `java`.
fn built(folder: &Path) -> Vec<String> {
    let mut script = Command::new(root().join("workloads/lucene/build"));
    let output = script.arg(folder).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "needs a JDK and Lucene: {said}");
    let text = String::from_utf8(output.stdout).unwrap();
    let line = text.lines().last().unwrap().strip_prefix("java ").unwrap().to_owned();
    line.split(' ').take(3).map(str::to_owned).collect()
}

fn serve(words: &[String], library: &Path, name: &str) -> (Ends, u16) {
    let mut command = Command::new("java");
    command.args(["-Xmx256m", "-XX:+UseSerialGC"]).args(words).args(["serve", "300", "1"]);
    // An input that says nothing and does not end, as a terminal's.
    command.arg(library).arg(name).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut java = Ends(command.spawn().unwrap());
    let mut line = String::new();
    BufReader::new(java.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let port = line.trim().parse().unwrap_or_else(|_| panic!("java said {line:?}"));
    (java, port)
}

/// By its own word on how long it is.
fn is_whole(answer: &[u8]) -> bool {
    let text = String::from_utf8_lossy(answer);
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return false };
    let length = head.lines().find_map(|line| line.strip_prefix("Content-length: "));
    body.len() == length.unwrap().parse::<usize>().unwrap()
}

/// Whether it waits for lines of its input, by the name of the thread that does.
fn listens(process: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let name = |thread: io::Result<fs::DirEntry>| {
        fs::read_to_string(thread.ok()?.path().join("comm")).ok()
    };
    threads.filter_map(name).any(|name| name.trim() == "told")
}

fn elfen(words: &[&str]) -> Output {
    served::tailor(words).output().unwrap()
}

fn report(recording: &str) -> Value {
    // Of a service that holds each answer back, its usual request is slow.
    let told = elfen(&["report", recording, "--slow", "20ms", "--json"]);
    serde_json::from_slice(&told.stdout)
        .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&told.stderr)))
}

#[test]
#[ignore = "needs root, eBPF, a JDK and Lucene"]
fn a_lucene_service_and_its_first_cause() {
    let folder = tempfile::tempdir().unwrap();
    let words = built(folder.path());
    let name = format!("lucene-{}", std::process::id());
    let (java, port) = serve(&words, &library(), &name);
    let ask = b"GET /search?q=w1+w20+w300 HTTP/1.1\r\nHost: a\r\n\r\n";
    let load = Load::start(port, ask, is_whole);
    let recording = folder.path().join("lucene.trace");
    let (port, recording) = (port.to_string(), recording.to_str().unwrap());
    let by_port = elfen(&["record", "-d", "3s", "--port", &port, "-o", recording]);
    assert!(by_port.status.success(), "{}", String::from_utf8_lossy(&by_port.stderr));
    let told = report(recording);
    assert_eq!(told["causes"][0]["cause"], "tcp-out", "{told:#}");
    // As the client's kernel acknowledges late.
    assert!(told["latency_ns"]["p50"].as_u64() > Some(20_000_000), "{told:#}");
    let by_name = elfen(&["record", "-d", "2s", "--service", &name, "-o", recording]);
    assert!(by_name.status.success(), "{}", String::from_utf8_lossy(&by_name.stderr));
    let told = report(recording);
    load.end();
    // In the background of a shell, the kernel would stop it for that.
    assert!(!listens(java.0.id()), "nobody said that it will be told anything");
    drop(java);
    assert!(told["requests"].as_u64() > Some(20) && told["port"] == 0, "{told:#}");
    let stages = told["stages"].as_array().unwrap_or_else(|| panic!("{told:#}"));
    assert_eq!(stages.len(), 3, "reads, searches and answers: {told:#}");
    elfen_rt::service::Service::open(&name, 1).unwrap().remove().unwrap();
}
