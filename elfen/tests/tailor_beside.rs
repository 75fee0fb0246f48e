//! Goal: of a batch that `elfen run` put beside a service, each request says how long it had it on
//! its core, by the batch's name. Method: a live run on a pair of lanes named by hand, with a
//! budget longer than any request; and a recording of the same service once it has ended.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use elfen_rt::service::Service;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

/// For a batch to have some of a lane that others use as well.
const PATIENCE: Duration = Duration::from_secs(60);
const WORK: Duration = Duration::from_millis(3);

fn tailor(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfen"));
    command.arg("tailor").args(words).stdin(Stdio::null());
    command
}

/// One thread on CPU 0, with a request of 3 ms and a pause of a third of that, until it is told.
fn serve(name: &str, ends: &AtomicBool) {
    let mut cpus = CpuSet::new();
    cpus.set(0).unwrap();
    sched_setaffinity(Pid::from_raw(0), &cpus).unwrap();
    let service = Service::open(name, 1).unwrap();
    let mut worker = service.claim(0, 0).unwrap();
    for request in (1_u64..).take_while(|_| !ends.load(Relaxed)) {
        worker.begin(request);
        let began = Instant::now();
        while began.elapsed() < WORK {}
        worker.end();
        std::thread::sleep(WORK / 3);
    }
    drop(worker);
    service.remove().unwrap();
}

/// Ends with the test, also when that fails.
struct Batch(Child);

impl Drop for Batch {
    fn drop(&mut self) {
        // The front passes it on; SIGKILL would leave the batch behind.
        let front = Pid::from_raw(self.0.id().cast_signed());
        let _gone = kill(front, Signal::SIGTERM);
        let _ended = self.0.wait();
    }
}

/// A shell that loops, beside it, whatever its requests do.
fn batch(name: &str) -> Batch {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfen"));
    command.args(["run", "--lanes", "0:1", "--signal", "service", "--service", name]);
    command.args(["--policy", "fixed-budget", "--budget", "60s", "--inject", "guard", "--"]);
    command.args(["sh", "-c", "while :; do :; done"]).env_remove("ELFEN_LANES");
    Batch(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
}

/// A report of a second of it.
fn recorded(name: &str, recording: &str) -> Value {
    let words = ["record", "-d", "1s", "--service", name, "--lanes", "0:1", "-o", recording];
    let output = tailor(&words).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    assert!(!said.contains("no kernel events"), "needs root and eBPF: {said}");
    let told =
        tailor(&["report", recording, "--slow", "1ms", "-k", "1000", "--json"]).output().unwrap();
    serde_json::from_slice(&told.stdout).expect("JSON")
}

/// Of each request, how long it had the batch beside it.
fn overlaps(told: &Value) -> Vec<u64> {
    let of = |one: &Value| {
        // A request that had nobody there says nothing of it.
        let all = one["beside"].as_array().map_or(&[][..], Vec::as_slice);
        let its = all.iter().filter(|neighbour| neighbour["name"] == "sh");
        let ns = its.map(|neighbour| neighbour["ns"].as_u64().unwrap()).sum();
        assert!(ns <= one["latency_ns"].as_u64().unwrap(), "{one:#}");
        ns
    };
    told["slowest"].as_array().unwrap().iter().map(of).collect()
}

#[test]
#[ignore = "needs root, two CPUs and eBPF"]
fn each_request_says_how_long_a_batch_was_beside_it() {
    let name = format!("beside-{}", std::process::id());
    let folder = tempfile::tempdir().unwrap();
    let recording = folder.path().join("beside.trace");
    let recording = recording.to_str().unwrap();
    let ends = Arc::new(AtomicBool::new(false));
    let (of, until) = (name.clone(), Arc::clone(&ends));
    let serves = std::thread::spawn(move || serve(&of, &until));
    let deadline = Instant::now() + PATIENCE;
    let batch = batch(&name);
    // The batch has what others leave of its lane: at some time it has a request's length of it.
    let told = loop {
        let told = recorded(&name, recording);
        let most = overlaps(&told).into_iter().max().unwrap_or(0);
        if most > 1_000_000 {
            break told;
        }
        assert!(Instant::now() < deadline, "beside for {most} ns at most: {:#}", told["beside"]);
    };
    drop(batch);
    let rows = told["beside"].as_array().unwrap();
    let row = rows.iter().find(|row| row["name"] == "sh").expect("a row of its own");
    assert!(row["tail_ns"].as_u64() > Some(0), "{row:#}");
    let alone = recorded(&name, recording);
    assert!(!alone["slowest"].as_array().unwrap().is_empty(), "{alone:#}");
    assert_eq!(overlaps(&alone).into_iter().max(), Some(0), "it has ended");
    ends.store(true, Relaxed);
    serves.join().unwrap();
}
