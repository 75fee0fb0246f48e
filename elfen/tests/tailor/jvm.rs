//! Goal: the report finds garbage collections of a JVM by its probes and by its counters, and a JVM
//! by the names of its threads. Method: a small Java server with forced collections, and the JVM's
//! log of them as ground truth.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use elfen_rt::clock::nanos;
use elfen_rt::signal::event::{Event, EventKind, Runtime};
use elfen_tailor::jvm::Jvms;
use serde_json::Value;

use crate::process::KilledOnDrop;
use crate::served::{GET, Load, number, record, report, start_with_port};

/// Starts a JVM whose log has times of the machine's clock. Returns the JVM and its port.
fn start_java(folder: &Path, options: &[&str]) -> (KilledOnDrop, u16) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/java/Collects.java");
    let log = format!("-Xlog:gc:file={}:timenanos", folder.join("gc.log").display());
    let mut command = Command::new("java");
    command.args(["-Xmx512m", "-XX:+UseSerialGC", "-Dsun.net.httpserver.nodelay=true", &log]);
    start_with_port(command.args(options).arg(source).stdin(Stdio::null()), "java")
}

/// The spans of the collections in a log with lines such as `[123456789ns] GC(0) Pause Full
/// (System.gc()) 9M->8M(9M) 4.5ms`.
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

struct Recorded {
    /// The output of the recorder.
    printed: String,
    report: Value,
    /// The collections in the JVM's log.
    truth: Vec<(u64, u64)>,
}

/// Records a JVM.
fn record_jvm() -> Recorded {
    let folder = tempfile::tempdir().unwrap();
    let (java, port) = start_java(folder.path(), &[]);
    let load = Load::start(port, GET, |answer| answer.ends_with(b"hello"));
    let (port, recording) = (port.to_string(), folder.path().join("java.trace"));
    let recording = recording.to_str().unwrap();
    let printed = record(&["-d", "4s", "--port", &port], recording);
    load.end();
    drop(java);
    let report = report(recording, &["--slow", "p97"]);
    Recorded { printed, report, truth: collections(&folder.path().join("gc.log")) }
}

/// The time that the slowest requests are charged for collections, and the part of that time that
/// the JVM's log confirms.
fn charged_and_true_ns(Recorded { report, truth, .. }: &Recorded) -> (u64, u64) {
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

fn first_cause(report: &Value) -> &str {
    report["causes"][0]["cause"].as_str().unwrap_or_else(|| panic!("{report:#}"))
}

#[test]
#[ignore = "needs root, eBPF and a JDK"]
fn collections_are_named_by_the_probes_of_a_jvm() {
    let found = record_jvm();
    assert!(found.printed.contains("is a JVM: by its probes"), "{}", found.printed);
    assert_eq!(first_cause(&found.report), "gc", "{:#}", found.report);
    let (charged, true_ns) = charged_and_true_ns(&found);
    // The charge also contains the halt around the collection, which the log does not.
    assert!(
        charged > 0 && true_ns * 10 >= charged * 9,
        "{true_ns} of {charged}: {:#}",
        found.report
    );
}

/// Goal: without the rights for probes, the JVM's counters show its collections. Method: the events
/// from the counters, compared with the JVM's log.
#[test]
#[ignore = "needs a JDK"]
fn collections_are_recognized_by_the_counters_of_a_jvm() {
    let folder = tempfile::tempdir().unwrap();
    let (java, _) = start_java(folder.path(), &[]);
    let mut jvms = Jvms::none();
    let printed = jvms.refresh(&[java.0.id(), std::process::id()], None);
    assert!(printed.len() == 1 && printed[0].contains("is a JVM: by its counters"), "{printed:?}");
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
        assert_eq!(
            kinds,
            [EventKind::Runtime(Runtime::GcBegin), EventKind::Runtime(Runtime::GcEnd)]
        );
        let took = ended.at_ns - began.at_ns;
        let near = truth.iter().min_by_key(|(_, at)| ended.at_ns.abs_diff(*at)).expect("some");
        assert!(took.abs_diff(near.1 - near.0) * 5 <= took + 5_000_000, "{took}: {near:?}");
        assert!(ended.at_ns.abs_diff(near.1) < 100_000_000, "{ended:?}: {near:?}");
    }
}

#[test]
#[ignore = "needs a JDK"]
fn a_jvm_without_counters_is_recognized_by_its_threads() {
    let folder = tempfile::tempdir().unwrap();
    let (java, _) = start_java(folder.path(), &["-XX:-UsePerfData"]);
    let printed = Jvms::none().refresh(&[java.0.id()], None);
    assert!(
        printed.len() == 1 && printed[0].contains("by the names of its threads"),
        "{printed:?}"
    );
}
