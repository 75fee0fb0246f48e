//! Goal: an injector leaves nothing behind that it changed, whatever ends it, and recorders leave
//! each other alone. Method: an injector that is killed while it hurts; two recorders at once.

mod served;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use served::{Ends, Load, PATIENCE, tailor as elfen};

fn skipped(why: &str) {
    served::skipped("elfen tailor", why);
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "waited a minute for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Loopback's packets go where they went before.
#[test]
fn a_flood_that_is_killed() {
    const STEERING: &str = "/sys/class/net/lo/queues/rx-0/rps_cpus";
    let Ok(before) = fs::read_to_string(STEERING) else {
        return skipped("packets can't be steered here");
    };
    if fs::write(STEERING, before.trim()).is_err() {
        return skipped("it takes root");
    }
    let hurt = Ends(Command::new("sleep").arg("600").spawn().unwrap());
    let pid = hurt.0.id().to_string();
    let words = ["inject", "softirq", "--pid", &pid, "--cpu", "1", "--every", "1s"];
    let mut flood = elfen(&words);
    flood.args(["--last", "900ms"]).stderr(Stdio::null());
    let flood = Ends(flood.spawn().unwrap());
    let now = || fs::read_to_string(STEERING).unwrap();
    until("packets to be steered", || now() != before);
    // By SIGKILL.
    drop(flood);
    until("packets to go where they went before", || now() == before);
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
fn two_recorders_of_one_service() {
    let folder = tempfile::tempdir().unwrap();
    let port = echo();
    let load = Load::start(port, b"ask\n", |answer| answer.ends_with(b"\n"));
    let port = port.to_string();
    let record = |name: &str, more: &[&str]| {
        let tale = folder.path().join(name).to_str().unwrap().to_owned();
        let words = ["record", "--for", "2s", "--port", &port, "-o", &tale];
        let recorder = elfen(&[&words[..], more].concat());
        (recorder, tale)
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
    if said.contains("not permitted") || [first.status.code(), ended.code()].contains(&Some(3)) {
        return skipped(&format!("{of_first}{said}"));
    }
    assert!(first.status.success() && ended.success(), "{of_first}{said}");
    let told = |tale: &str| {
        let told = elfen(&["report", tale, "--json"]).output().unwrap();
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
