//! Goal: an injector undoes its changes however it ends. Recorders disturb neither each other nor
//! the service. Method: an injector that is killed during an injection; two recorders at once; and
//! a recorder that is stopped until its rings overflow.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::process::{KilledOnDrop, PATIENCE, heed_sigint, wait_until};
use crate::served::{Load, assert_lost_events, number, report, tailor as elfen};

/// Starts a service that answers each line, with a thread for each client. Returns its port.
fn start_echo() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let mut client = client.unwrap();
            std::thread::spawn(move || {
                let mut lines = BufReader::new(client.try_clone().unwrap());
                let mut line = String::new();
                while lines.read_line(&mut line).is_ok_and(|count| count > 0) {
                    client.write_all(line.as_bytes()).unwrap();
                    line.clear();
                }
            });
        }
    });
    port
}

/// Goal: each recorder has its own rings, so the other recorder still has the events that one
/// loses. Method: a recorder with small rings and all details, and a recorder with the defaults.
#[test]
#[ignore = "needs root and eBPF"]
fn two_recorders_of_one_service_are_independent() {
    let folder = tempfile::tempdir().unwrap();
    let port = start_echo();
    let load = Load::start(port, b"ask\n", |answer| answer.ends_with(b"\n"));
    let port = port.to_string();
    let record = |name: &str, more: &[&str]| {
        let recording = folder.path().join(name).to_str().unwrap().to_owned();
        let words = ["record", "-d", "2s", "--port", &port, "-o", &recording];
        let recorder = elfen(&[&words[..], more].concat());
        (recorder, recording)
    };
    let [(mut first, whole), (mut second, small)] =
        [record("whole", &[]), record("small", &["--ring", "16", "--detail", "full"])];
    let second = second.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut second = KilledOnDrop(second);
    let first = first.output().unwrap();
    let mut printed = String::new();
    let stderr = second.0.stderr.take();
    let ended = second.0.wait().unwrap();
    stderr.unwrap().read_to_string(&mut printed).unwrap();
    load.end();
    let of_first = String::from_utf8_lossy(&first.stderr);
    assert!(first.status.success() && ended.success(), "{of_first}{printed}");
    assert!(number(&report(&whole, &[])["complete"]) > 50);
    assert_lost_events(&small);
}

const STOPPED: Duration = Duration::from_secs(5);

/// Goal: a service does not wait for its recorder, and the recorder reports the events that it
/// lost. Method: requests while the recorder is stopped.
#[test]
#[ignore = "needs root and eBPF"]
fn a_stopped_recorder_does_not_delay_its_service() {
    let folder = tempfile::tempdir().unwrap();
    let port = start_echo();
    let load = Load::start(port, b"ask\n", |answer| answer.ends_with(b"\n"));
    let path = folder.path().join("tale");
    let (recording, port_text) = (path.to_str().unwrap(), port.to_string());
    // The ring holds 40 ms of events of these clients.
    let words = ["record", "--port", &port_text, "--ring", "2048", "-o", recording];
    let mut command = elfen(&words);
    heed_sigint(&mut command);
    let recorder = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut recorder = KilledOnDrop(recorder);
    let id = Pid::from_raw(i32::try_from(recorder.0.id()).unwrap());
    let size = || fs::metadata(&path).map_or(0, |recording| recording.len());
    wait_until("events", || size() > 200_000 || recorder.0.try_wait().unwrap().is_some());
    if let Some(ended) = recorder.0.try_wait().unwrap() {
        let mut printed = String::new();
        recorder.0.stderr.take().unwrap().read_to_string(&mut printed).unwrap();
        panic!("{ended}: {printed}");
    }
    kill(id, Signal::SIGSTOP).unwrap();
    let began = Instant::now();
    let mut client = TcpStream::connect(("127.0.0.1", port)).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    for _ in 0..1_000 {
        client.write_all(b"own\n").unwrap();
        let mut answer = [0; 4];
        client.read_exact(&mut answer).expect("it answers meanwhile");
        assert_eq!(&answer, b"own\n");
    }
    std::thread::sleep(STOPPED.saturating_sub(began.elapsed()));
    let stopped = size();
    kill(id, Signal::SIGCONT).unwrap();
    wait_until("more events", || size() > stopped + 200_000);
    kill(id, Signal::SIGINT).unwrap();
    assert_eq!(recorder.0.wait().unwrap().code(), Some(0), "Ctrl-C is the regular end");
    // The service also answered the requests of the load.
    load.end();
    let report = report(recording, &[]);
    let number = |key: &str| number(&report[key]);
    assert_eq!(report["whole"], true, "{report:#}");
    assert!(number("lost_events") > 1_000, "{report:#}");
    assert!(number("complete") > 50 && number("complete") < number("requests"), "{report:#}");
}
