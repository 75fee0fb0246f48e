//! Goal: `elfen tailor` names the causes of slow requests of real services and reports lost events.
//! It leaves a readable file however it ends. Method: an unmodified Redis, which the command's own
//! injector stops, and an unmodified nginx; recorders that end in every way; invalid files and
//! arguments.

mod faults;
mod jvm;
mod long_code;
mod lucene;
mod overlap;
#[path = "../process/mod.rs"]
mod process;
mod served;

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use process::{KilledOnDrop, heed_sigint, wait_until};
use serde_json::Value;
use served::{
    ELFEN, GET, Load, MarkedService, Work, assert_lost_events, number, record, report,
    tailor as elfen, text,
};

fn send_signal(process: &KilledOnDrop, signal: Signal) {
    kill(Pid::from_raw(i32::try_from(process.0.id()).unwrap()), signal).expect("it runs");
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn listens(port: u16) -> bool {
    TcpStream::connect(("127.0.0.1", port)).is_ok()
}

/// Starts a Redis of the test. Returns the process and its port.
fn start_redis(folder: &Path) -> (KilledOnDrop, u16) {
    let port = free_port();
    let mut command = Command::new("redis-server");
    command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", ""]);
    command.arg("--dir").arg(folder).stdout(Stdio::null());
    let redis = KilledOnDrop(command.spawn().expect("needs redis-server"));
    wait_until("redis-server", || listens(port));
    (redis, port)
}

/// Starts an injector that stops a process for 60 ms of each 300 ms.
fn start_stopper(pid: u32) -> KilledOnDrop {
    let pid = pid.to_string();
    let mut command = Command::new(ELFEN);
    command.args(["lab", "inject", "stop", "--pid", &pid, "--every", "300ms", "--length", "60ms"]);
    KilledOnDrop(command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
}

#[test]
#[ignore = "needs root, eBPF and Redis"]
fn stops_of_a_redis_are_the_first_cause() {
    let folder = tempfile::tempdir().unwrap();
    let (redis, port) = start_redis(folder.path());
    let load = Load::start(port, b"PING\r\n", |answer| !answer.is_empty());
    let stopper = start_stopper(redis.0.id());
    let (port, recording) = (port.to_string(), folder.path().join("redis.trace"));
    let recording = recording.to_str().unwrap();
    record(&["-d", "3s", "--port", &port, "--detail", "full"], recording);
    let report = report(recording, &["--slow", "20ms"]);
    let first = &report["causes"][0];
    assert_eq!(first["cause"], "stopped", "{report:#}");
    assert!(number(&report["requests"]) >= number(&report["complete"]));
    assert!(number(&report["complete"]) > 100, "{report:#}");
    for slow in report["slowest"].as_array().unwrap() {
        let mut at_ns = number(&slow["arrived_ns"]);
        for segment in slow["segments"].as_array().unwrap() {
            assert_eq!(number(&segment["from_ns"]), at_ns, "no gap: {slow:#}");
            at_ns = number(&segment["to_ns"]);
        }
        assert_eq!(at_ns, number(&slow["arrived_ns"]) + number(&slow["latency_ns"]));
    }
    let screen = elfen(&["report", recording, "--slow", "20ms"]).output().unwrap();
    let screen = text(&screen.stdout);
    check_replay_without_causes(recording, folder.path());
    assert!(screen.starts_with("redis-server, port "), "{screen}");
    assert!(screen.contains("the service was stopped by a signal or a debugger"), "{screen}");
    check_published_causes(&port);
    // The same load again, observed by `watch`, and by recorders that end in different ways.
    let words = ["watch", "-d", "3s", "--port", &port, "--slow", "20ms", "--json"];
    let watched = elfen(&words).output().unwrap();
    assert!(watched.status.success(), "{}", text(&watched.stderr));
    let lines: Vec<Value> =
        text(&watched.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(lines.iter().any(|line| line["charges"][0][0] == "stopped"), "{lines:?}");
    check_interrupted_recorder(&port, recording);
    check_killed_recorder(&port, recording);
    check_overwhelmed_recorder(&port, recording);
    check_partial_recording(&port, recording);
    // A killed injector may leave the service stopped.
    drop(stopper);
    send_signal(&redis, Signal::SIGCONT);
    load.end();
}

/// While `watch` runs, `elfen metrics` and `elfen top` show the causes of its service's tail. After
/// its end they do not.
fn check_published_causes(port: &str) {
    let watch = elfen(&["watch", "--port", port, "--slow", "20ms"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let watch = KilledOnDrop(watch.unwrap());
    let seen = |words: &[&str]| {
        let mut command = Command::new(ELFEN);
        let output = command.env("ELFEN_CONFIG", "/dev/null").args(words).output().unwrap();
        text(&output.stdout).to_owned()
    };
    let metrics = || seen(&["metrics", "--once"]);
    let labels = format!("{{service=\"redis-server:{port}\",cause=\"stopped\"}}");
    wait_until("a ranking", || metrics().contains(&format!("elfen_tail_cause_ratio{labels}")));
    assert!(
        metrics().contains(&format!("elfen_tail_slow_requests{{service=\"redis-server:{port}"))
    );
    let top = seen(&["top", "--once"]);
    assert!(top.contains("MAIN CAUSE") && top.contains(" stopped "), "{top}");
    drop(watch);
    assert!(!metrics().contains("redis-server:"), "the causes end with the watch");
}

/// A report without a cause predicts a lower p99. A cause that did not occur is refused, with the
/// list of causes that did. Also checks the HTML page and the Perfetto trace.
fn check_replay_without_causes(recording: &str, folder: &Path) {
    let words = ["--slow", "20ms", "--without", "stopped"];
    let (page, trace) = (folder.join("page.html"), folder.join("trace"));
    let files = ["--html", page.to_str().unwrap(), "--perfetto", trace.to_str().unwrap()];
    let report = report(recording, &[&words[..], &files].concat());
    assert_eq!(report["without"]["causes"][0], "stopped", "{report:#}");
    let (p99, without) = (&report["latency_ns"]["p99"], &report["without"]["latency_ns"]["p99"]);
    // If the service is not a queue on this machine, the report has no prediction.
    assert!(without.is_null() || without.as_u64() < p99.as_u64(), "{report:#}");
    assert!(fs::read_to_string(page).unwrap().contains("stopped by a signal or a debugger"));
    assert!(fs::metadata(trace).unwrap().len() > 10_000);
    let output = elfen(&["report", recording, "--without", "nagle"]).output().unwrap();
    let printed = text(&output.stderr);
    assert_eq!((output.status.code(), printed.lines().count()), (Some(2), 1), "{printed}");
    assert!(printed.contains("no request had the cause \"nagle\": the causes are "), "{printed}");
    assert!(printed.contains("stopped"), "{printed}");
}

/// Starts a recorder, and waits until it has written events of many requests.
fn start_recorder(port: &str, recording: &str) -> KilledOnDrop {
    drop(fs::remove_file(recording));
    let mut command = elfen(&["record", "--port", port, "-o", recording]);
    heed_sigint(&mut command);
    let recorder = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let recorder = KilledOnDrop(recorder);
    // These clients cause this many events in one or two seconds.
    wait_until("events", || {
        fs::metadata(recording).is_ok_and(|recording| recording.len() > 300_000)
    });
    recorder
}

/// Ctrl-C ends a recorder regularly.
fn check_interrupted_recorder(port: &str, recording: &str) {
    let mut recorder = start_recorder(port, recording);
    send_signal(&recorder, Signal::SIGINT);
    assert_eq!(recorder.0.wait().unwrap().code(), Some(0), "Ctrl-C is the regular end");
    assert_eq!(report(recording, &[])["whole"], true);
}

/// The recording of a killed recorder is readable.
fn check_killed_recorder(port: &str, recording: &str) {
    drop(start_recorder(port, recording));
    let report = elfen(&["report", recording]).output().unwrap();
    assert!(
        text(&report.stdout).contains("the recording is truncated"),
        "{}",
        text(&report.stdout)
    );
}

/// A recorder with small rings that it cannot read in time reports how many events it lost, and how
/// many requests that affected. A recorder that cannot write fails at once.
fn check_overwhelmed_recorder(port: &str, recording: &str) {
    let words = ["record", "-d", "2s", "--port", port, "--ring", "16", "-o", recording];
    let mut recorder = KilledOnDrop(elfen(&words).stdout(Stdio::null()).spawn().unwrap());
    std::thread::sleep(Duration::from_millis(700));
    send_signal(&recorder, Signal::SIGSTOP);
    std::thread::sleep(Duration::from_millis(700));
    send_signal(&recorder, Signal::SIGCONT);
    assert!(recorder.0.wait().unwrap().success());
    assert_lost_events(recording);
    let words = ["record", "-d", "2s", "--port", port, "-o", "/dev/full"];
    let full = elfen(&words).output().unwrap();
    assert_eq!(full.status.code(), Some(1), "{}", text(&full.stderr));
    assert!(text(&full.stderr).contains("No space left on device"), "{}", text(&full.stderr));
}

/// With `--duty`, only a part of each period is recorded. Requests that cross its limits are left
/// out, no event counts as lost, and the other requests are explained.
fn check_partial_recording(port: &str, recording: &str) {
    let words = ["-d", "3s", "--port", port];
    record(&[&words[..], &["--duty", "30%"]].concat(), recording);
    let report = report(recording, &[]);
    let share = report["recorded_share"].as_f64().unwrap();
    assert!((0.05..0.8).contains(&share), "{report:#}");
    assert!(number(&report["complete"]) > 50, "{report:#}");
    assert!(report["unknown_share"].as_f64().unwrap() < 0.05, "{report:#}");
    let screen = elfen(&["report", recording]).output().unwrap();
    assert!(text(&screen.stdout).contains("because of --duty"), "{}", text(&screen.stdout));
    for wrong in ["0%", "100%", "much", "-5%"] {
        let duty = format!("--duty={wrong}");
        let refused = elfen(&[&["record"], &words[..], &[duty.as_str()]].concat());
        let refused = { refused }.output().unwrap();
        assert_eq!(refused.status.code(), Some(2), "{wrong}");
    }
}

/// Goal: an unmodified nginx can be recorded, although its workers share a socket and its master
/// serves no requests. Method: two workers, recorded by the id of the master.
#[test]
#[ignore = "needs root, eBPF and nginx"]
fn an_unmodified_nginx_is_recorded() {
    let folder = tempfile::tempdir().unwrap();
    let (port, at) = (free_port(), folder.path().display());
    let configuration = format!(
        "worker_processes 2; daemon off; pid {at}/pid; error_log {at}/error.log; user root;
        events {{ }} http {{ access_log off; client_body_temp_path {at}/b; proxy_temp_path {at}/p;
        fastcgi_temp_path {at}/f; uwsgi_temp_path {at}/u; scgi_temp_path {at}/s;
        server {{ listen 127.0.0.1:{port}; keepalive_requests 1000000; return 200 hello; }} }}"
    );
    fs::write(folder.path().join("nginx.conf"), configuration).unwrap();
    let mut command = Command::new("/usr/sbin/nginx");
    command.arg("-c").arg(folder.path().join("nginx.conf")).stderr(Stdio::null());
    let mut nginx = KilledOnDrop(command.process_group(0).spawn().expect("needs nginx"));
    wait_until("nginx", || listens(port));
    let load = Load::start(port, GET, |answer| !answer.is_empty());
    let recording = folder.path().join("nginx.trace");
    let (pid, recording) = (nginx.0.id().to_string(), recording.to_str().unwrap().to_owned());
    record(&["-d", "2s", "--pid", &pid], &recording);
    load.end();
    // After SIGTERM, the master ends its workers. SIGKILL would leave them behind.
    send_signal(&nginx, Signal::SIGTERM);
    nginx.wait().unwrap();
    let report = report(&recording, &[]);
    assert_eq!(report["service"], "nginx");
    assert!(number(&report["complete"]) > 100 && report["unclear"] == 0, "{report:#}");
    assert!(report["unknown_share"].as_f64().unwrap() < 0.05, "{report:#}");
}

/// Goal: a service that publishes its requests is recorded by its name, with events of the kernel.
/// Method: a service that sleeps in some requests.
#[test]
#[ignore = "needs root and eBPF"]
fn a_service_that_publishes_its_requests_is_recorded() {
    let report = record_marked_service("privileged", false);
    assert!(report["detail"] == "sched" && report["port"] == 0, "{report:#}");
    assert_eq!(report["causes"][0]["cause"], "sleep:clock_nanosleep", "{report:#}");
    assert_eq!(report["stages"][1]["stage"], 1);
    assert!(report["stages"][1]["tail_ns"].as_u64() >= Some(20_000_000), "{report:#}");
}

/// Goal: without privileges, a recording contains only what the service publishes, and says so.
#[test]
fn a_recording_without_privileges_has_only_published_events() {
    let report = record_marked_service("bare", true);
    assert!(
        report["detail"] == "marks" && report["slow_requests"].as_u64() > Some(0),
        "{report:#}"
    );
}

/// Records a service that sleeps in some requests. Returns the report.
fn record_marked_service(which: &str, bare: bool) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let work = Work {
        busy: Duration::from_micros(200),
        sleep: Duration::from_millis(20),
        pause: Duration::from_millis(1),
    };
    let service = MarkedService::start(which, work);
    wait_until("the service", || {
        !record_service(&service.name, "/dev/null", false).stdout.is_empty()
    });
    let recording = folder.path().join("marked.trace");
    let recording = recording.to_str().unwrap();
    let recorded = record_service(&service.name, recording, bare);
    service.end();
    let printed = text(&recorded.stderr);
    assert!(recorded.status.success(), "{printed}");
    assert_eq!(printed.contains("no kernel events"), bare, "{printed}");
    report(recording, &["--slow", "10ms"])
}

/// Records a service for one second, optionally without privileges.
fn record_service(name: &str, recording: &str, bare: bool) -> Output {
    let words = ["record", "-d", "1s", "--service", name, "-o", recording];
    let mut command = elfen(&[]);
    if bare && nix::unistd::geteuid().is_root() {
        command = Command::new("setpriv");
        command.args(["--bounding-set=-all", "--inh-caps=-all"]);
        command.args([ELFEN, "tailor"]).stdin(Stdio::null());
    }
    command.args(words).output().unwrap()
}

#[test]
fn invalid_arguments_and_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &[u8]| {
        let path = folder.path().join(name);
        fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let foreign = file("foreign", b"a text that is not a trace");
    let newer = file("newer", b"ELFTRACE\x63\0\0\0");
    let port = free_port().to_string();
    let idle = KilledOnDrop(Command::new("sleep").arg("600").spawn().unwrap());
    let own = idle.0.id().to_string();
    let cases: [(&[&str], i32, &str); 14] = [
        (&["record"], 2, "no service is named"),
        (&["record", "--port", "0"], 2, "invalid value '0'"),
        (&["record", "--port", &port], 1, "nothing listens on port"),
        (&["record", "--service", "nobody-has-it"], 1, "no service publishes under the name"),
        (&["record", "--service", "x", "--port", "80"], 2, "cannot be used with"),
        (&["record", "--pid", "4294967295"], 1, "there is no process 4294967295"),
        (&["record", "--pid", &own], 1, "listens on no TCP port"),
        (&["report", "/nonexistent"], 1, "No such file"),
        (&["report", &foreign], 1, "it is not a trace"),
        (&["report", &newer], 1, "it is a trace of version 99"),
        (&["report", "--without"], 2, "a value is required"),
        (&["report", "--slow", "p100"], 2, "invalid value 'p100'"),
        (&["report", "--slow", "0"], 2, "invalid value '0'"),
        (&["record", "--lanes", "0", "--port", &port], 2, "begins with one request lane"),
    ];
    for (words, status, why) in cases {
        let output = elfen(words).current_dir(folder.path()).output().unwrap();
        let printed = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{words:?}: {printed}");
        assert!(printed.lines().count() == 1 && printed.contains(why), "{words:?}: {printed}");
    }
}
