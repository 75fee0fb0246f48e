//! Goal: what a JVM did is named, by its probes, by its counters, and by the names of its threads.
//! Method: a small Java server with forced collections, and the JVM's own log of them as the truth.

mod served;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use elfen_rt::clock::nanos;
use elfen_rt::signal::event::{Event, Kind, Runtime};
use elfen_tailor::jvm::Jvms;
use serde_json::Value;
use served::{Ends, Load, tailor as elfen};

/// A JVM of the test's own, whose log has times of the machine's clock.
fn java(folder: &Path, options: &[&str]) -> (Ends, u16) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/java/Collects.java");
    let log = format!("-Xlog:gc:file={}:timenanos", folder.join("gc.log").display());
    let mut command = Command::new("java");
    command.args(["-Xmx512m", "-XX:+UseSerialGC", "-Dsun.net.httpserver.nodelay=true", &log]);
    command.args(options).arg(source).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut java = Ends(command.spawn().expect("needs java"));
    let mut line = String::new();
    BufReader::new(java.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let port = line.trim().parse().unwrap_or_else(|_| panic!("java said {line:?}"));
    (java, port)
}

/// Collections, from when to when: `[123456789ns] GC(0) Pause Full (System.gc()) 9M->8M(9M) 4.5ms`.
fn collections(log: &Path) -> Vec<(u64, u64)> {
    let text = fs::read_to_string(log).unwrap();
    let span = |line: &str| {
        let (at, rest) = line.strip_prefix('[')?.split_once("ns]")?;
        let took: f64 = rest.rsplit(' ').next()?.strip_suffix("ms")?.parse().ok()?;
        let ended: u64 = at.parse().ok()?;
        Some((ended - nanos(Duration::from_secs_f64(took / 1e3)), ended))
    };
    text.lines().filter(|line| line.contains("Pause")).filter_map(span).collect()
}

struct Told {
    /// By the recorder, of the JVM.
    said: String,
    report: Value,
    /// By the JVM's log.
    truth: Vec<(u64, u64)>,
}

/// Records a JVM.
fn told() -> Told {
    let folder = tempfile::tempdir().unwrap();
    let (java, port) = java(folder.path(), &[]);
    let ask = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n";
    let load = Load::start(port, ask, |answer| answer.ends_with(b"hello"));
    let (port, recording) = (port.to_string(), folder.path().join("java.trace"));
    let recording = recording.to_str().unwrap();
    let words = ["record", "-d", "4s", "--port", &port, "-o", recording];
    let recorded = elfen(&words).output().unwrap();
    load.end();
    drop(java);
    let said = String::from_utf8(recorded.stderr).unwrap();
    assert!(recorded.status.success(), "{said}");
    let report = elfen(&["report", recording, "--slow", "p97", "--json"]).output().unwrap();
    let report = serde_json::from_slice(&report.stdout)
        .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&report.stderr)));
    Told { said, report, truth: collections(&folder.path().join("gc.log")) }
}

/// How much of the slowest requests was a collection, and how much of that the JVM's log has.
fn collected(Told { report, truth, .. }: &Told) -> (u64, u64) {
    let number = |value: &Value| value.as_u64().expect("a number");
    let slow = report["slowest"].as_array().unwrap().iter();
    let segments = slow.flat_map(|slow| slow["segments"].as_array().unwrap());
    let spans = segments
        .filter(|segment| segment["kind"] == "gc")
        .map(|segment| (number(&segment["from_ns"]), number(&segment["to_ns"])));
    let mut sums = (0, 0);
    for (from, to) in spans {
        let inside = |span: &(u64, u64)| to.min(span.1).saturating_sub(from.max(span.0));
        sums = (sums.0 + to - from, sums.1 + truth.iter().map(inside).sum::<u64>());
    }
    sums
}

fn first(report: &Value) -> &str {
    report["causes"][0]["cause"].as_str().unwrap_or_else(|| panic!("{report:#}"))
}

#[test]
#[ignore = "needs root, eBPF and a JDK"]
fn collections_are_named_by_the_probes_of_a_jvm() {
    let found = told();
    assert!(found.said.contains("is a JVM: by its probes"), "{}", found.said);
    assert_eq!(first(&found.report), "gc", "{:#}", found.report);
    let (charged, true_ns) = collected(&found);
    // Its log has the collection, and the halt around it is charged as well.
    assert!(
        charged > 0 && true_ns * 10 >= charged * 9,
        "{true_ns} of {charged}: {:#}",
        found.report
    );
}

/// Goal: without rights to probes, a JVM's counters tell of its collections, and without those it
/// is known as a JVM. Method: both asked for what they tell, against the JVM's log.
#[test]
#[ignore = "needs a JDK"]
fn and_by_its_counters_where_there_are_no_probes() {
    let folder = tempfile::tempdir().unwrap();
    let (java, _) = java(folder.path(), &[]);
    let mut jvms = Jvms::none();
    let said = jvms.refresh(&[java.0.id(), std::process::id()], None);
    assert!(said.len() == 1 && said[0].contains("is a JVM: by its counters"), "{said:?}");
    let mut words = Vec::new();
    let began = Instant::now();
    while words.len() < 8 {
        assert!(began.elapsed() < Duration::from_secs(60), "{words:?}");
        jvms.poll(&mut words);
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(java);
    let truth = collections(&folder.path().join("gc.log"));
    for pair in words.chunks_exact(2) {
        let [began, ended] = [&pair[0], &pair[1]].map(|words| Event::decode(words).unwrap());
        let kinds = [began.kind, ended.kind];
        assert_eq!(kinds, [Kind::Runtime(Runtime::GcBegin), Kind::Runtime(Runtime::GcEnd)]);
        let took = ended.at_ns - began.at_ns;
        let near = truth.iter().min_by_key(|(_, at)| ended.at_ns.abs_diff(*at)).expect("some");
        assert!(took.abs_diff(near.1 - near.0) * 5 <= took + 5_000_000, "{took}: {near:?}");
        assert!(ended.at_ns.abs_diff(near.1) < 100_000_000, "{ended:?}: {near:?}");
    }
}

#[test]
#[ignore = "needs a JDK"]
fn and_by_the_names_of_its_threads() {
    let folder = tempfile::tempdir().unwrap();
    let (java, _) = java(folder.path(), &["-XX:-UsePerfData"]);
    let said = Jvms::none().refresh(&[java.0.id()], None);
    assert!(said.len() == 1 && said[0].contains("by the names of its threads"), "{said:?}");
}
