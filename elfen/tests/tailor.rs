//! Goal: `elfen tailor` names what made the requests of real services slow, says what it lost, and
//! leaves a readable file whatever becomes of it. Method: a Redis and an nginx that nobody changed,
//! stopped by the command's own injector; ends of every kind; wrong files and arguments.

mod served;

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use elfen_rt::service::Service;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use served::{Ends, Load, PATIENCE, tailor as elfen};

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8")
}

fn signal(process: &Ends, signal: Signal) {
    kill(Pid::from_raw(i32::try_from(process.0.id()).unwrap()), signal).expect("it runs");
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "waited a minute for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn listens(port: u16) -> bool {
    TcpStream::connect(("127.0.0.1", port)).is_ok()
}

/// A Redis of the test's own, and its port.
fn redis(folder: &Path) -> (Ends, u16) {
    let port = free_port();
    let mut command = Command::new("redis-server");
    command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", ""]);
    command.arg("--dir").arg(folder).stdout(Stdio::null());
    let redis = Ends(command.spawn().expect("needs redis-server"));
    until("redis-server", || listens(port));
    (redis, port)
}

fn stop(pid: u32) -> Ends {
    let pid = pid.to_string();
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfen"));
    command.args(["lab", "inject", "stop", "--pid", &pid, "--every", "300ms", "--length", "60ms"]);
    Ends(command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
}

#[test]
#[ignore = "needs root, eBPF and Redis"]
fn a_stopped_redis_is_found_out() {
    let folder = tempfile::tempdir().unwrap();
    let (redis, port) = redis(folder.path());
    let load = Load::start(port, b"PING\r\n", |answer| !answer.is_empty());
    let stopper = stop(redis.0.id());
    let (port, recording) = (port.to_string(), folder.path().join("redis.trace"));
    let recording = recording.to_str().unwrap();
    let words = ["record", "-d", "3s", "--port", &port, "--detail", "full", "-o", recording];
    let recorded = elfen(&words).output().unwrap();
    assert!(recorded.status.success(), "{}", text(&recorded.stderr));
    let told = elfen(&["report", recording, "--slow", "20ms", "--json"]).output().unwrap();
    let told: Value = serde_json::from_slice(&told.stdout).expect("JSON");
    // Of any 300 ms, 60 are a stop.
    let first = &told["causes"][0];
    assert_eq!(first["cause"], "stopped", "{told:#}");
    assert!(told["requests"].as_u64().unwrap() >= told["complete"].as_u64().unwrap());
    assert!(told["complete"].as_u64().unwrap() > 100, "{told:#}");
    for slow in told["slowest"].as_array().unwrap() {
        let number = |value: &Value| value.as_u64().expect("a number");
        let mut at_ns = number(&slow["arrived_ns"]);
        for segment in slow["segments"].as_array().unwrap() {
            assert_eq!(number(&segment["from_ns"]), at_ns, "no gap: {slow:#}");
            at_ns = number(&segment["to_ns"]);
        }
        assert_eq!(at_ns, number(&slow["arrived_ns"]) + number(&slow["latency_ns"]));
    }
    let screen = elfen(&["report", recording, "--slow", "20ms"]).output().unwrap();
    let screen = text(&screen.stdout);
    without_causes(recording, folder.path());
    assert!(screen.starts_with("redis-server, port "), "{screen}");
    assert!(screen.contains("the service was stopped by a signal or a debugger"), "{screen}");
    published(&port);
    // While it goes on: lines of a watch, and a whole file after Ctrl-C.
    let words = ["watch", "-d", "3s", "--port", &port, "--slow", "20ms", "--json"];
    let watched = elfen(&words).output().unwrap();
    assert!(watched.status.success(), "{}", text(&watched.stderr));
    let lines: Vec<Value> =
        text(&watched.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(lines.iter().any(|line| line["charges"][0][0] == "stopped"), "{lines:?}");
    interrupted(&port, recording);
    killed(&port, recording);
    overwhelmed(&port, recording);
    partly(&port, recording);
    // Killed, it may leave a stop behind.
    drop(stopper);
    signal(&redis, Signal::SIGCONT);
    load.end();
}

/// While a watch runs, its service's tail is seen by cause; once it was killed, no more.
fn published(port: &str) {
    let watch = elfen(&["watch", "--port", port, "--slow", "20ms"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let watch = Ends(watch.unwrap());
    let seen = |words: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_elfen"));
        let output = command.env("ELFEN_CONFIG", "/dev/null").args(words).output().unwrap();
        text(&output.stdout).to_owned()
    };
    let metrics = || seen(&["metrics", "--once"]);
    let labels = format!("{{service=\"redis-server:{port}\",cause=\"stopped\"}}");
    until("a ranking", || metrics().contains(&format!("elfen_tail_cause_ratio{labels}")));
    assert!(
        metrics().contains(&format!("elfen_tail_slow_requests{{service=\"redis-server:{port}"))
    );
    let top = seen(&["top", "--once"]);
    assert!(top.contains("BECAUSE OF") && top.contains(" stopped "), "{top}");
    drop(watch);
    assert!(!metrics().contains("redis-server:"), "it goes with the watch");
}

/// What is named is taken away, what is not there is refused with what is; files beside the screen.
fn without_causes(recording: &str, folder: &Path) {
    let words = ["report", recording, "--slow", "20ms", "--json", "--without", "stopped"];
    let (page, trace) = (folder.join("page.html"), folder.join("trace"));
    let files = ["--html", page.to_str().unwrap(), "--perfetto", trace.to_str().unwrap()];
    let told = elfen(&[&words[..], &files].concat()).output().unwrap();
    let told: Value = serde_json::from_slice(&told.stdout).expect("JSON");
    assert_eq!(told["without"]["causes"][0], "stopped", "{told:#}");
    let (p99, without) = (&told["latency_ns"]["p99"], &told["without"]["latency_ns"]["p99"]);
    // Where this machine had no queue of it, nothing is told.
    assert!(without.is_null() || without.as_u64() < p99.as_u64(), "{told:#}");
    assert!(fs::read_to_string(page).unwrap().contains("stopped by a signal or a debugger"));
    assert!(fs::metadata(trace).unwrap().len() > 10_000);
    let output = elfen(&["report", recording, "--without", "nagle"]).output().unwrap();
    let said = text(&output.stderr);
    assert_eq!((output.status.code(), said.lines().count()), (Some(2), 1), "{said}");
    assert!(said.contains("no request had the cause \"nagle\": the causes are "), "{said}");
    assert!(said.contains("stopped"), "{said}");
}

fn begins(port: &str, recording: &str) -> Ends {
    drop(fs::remove_file(recording));
    let words = ["record", "--port", port, "-o", recording];
    let mut command = elfen(&words);
    let heed = || {
        // SAFETY: the default action needs no handler.
        unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) };
        Ok(())
    };
    // SAFETY: between fork and exec, `heed` makes one system call.
    unsafe { command.pre_exec(heed) };
    let recorder = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let recorder = Ends(recorder);
    // A second or two of these clients: many requests are whole by then.
    until("events", || fs::metadata(recording).is_ok_and(|recording| recording.len() > 300_000));
    recorder
}

fn interrupted(port: &str, recording: &str) {
    let mut recorder = begins(port, recording);
    signal(&recorder, Signal::SIGINT);
    assert_eq!(recorder.0.wait().unwrap().code(), Some(0), "Ctrl-C is how it ends");
    let told = elfen(&["report", recording, "--json"]).output().unwrap();
    let told: Value = serde_json::from_slice(&told.stdout).expect("JSON");
    assert_eq!(told["whole"], true);
}

fn killed(port: &str, recording: &str) {
    drop(begins(port, recording));
    let told = elfen(&["report", recording]).output().unwrap();
    assert!(text(&told.stdout).contains("the recording was cut off"), "{}", text(&told.stdout));
}

/// Who is kept from reading small rings says how much he missed, and which requests that touched;
/// who cannot write says so at once.
fn overwhelmed(port: &str, recording: &str) {
    let words = ["record", "-d", "2s", "--port", port, "--ring", "16", "-o", recording];
    let mut recorder = Ends(elfen(&words).stdout(Stdio::null()).spawn().unwrap());
    std::thread::sleep(Duration::from_millis(700));
    signal(&recorder, Signal::SIGSTOP);
    std::thread::sleep(Duration::from_millis(700));
    signal(&recorder, Signal::SIGCONT);
    assert!(recorder.0.wait().unwrap().success());
    let told = elfen(&["report", recording, "--json"]).output().unwrap();
    let number = |told: &Value, key: &str| told[key].as_u64().expect("a number");
    // All requests may have been touched.
    match serde_json::from_slice::<Value>(&told.stdout) {
        Err(_) => assert!(text(&told.stderr).contains("requests lost events"), "{told:?}"),
        Ok(told) => {
            assert!(number(&told, "lost_events") > 0, "{told:#}");
            assert!(number(&told, "complete") < number(&told, "requests"), "{told:#}");
        }
    }
    let words = ["record", "-d", "2s", "--port", port, "-o", "/dev/full"];
    let full = elfen(&words).output().unwrap();
    assert_eq!(full.status.code(), Some(1), "{}", text(&full.stderr));
    assert!(text(&full.stderr).contains("No space left on device"), "{}", text(&full.stderr));
}

/// A part of each second is recorded as a part of it: who was there meanwhile is left out, nothing
/// counts as lost, and the rest is explained.
fn partly(port: &str, recording: &str) {
    let words = ["record", "-d", "3s", "--port", port, "--duty", "30%", "-o", recording];
    let recorded = elfen(&words).output().unwrap();
    assert!(recorded.status.success(), "{}", text(&recorded.stderr));
    let told = elfen(&["report", recording, "--json"]).output().unwrap();
    let told: Value = serde_json::from_slice(&told.stdout).expect("JSON");
    let share = told["recorded_share"].as_f64().unwrap();
    assert!((0.05..0.8).contains(&share), "{told:#}");
    assert!(told["complete"].as_u64().unwrap() > 50, "{told:#}");
    assert!(told["unknown_share"].as_f64().unwrap() < 0.05, "{told:#}");
    let screen = elfen(&["report", recording]).output().unwrap();
    assert!(text(&screen.stdout).contains("because of --duty"), "{}", text(&screen.stdout));
    for wrong in ["0%", "100%", "much", "-5%"] {
        let duty = format!("--duty={wrong}");
        let refused = elfen(&[&words[..5], &[duty.as_str()]].concat()).output().unwrap();
        assert_eq!(refused.status.code(), Some(2), "{wrong}");
    }
}

/// Workers that share a socket, of which the master serves none.
#[test]
#[ignore = "needs root, eBPF and nginx"]
fn an_nginx_that_nobody_changed() {
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
    let nginx = Ends(command.process_group(0).spawn().expect("needs nginx"));
    until("nginx", || listens(port));
    let ask = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n";
    let load = Load::start(port, ask, |answer| !answer.is_empty());
    let recording = folder.path().join("nginx.trace");
    let (pid, recording) = (nginx.0.id().to_string(), recording.to_str().unwrap().to_owned());
    let recorded =
        elfen(&["record", "-d", "2s", "--pid", &pid, "-o", &recording]).output().unwrap();
    load.end();
    // Its workers end with their master if it may end itself.
    signal(&nginx, Signal::SIGTERM);
    let mut nginx = nginx;
    nginx.0.wait().unwrap();
    assert!(recorded.status.success(), "{}", text(&recorded.stderr));
    let told = elfen(&["report", &recording, "--json"]).output().unwrap();
    let said = text(&told.stderr).to_owned();
    let told: Value = serde_json::from_slice(&told.stdout).unwrap_or_else(|_| panic!("{said}"));
    assert_eq!(told["service"], "nginx");
    assert!(told["complete"].as_u64().unwrap() > 100 && told["unclear"] == 0, "{told:#}");
    assert!(told["unknown_share"].as_f64().unwrap() < 0.05, "{told:#}");
}

/// A service of the test's own, which sleeps in a stage of every twentieth request.
struct Marked {
    name: String,
    ends: Arc<AtomicBool>,
    serves: JoinHandle<()>,
}

impl Marked {
    fn start(which: &str) -> Self {
        let name = format!("marked-{which}-{}", std::process::id());
        let ends = Arc::new(AtomicBool::new(false));
        let service = Service::open(&name, 1).unwrap();
        let until = Arc::clone(&ends);
        let serves = std::thread::spawn(move || {
            let mut worker = service.claim(0, 0).unwrap();
            for request in (1_u64..).take_while(|_| !until.load(Relaxed)) {
                worker.begin(request);
                let began = Instant::now();
                while began.elapsed() < Duration::from_micros(200) {}
                worker.stage(1);
                if request % 20 == 0 {
                    std::thread::sleep(Duration::from_millis(20));
                }
                worker.end();
                std::thread::sleep(Duration::from_millis(1));
            }
            drop(worker);
            service.remove().unwrap();
        });
        Self { name, ends, serves }
    }

    fn end(self) {
        self.ends.store(true, Relaxed);
        self.serves.join().unwrap();
    }
}

/// Goal: a service that publishes its requests is recorded by its name, with what the kernel saw.
/// Method: one that sleeps now and then.
#[test]
#[ignore = "needs root and eBPF"]
fn a_service_that_publishes_its_requests_is_recorded() {
    let told = recorded_marks("privileged", false);
    assert!(told["detail"] == "sched" && told["port"] == 0, "{told:#}");
    assert_eq!(told["causes"][0]["cause"], "sleep:clock_nanosleep", "{told:#}");
    assert_eq!(told["stages"][1]["stage"], 1);
    assert!(told["stages"][1]["tail_ns"].as_u64() >= Some(20_000_000), "{told:#}");
}

/// Goal: without privileges, a recording has what the service publishes, and says so.
#[test]
fn a_recording_without_privileges_is_what_the_service_publishes() {
    let told = recorded_marks("bare", true);
    assert!(told["detail"] == "marks" && told["slow_requests"].as_u64() > Some(0), "{told:#}");
}

/// The report of a service that sleeps now and then.
fn recorded_marks(which: &str, bare: bool) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let service = Marked::start(which);
    until("the service", || !elfen_of(&service.name, "/dev/null", false).stdout.is_empty());
    let recording = folder.path().join("marked.trace");
    let recording = recording.to_str().unwrap();
    let recorded = elfen_of(&service.name, recording, bare);
    service.end();
    let said = text(&recorded.stderr);
    assert!(recorded.status.success(), "{said}");
    assert_eq!(said.contains("no kernel events"), bare, "{said}");
    let words = ["report", recording, "--slow", "10ms", "--json"];
    let told = elfen(&words).output().unwrap();
    serde_json::from_slice(&told.stdout).expect("JSON")
}

/// Records a service for a second; with no privileges.
fn elfen_of(name: &str, recording: &str, bare: bool) -> Output {
    let words = ["record", "-d", "1s", "--service", name, "-o", recording];
    let mut command = match bare && nix::unistd::geteuid().is_root() {
        false => elfen(&[]),
        true => {
            let mut command = Command::new("setpriv");
            command.args(["--bounding-set=-all", "--inh-caps=-all"]);
            command.args([env!("CARGO_BIN_EXE_elfen"), "tailor"]).stdin(Stdio::null());
            command
        }
    };
    command.args(words).output().unwrap()
}

#[test]
fn wrong_arguments_and_files() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &[u8]| {
        let path = folder.path().join(name);
        fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let foreign = file("foreign", b"a text that is not a trace");
    let newer = file("newer", b"ELFNTALE\x63\0\0\0");
    let port = free_port().to_string();
    let idle = Ends(Command::new("sleep").arg("600").spawn().unwrap());
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
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{words:?}: {said}");
        assert!(said.lines().count() == 1 && said.contains(why), "{words:?}: {said}");
    }
}
