//! Goal: the Lucene service is built by its script and publishes its requests. `elfen tailor` finds
//! the first cause of the thesis's table in it. Method: a recording by port, in which answers wait
//! for acknowledgements; then a recording by the service's name.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::process::KilledOnDrop;
use crate::served::{Load, number, record, report, start_with_port};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// Builds the library with the native methods.
fn build_library() -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("lucene");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["build", "--offline", "--quiet", "-p", "elfen-lucene", "--target-dir"]);
    let output = command.arg(&target).current_dir(root()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    target.join("debug/libelfen_lucene.so")
}

/// Compiles the service. Returns the arguments of `java` that start it.
fn build_service(folder: &Path) -> Vec<String> {
    let mut script = Command::new(root().join("workloads/lucene/build"));
    let output = script.arg(folder).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "needs a JDK and Lucene: {printed}");
    let text = String::from_utf8(output.stdout).unwrap();
    let line = text.lines().last().unwrap().strip_prefix("java ").unwrap().to_owned();
    line.split(' ').take(3).map(str::to_owned).collect()
}

fn serve(words: &[String], library: &Path, name: &str) -> (KilledOnDrop, u16) {
    let mut command = Command::new("java");
    command.args(["-Xmx256m", "-XX:+UseSerialGC"]).args(words).args(["serve", "300", "1"]);
    // Its input is silent and does not end, like that of a terminal.
    start_with_port(command.arg(library).arg(name).stdin(Stdio::piped()), "java")
}

/// Whether the answer has its announced length.
fn is_whole(answer: &[u8]) -> bool {
    let text = String::from_utf8_lossy(answer);
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return false };
    let length = head.lines().find_map(|line| line.strip_prefix("Content-length: "));
    body.len() == length.unwrap().parse::<usize>().unwrap()
}

/// Whether the service has a thread that waits for lines of its input.
fn reads_input(process: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let name = |thread: io::Result<fs::DirEntry>| {
        fs::read_to_string(thread.ok()?.path().join("comm")).ok()
    };
    threads.filter_map(name).any(|name| name.trim() == "told")
}

#[test]
#[ignore = "needs root, eBPF, a JDK and Lucene"]
fn the_first_cause_of_a_lucene_service_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let words = build_service(folder.path());
    let name = format!("lucene-{}", std::process::id());
    let (java, port) = serve(&words, &build_library(), &name);
    let ask = b"GET /search?q=w1+w20+w300 HTTP/1.1\r\nHost: a\r\n\r\n";
    let load = Load::start(port, ask, is_whole);
    let recording = folder.path().join("lucene.trace");
    let (port, recording) = (port.to_string(), recording.to_str().unwrap());
    // The service delays each answer, so a usual request is slow.
    let slow = ["--slow", "20ms"];
    record(&["-d", "3s", "--port", &port], recording);
    let explained = report(recording, &slow);
    assert_eq!(explained["causes"][0]["cause"], "tcp-out", "{explained:#}");
    // The client's kernel acknowledges late.
    assert!(number(&explained["latency_ns"]["p50"]) > 20_000_000, "{explained:#}");
    record(&["-d", "2s", "--service", &name], recording);
    let explained = report(recording, &slow);
    load.end();
    // The service must not read its input: in the background of a shell, the kernel would stop it.
    assert!(!reads_input(java.0.id()), "the service reads its input without an option for it");
    drop(java);
    assert!(number(&explained["requests"]) > 20 && explained["port"] == 0, "{explained:#}");
    let stages = explained["stages"].as_array().unwrap_or_else(|| panic!("{explained:#}"));
    assert_eq!(stages.len(), 3, "reads, searches and answers: {explained:#}");
    elfen_rt::service::Service::open(&name, 1).unwrap().remove().unwrap();
}
