//! Goal: `elfen shim` observes unmodified programs correctly. nginx's counters agree with the
//! client's count, and a JVM's collections agree with its log. Method: the program runs on one lane
//! and the observer on another. The test compares counts with counts and lengths with lengths, and
//! never requires a certain time.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::PoisonError;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::{LANES, needs};

const GARBAGE: &str = "
public class Garbage {
    static Object[] kept = new Object[20000];
    public static void main(String[] words) {
        for (long n = 0; ; n++)
            kept[(int) (n % kept.length)] = new byte[200];
    }
}
";

/// A program that runs on the first lane, and ends when this value drops.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Ended by SIGTERM: if the master were killed, its workers would remain.
        // SAFETY: kill takes numbers; the child has not been waited for.
        unsafe { libc::kill(self.0.id().cast_signed(), libc::SIGTERM) };
        let _ended = self.0.wait();
    }
}

fn on_first_lane(words: &[&str]) -> Running {
    let mut command = Command::new("taskset");
    command.args(["-c", "0"]).args(words).stdin(Stdio::null()).stdout(Stdio::null());
    Running(command.stderr(Stdio::null()).spawn().unwrap())
}

fn until<T>(mut found: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "the program does not start");
        thread::sleep(Duration::from_millis(10));
    }
}

fn shim(process: u32, words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfen"));
    command.args(["shim", "--json", "--observer-cpu", "1", "-p", &process.to_string()]).args(words);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn ask(port: u16) -> Option<()> {
    let mut client = TcpStream::connect(("127.0.0.1", port)).ok()?;
    client.write_all(b"GET / HTTP/1.0\r\n\r\n").ok()?;
    let mut answer = String::new();
    client.read_to_string(&mut answer).ok()?;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    Some(())
}

/// nginx's workers count in shared memory, at steps of 128 bytes. Three words of nginx's own come
/// first, then the accepted connections, the handled connections, and the requests.
#[test]
#[ignore = "needs root and nginx"]
fn an_nginx_counts_as_many_requests_as_its_client() {
    needs::root();
    needs::two_cpus();
    let _lanes = LANES.lock().unwrap_or_else(PoisonError::into_inner);
    needs::programs(&["nginx"]);
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
    let temporary = temporary.map(|name| format!("{name}_temp_path {};", at(name))).concat();
    let settings = format!(
        "worker_processes 1; user root; daemon off; pid {}; error_log {}; events {{ }}
         http {{ access_log off; {temporary}
         server {{ listen 127.0.0.1:{port}; location / {{ return 200 'hello'; }} }} }}",
        at("pid"),
        at("errors")
    );
    fs::write(at("settings"), settings).unwrap();
    let nginx = on_first_lane(&["nginx", "-c", &at("settings"), "-e", &at("errors")]);
    until(|| ask(port));
    let master = nginx.0.id();
    let children = format!("/proc/{master}/task/{master}/children");
    let worker = fs::read_to_string(children).unwrap();
    let worker: u32 = worker.split_whitespace().next().unwrap().parse().unwrap();
    let maps = fs::read_to_string(format!("/proc/{worker}/maps")).unwrap();
    let counters = maps.lines().find(|line| line.contains("rw-s") && line.contains("/dev/zero"));
    let counters = counters.and_then(|line| line.split_once('-'));
    let (start, _) = counters.expect("needs an nginx with its stub_status module");
    let watched = [3, 5].map(|word| format!("map:0x{start}+{}:u64", word * 128));
    let words = watched.iter().flat_map(|signal| ["--watch", signal.as_str()]);
    let observer = shim(worker, &words.collect::<Vec<_>>()).spawn().unwrap();
    // The first request came before the observer had started.
    let mut requests = 1;
    let tasks = format!("/proc/{}/task", observer.id());
    until(|| {
        let mut tasks = fs::read_dir(&tasks).ok()?.flatten();
        let name = |path: &Path| fs::read_to_string(path.join("comm")).unwrap_or_default();
        tasks.find(|task| name(&task.path()).starts_with("elfen-observer"))
    });
    for _ in 0..200 {
        ask(port).unwrap();
        requests += 1;
        thread::sleep(Duration::from_millis(2));
    }
    // SAFETY: kill takes numbers; the child has not been waited for.
    unsafe { libc::kill(observer.id().cast_signed(), libc::SIGINT) };
    let output = observer.wait_with_output().unwrap();
    let summary: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
        panic!("{error}: {}", String::from_utf8_lossy(&output.stderr));
    });
    for signal in summary["signals"].as_array().unwrap() {
        let [first, last] = ["first", "last"].map(|key| signal["values"][key].as_u64().unwrap());
        assert!(first < last && last == requests, "{requests} requests: {summary:#}");
    }
}

/// A row of the export: start, end, and the number; a gap has no number.
type Row = (u64, u64, Option<u64>);

fn rows(csv: &str, signal: &str) -> Vec<Row> {
    let fields = csv.lines().map(|line| line.split(',').collect::<Vec<_>>());
    let of_signal = fields.filter(|fields| fields[0] == signal);
    let row = |fields: Vec<&str>| {
        (fields[1].parse().unwrap(), fields[2].parse().unwrap(), fields[3].parse().ok())
    };
    of_signal.map(row).collect()
}

/// Changes without a gap between the two numbers: the time of the change, and both numbers.
fn changes(rows: &[Row]) -> impl Iterator<Item = (u64, u64, u64)> {
    rows.windows(2).filter_map(|pair| Some((pair[1].0, pair[0].2?, pair[1].2?)))
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

#[test]
#[ignore = "needs a JDK"]
fn collections_take_as_long_as_the_machine_says_itself() {
    needs::two_cpus();
    let _lanes = LANES.lock().unwrap_or_else(PoisonError::into_inner);
    needs::programs(&["java", "javac"]);
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    fs::write(at("Garbage.java"), GARBAGE).unwrap();
    assert!(Command::new("javac").arg(at("Garbage.java")).status().unwrap().success());
    let log = format!("-Xlog:gc:file={}:none", at("gc.log"));
    let sizes = ["-Xmx64m", "-Xmn4m", "-XX:+UseSerialGC"];
    let classes = folder.path().to_str().unwrap();
    let java = [&["java"], &sizes[..], &[&log, "-cp", classes, "Garbage"]].concat();
    let java = on_first_lane(&java);
    let process = java.0.id();
    let collector = "jvm:sun.gc.collector.0";
    let [began, ended] = ["invocations", "lastExitTime"].map(|name| format!("{collector}.{name}"));
    until(|| {
        let process = process.to_string();
        let mut signals = Command::new(env!("CARGO_BIN_EXE_elfen"));
        let signals = signals.args(["shim", "signals", "--json", "-p", &process]).output().unwrap();
        String::from_utf8_lossy(&signals.stdout).contains(&ended).then_some(())
    });
    let file = at("run.shim");
    let words = ["--watch", &began, "--watch", &ended, "-d", "3s", "-o", &file];
    let output = shim(process, &words).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    drop(java);
    let export = Command::new(env!("CARGO_BIN_EXE_elfen")).args(["shim", "export", &file]).output();
    let csv = String::from_utf8(export.unwrap().stdout).unwrap();
    let log = fs::read_to_string(at("gc.log")).unwrap();
    // The length of each young collection, in order.
    let said: Vec<f64> = log
        .lines()
        .filter(|line| line.contains("Pause Young"))
        .map(|line| line.rsplit(' ').next().unwrap().trim_end_matches("ms").parse().unwrap())
        .collect();

    let [collections, ends] = [&began, &ended].map(|name| rows(&csv, name));
    let began: Vec<_> = changes(&collections).collect();
    let all: u64 = began.iter().map(|(_, before, now)| now - before).sum();
    assert!(all > 100, "{all} collections\n{}", String::from_utf8_lossy(&output.stdout));
    assert!(began.len() as u64 * 100 >= all * 99, "{} of {all} were seen", began.len());
    let (mut seen_ms, mut said_ms) = (Vec::new(), Vec::new());
    let mut exits = changes(&ends).map(|(at, ..)| at).peekable();
    for row in &collections {
        let Some((start, _, number)) = began.iter().find(|change| change.0 == row.0) else {
            continue;
        };
        while exits.next_if(|exit| exit <= start).is_some() {}
        // Both ends of the collection were observed without a gap between them.
        if let Some(end) = exits.next_if(|exit| *exit <= row.1) {
            seen_ms.push((end - start) as f64 / 1e6);
            said_ms.push(said[usize::try_from(number - 1).unwrap()]);
        }
    }
    assert!(seen_ms.len() > 50, "{} of {all} have both ends", seen_ms.len());
    let (count, seen, said) = (seen_ms.len(), median(seen_ms), median(said_ms));
    let off = (seen / said - 1.0).abs();
    assert!(off <= 0.1, "medians of {count}: {seen} ms observed, {said} ms logged");
}
