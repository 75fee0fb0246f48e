//! Goal: an injector leaves nothing behind that it changed, whatever ends it, and recorders leave
//! each other and the service alone. Method: an injector that is killed while it hurts; two
//! recorders at once; one that is stopped for longer than its rings reach.

mod served;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use served::{Ends, Load, PATIENCE, tailor as elfen};

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "waited a minute for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Answers each line, a thread for each client, as long as this process lives.
fn echo() -> u16 {
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

/// Each has rings of its own: what one is kept from reading, the other has.
#[test]
#[ignore = "needs root and eBPF"]
fn two_recorders_of_one_service() {
    let folder = tempfile::tempdir().unwrap();
    let port = echo();
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
    let mut second = Ends(second);
    let first = first.output().unwrap();
    let mut said = String::new();
    let stderr = second.0.stderr.take();
    let ended = second.0.wait().unwrap();
    stderr.unwrap().read_to_string(&mut said).unwrap();
    load.end();
    let of_first = String::from_utf8_lossy(&first.stderr);
    assert!(first.status.success() && ended.success(), "{of_first}{said}");
    let told = |recording: &str| {
        let told = elfen(&["report", recording, "--json"]).output().unwrap();
        (serde_json::from_slice::<Value>(&told.stdout), told.stderr)
    };
    let whole = told(&whole).0.expect("JSON");
    assert!(whole["complete"].as_u64() > Some(50), "{whole:#}");
    match told(&small) {
        (Ok(small), _) => assert!(small["lost_events"].as_u64() > Some(0), "{small:#}"),
        // Not one of its requests was whole.
        (Err(_), said) => {
            let said = String::from_utf8_lossy(&said).into_owned();
            assert!(said.contains("requests lost events"), "{said}");
        }
    }
}

const STOPPED: Duration = Duration::from_secs(5);

/// Nobody waits for a recorder: the service answers as if it was not there, and what it missed
/// meanwhile it says.
#[test]
#[ignore = "needs root and eBPF"]
fn a_recorder_that_is_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let port = echo();
    let load = Load::start(port, b"ask\n", |answer| answer.ends_with(b"\n"));
    let path = folder.path().join("trace");
    let (recording, port_text) = (path.to_str().unwrap(), port.to_string());
    // 40 ms of these clients' events.
    let words = ["record", "--port", &port_text, "--ring", "2048", "-o", recording];
    let mut command = elfen(&words);
    let heed = || {
        // SAFETY: the default action needs no handler.
        unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) };
        Ok(())
    };
    // SAFETY: between fork and exec, `heed` makes one system call.
    unsafe { command.pre_exec(heed) };
    let recorder = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut recorder = Ends(recorder);
    let id = Pid::from_raw(i32::try_from(recorder.0.id()).unwrap());
    let size = || fs::metadata(&path).map_or(0, |recording| recording.len());
    until("events", || size() > 200_000 || recorder.0.try_wait().unwrap().is_some());
    if let Some(ended) = recorder.0.try_wait().unwrap() {
        let mut said = String::new();
        recorder.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        panic!("{ended}: {said}");
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
    until("more events", || size() > stopped + 200_000);
    kill(id, Signal::SIGINT).unwrap();
    assert_eq!(recorder.0.wait().unwrap().code(), Some(0), "Ctrl-C is how it ends");
    // All of these were answered as well.
    load.end();
    let told = elfen(&["report", recording, "--json"]).output().unwrap();
    let told: Value = serde_json::from_slice(&told.stdout).expect("JSON");
    let number = |key: &str| told[key].as_u64().expect("a number");
    assert_eq!(told["whole"], true, "{told:#}");
    assert!(number("lost_events") > 1_000, "{told:#}");
    assert!(number("complete") > 50 && number("complete") < number("requests"), "{told:#}");
}
