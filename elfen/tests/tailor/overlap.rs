//! Goal: the report says how long a batch of `elfen run` overlapped each request, with the batch's
//! name. Method: a live run on a pair of lanes, with a budget longer than any request. Then a
//! recording of the same service after the end of the run.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::process::wait_until;
use crate::served::{self, MarkedService, Work, number, report, take_turn};

/// A run that ends when this value drops.
struct Batch(Child);

impl Drop for Batch {
    fn drop(&mut self) {
        // The launcher passes SIGTERM on. SIGKILL would leave the batch behind.
        let launcher = Pid::from_raw(self.0.id().cast_signed());
        let _gone = kill(launcher, Signal::SIGTERM);
        let _ended = self.0.wait();
    }
}

/// Starts a shell that loops next to the service. Its budget lets it overlap every request.
fn start_batch(name: &str) -> Batch {
    let mut command = Command::new(served::ELFEN);
    command.args(["run", "--lanes", "0:1", "--source", "service", "--service", name]);
    command.args(["--policy", "fixed-budget", "--budget", "60s", "--checks", "guard", "--"]);
    command.args(["sh", "-c", "while :; do :; done"]).env_remove("ELFEN_LANES");
    Batch(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
}

/// Records the service for one second. Returns the report.
fn record(name: &str, recording: &str) -> Value {
    let options = ["-d", "1s", "--service", name, "--lanes", "0:1"];
    let printed = served::record(&options, recording);
    assert!(!printed.contains("no kernel events"), "needs root and eBPF: {printed}");
    report(recording, &["--slow", "1ms", "-k", "1000"])
}

/// How long the batch overlapped each request.
fn overlaps(report: &Value) -> Vec<u64> {
    let of = |one: &Value| {
        // A request without a neighbour has no such list.
        let all = one["beside"].as_array().map_or(&[][..], Vec::as_slice);
        let its = all.iter().filter(|neighbour| neighbour["name"] == "sh");
        let ns = its.map(|neighbour| number(&neighbour["ns"])).sum();
        assert!(ns <= number(&one["latency_ns"]), "{one:#}");
        ns
    };
    report["slowest"].as_array().unwrap().iter().map(of).collect()
}

#[test]
#[ignore = "needs root, two CPUs and eBPF"]
fn each_request_has_its_overlap_with_a_batch() {
    let _turn = take_turn();
    let (busy, sleep, pause) = (Duration::from_millis(3), Duration::ZERO, Duration::from_millis(1));
    let service = MarkedService::start("beside", Work { busy, sleep, pause });
    let name = &service.name;
    let folder = tempfile::tempdir().unwrap();
    let recording = folder.path().join("beside.trace");
    let recording = recording.to_str().unwrap();
    let batch = start_batch(name);
    // Other processes use the lane, too, so it may take a while until the batch overlaps a request.
    let mut report = Value::Null;
    wait_until("overlap", || {
        report = record(name, recording);
        overlaps(&report).into_iter().max() > Some(1_000_000)
    });
    drop(batch);
    let rows = report["beside"].as_array().unwrap();
    let row = rows.iter().find(|row| row["name"] == "sh").expect("a row of the batch");
    assert!(row["tail_ns"].as_u64() > Some(0), "{row:#}");
    let alone = record(name, recording);
    assert!(!alone["slowest"].as_array().unwrap().is_empty(), "{alone:#}");
    assert_eq!(overlaps(&alone).into_iter().max(), Some(0), "the batch has ended");
    service.end();
}
