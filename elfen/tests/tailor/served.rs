//! Clients of a recorded service, and the commands that record it and explain the recording.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use elfen_rt::service::Service;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use serde_json::Value;

use crate::process::{KilledOnDrop, PATIENCE};

const CLIENTS: usize = 4;

pub(crate) const ELFEN: &str = env!("CARGO_BIN_EXE_elfen");
/// An HTTP request of a client.
pub(crate) const GET: &[u8] = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n";

/// Tests with these services run one at a time: a service that gets no CPU time would have other
/// causes of slow requests.
pub(crate) fn take_turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8")
}

pub(crate) fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

pub(crate) fn tailor(words: &[&str]) -> Command {
    let mut command = Command::new(ELFEN);
    command.arg("tailor").args(words).stdin(Stdio::null());
    command
}

/// Records with these options. Returns what the recorder prints.
#[track_caller]
pub(crate) fn record(options: &[&str], recording: &str) -> String {
    let words = [&["record"], options, &["-o", recording]].concat();
    let output = tailor(&words).output().unwrap();
    let printed = text(&output.stderr).to_owned();
    assert!(output.status.success(), "{options:?}: {printed}");
    printed
}

/// The report on a recording, or the printed error if the command fails.
pub(crate) fn try_report(recording: &str, options: &[&str]) -> Result<Value, String> {
    let words = [&["report", recording, "--json"], options].concat();
    let output = tailor(&words).output().unwrap();
    serde_json::from_slice(&output.stdout).map_err(|_| text(&output.stderr).to_owned())
}

#[track_caller]
pub(crate) fn report(recording: &str, options: &[&str]) -> Value {
    try_report(recording, options).unwrap_or_else(|printed| panic!("{printed}"))
}

/// Asserts that events were lost: in a part of the requests, or in all requests. In the second case
/// the command prints no report.
pub(crate) fn assert_lost_events(recording: &str) {
    match try_report(recording, &[]) {
        Err(printed) => assert!(printed.contains("requests lost events"), "{printed}"),
        Ok(report) => {
            assert!(number(&report["lost_events"]) > 0, "{report:#}");
            assert!(number(&report["complete"]) < number(&report["requests"]), "{report:#}");
        }
    }
}

/// Starts a service that prints its port. `program` names the service in an error.
pub(crate) fn start_with_port(command: &mut Command, program: &str) -> (KilledOnDrop, u16) {
    use std::io::{BufRead, BufReader};
    let started = command.stdout(Stdio::piped()).spawn();
    let mut service =
        KilledOnDrop(started.unwrap_or_else(|error| panic!("needs {program}: {error}")));
    let mut line = String::new();
    BufReader::new(service.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let port = line.trim().parse().unwrap_or_else(|_| panic!("{program} said {line:?}"));
    (service, port)
}

/// Clients that send a request, wait for the whole answer, and pause.
pub(crate) struct Load {
    ends: Arc<AtomicBool>,
    clients: Vec<JoinHandle<()>>,
    _turn: MutexGuard<'static, ()>,
}

impl Load {
    pub(crate) fn start(port: u16, request: &'static [u8], is_whole: fn(&[u8]) -> bool) -> Self {
        let turn = take_turn();
        let ends = Arc::new(AtomicBool::new(false));
        let client = |_| {
            let ends = Arc::clone(&ends);
            std::thread::spawn(move || {
                let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
                stream.set_nodelay(true).unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                // Relaxed: the flag publishes no other data.
                while !ends.load(Relaxed) {
                    stream.write_all(request).unwrap();
                    let (mut bytes, mut answer) = ([0; 4096], Vec::new());
                    while !is_whole(&answer) {
                        let count = stream.read(&mut bytes).unwrap();
                        assert!(count > 0, "the service answers");
                        answer.extend(&bytes[..count]);
                    }
                    std::thread::sleep(Duration::from_millis(5));
                }
            })
        };
        let clients = (0..CLIENTS).map(client).collect();
        Self { ends, clients, _turn: turn }
    }

    pub(crate) fn end(self) {
        self.ends.store(true, Relaxed);
        self.clients.into_iter().for_each(|client| client.join().expect("all were answered"));
    }
}

/// What a service of the test does in each request, and after it.
pub(crate) struct Work {
    pub(crate) busy: Duration,
    /// How long the service sleeps in every twentieth request.
    pub(crate) sleep: Duration,
    pub(crate) pause: Duration,
}

/// A service of the test on CPU 0 that publishes its requests.
pub(crate) struct MarkedService {
    pub(crate) name: String,
    ends: Arc<AtomicBool>,
    serves: JoinHandle<()>,
}

impl MarkedService {
    pub(crate) fn start(which: &str, work: Work) -> Self {
        let name = format!("marked-{which}-{}", std::process::id());
        let ends = Arc::new(AtomicBool::new(false));
        let service = Service::open(&name, 1).unwrap();
        let until = Arc::clone(&ends);
        let serves = std::thread::spawn(move || {
            let mut cpus = CpuSet::new();
            cpus.set(0).unwrap();
            sched_setaffinity(Pid::from_raw(0), &cpus).unwrap();
            let mut worker = service.claim(0, 0).unwrap();
            for request in (1_u64..).take_while(|_| !until.load(Relaxed)) {
                worker.begin(request);
                let began = Instant::now();
                while began.elapsed() < work.busy {}
                worker.stage(1);
                if request % 20 == 0 {
                    std::thread::sleep(work.sleep);
                }
                worker.end();
                std::thread::sleep(work.pause);
            }
            drop(worker);
            service.remove().unwrap();
        });
        Self { name, ends, serves }
    }

    pub(crate) fn end(self) {
        self.ends.store(true, Relaxed);
        self.serves.join().unwrap();
    }
}
