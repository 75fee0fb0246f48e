//! Goal: behind `elfen hedge` each client gets one answer, its own, whatever becomes of servers;
//! nothing is sent twice that must not be. Method: two servers in processes of their own, that are
//! stopped by turns, killed, or answer in every form; each answer names its request.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(120);

fn elfen(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfen"));
    command.args(words);
    command
}

fn signal(process: &Child, signal: Signal) {
    kill(Pid::from_raw(i32::try_from(process.id()).unwrap()), signal).expect("it runs");
}

/// A server that answers, and ends with this.
struct Server {
    process: Child,
    at: SocketAddr,
}

impl Server {
    fn start(name: &str) -> Self {
        let mut command = elfen(&["tailor", "answer", name]);
        let mut process =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("elfen starts");
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let port: u16 = line.trim().parse().expect("a port");
        Self { process, at: SocketAddr::from(([127, 0, 0, 1], port)) }
    }

    fn end(&mut self) {
        // It may have ended already.
        drop(self.process.kill());
        drop(self.process.wait());
    }

    fn is_stopped(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.process.id())).unwrap();
        stat.rsplit_once(") ").unwrap().1.starts_with('T')
    }

    /// How often it has worked for a name.
    fn count(&self, name: &str) -> u32 {
        let answer = ask(self.at, "GET", &format!("/count/0/{name}"));
        String::from_utf8(answer.body).unwrap().trim().parse().expect("a number")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

/// The proxy under test.
struct Hedge {
    process: Child,
    said: BufReader<ChildStderr>,
    at: SocketAddr,
}

impl Hedge {
    fn start(to: SocketAddr, backup: SocketAddr, words: &[&str]) -> Self {
        let (to, backup) = (to.to_string(), backup.to_string());
        let fixed =
            ["hedge", "--listen", "127.0.0.1:0", "--to", &to, "--backup", &backup, "--json"];
        let mut command = elfen(&[&fixed[..], words].concat());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn().expect("elfen starts");
        let mut said = BufReader::new(process.stderr.take().unwrap());
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        let at = line.trim().rsplit_once(' ').and_then(|(_, at)| at.parse().ok());
        Self { process, said, at: at.unwrap_or_else(|| panic!("{line}")) }
    }

    /// What it says in the end.
    fn end(mut self) -> Value {
        signal(&self.process, Signal::SIGTERM);
        let mut text = String::new();
        self.process.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        assert!(self.process.wait().unwrap().success());
        let mut said = String::new();
        self.said.read_to_string(&mut said).unwrap();
        assert_eq!(said, "");
        serde_json::from_str(&text).expect("JSON")
    }
}

impl Drop for Hedge {
    fn drop(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

#[derive(Debug)]
struct Answer {
    code: u16,
    head: String,
    body: Vec<u8>,
}

/// A client's connection, on which one answer after the other is read.
struct Client {
    stream: BufReader<TcpStream>,
}

impl Client {
    fn connect(to: SocketAddr) -> Self {
        let stream = TcpStream::connect(to).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { stream: BufReader::new(stream) }
    }

    fn send(&mut self, method: &str, path: &str, body: &str) {
        let length = body.len();
        let head = format!("{method} {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n");
        let text = format!("{head}\r\n{body}");
        self.stream.get_mut().write_all(text.as_bytes()).unwrap();
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        assert!(self.stream.read_line(&mut line).unwrap() > 0, "an answer has begun");
        line
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn answer(&mut self, to: &str) -> Answer {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            head += &self.line();
        }
        let code = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a code");
        let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: "));
        let body = if to == "HEAD" {
            Vec::new()
        } else if let Some(length) = length {
            self.bytes(length.parse().unwrap())
        } else if head.contains("Transfer-Encoding: chunked\r\n") {
            self.chunks()
        } else {
            let mut all = Vec::new();
            self.stream.read_to_end(&mut all).unwrap();
            all
        };
        Answer { code, head, body }
    }

    fn chunks(&mut self) -> Vec<u8> {
        let mut all = Vec::new();
        loop {
            let line = self.line();
            let size = line.trim_end().split(';').next().unwrap();
            let size = usize::from_str_radix(size, 16).unwrap();
            if size == 0 {
                while self.line() != "\r\n" {}
                return all;
            }
            all.extend(self.bytes(size));
            assert_eq!(self.bytes(2), b"\r\n");
        }
    }

    /// The server has closed it, and has said no more.
    fn is_over(&mut self) -> bool {
        self.stream.read(&mut [0]).is_ok_and(|count| count == 0)
    }
}

fn ask(to: SocketAddr, method: &str, path: &str) -> Answer {
    let mut client = Client::connect(to);
    client.send(method, path, "");
    client.answer(method)
}

/// One client's requests, of every method and form; how many POST requests were among them.
fn converse(at: SocketAddr, client: usize, requests: usize) -> usize {
    let mut posts = 0;
    let mut connection = Client::connect(at);
    for number in 0..requests {
        let form = ["length", "chunked", "close"][(number + client) % 3];
        let method = ["GET", "GET", "HEAD", "GET", "POST"][number % 5];
        posts += usize::from(method == "POST");
        let (name, body) =
            (format!("{client}-{number}"), if method == "POST" { "abc" } else { "" });
        connection.send(method, &format!("/{form}/50/{name}"), body);
        let answer = connection.answer(method);
        assert_eq!(answer.code, 200, "{name}: {answer:?}");
        let text = String::from_utf8(answer.body).unwrap();
        let own = format!("{name} {} by ", body.len());
        assert!(text.starts_with(&own) || method == "HEAD", "{name}: {text}");
        assert!(text.ends_with("server\n") || method == "HEAD", "{name}: {text}");
        if answer.head.contains("Connection: close\r\n") {
            assert!(connection.is_over(), "{name}");
            connection = Client::connect(at);
        }
    }
    posts
}

/// Stops both by turns, now and then at once, until it is told to end.
fn stop_by_turns(servers: [u32; 2], ends: &AtomicBool) {
    let signal = |server: u32, signal| {
        kill(Pid::from_raw(i32::try_from(server).unwrap()), signal).expect("it runs");
    };
    let nap = |ms| std::thread::sleep(Duration::from_millis(ms));
    for turn in 0_usize.. {
        if ends.load(Relaxed) {
            return;
        }
        let stopped = if turn % 5 == 4 { &servers[..] } else { &servers[turn % 2..=turn % 2] };
        stopped.iter().for_each(|server| signal(*server, Signal::SIGSTOP));
        nap(20);
        stopped.iter().for_each(|server| signal(*server, Signal::SIGCONT));
        nap(30);
    }
}

/// Of each client: HEDGE_REQUESTS, where a million is asked for.
fn requests() -> usize {
    std::env::var("HEDGE_REQUESTS").map_or(400, |count| count.parse().expect("a number"))
}

/// Programs in the kernel are to tell of stops.
fn is_root() -> bool {
    let is_root = nix::unistd::geteuid().is_root();
    if !is_root {
        let mut terminal = std::io::stderr();
        writeln!(terminal, "skipped: elfen hedge --policy hazard: it takes root").unwrap();
    }
    is_root
}

/// Goal: a server that was started anew is warm before it gets requests, and takes over then.
/// Method: recorded requests are told by their names, which are worked for twice.
#[test]
fn a_server_that_was_started_anew_is_warmed() {
    if !is_root() {
        return;
    }
    let [mut first, second] = ["first server", "second server"].map(Server::start);
    let hedge = Hedge::start(first.at, second.at, &["--policy", "hazard"]);
    for number in 0..20 {
        assert_eq!(ask(hedge.at, "GET", &format!("/length/0/early-{number}")).code, 200);
    }
    first.end();
    assert_eq!(ask(hedge.at, "GET", "/length/0/b").code, 200);
    let mut command = elfen(&["tailor", "answer", "third server"]);
    command.arg("--port").arg(first.at.port().to_string());
    let mut process = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let deadline = std::time::Instant::now() + PATIENCE;
    while TcpStream::connect(first.at).is_err() {
        assert!(std::time::Instant::now() < deadline, "the third server");
        std::thread::sleep(Duration::from_millis(20));
    }
    let is_warm = |at| {
        let answer = ask(at, "GET", "/count/0/early-7");
        String::from_utf8(answer.body).unwrap().trim().parse::<u32>().unwrap() > 40
    };
    while !is_warm(first.at) {
        assert!(std::time::Instant::now() < deadline, "it is not warmed");
        std::thread::sleep(Duration::from_millis(20));
    }
    let done = hedge.end();
    assert_eq!((&done["unanswered"], &done["requests"]), (&0.into(), &21.into()), "{done}");
    drop(process.kill());
    drop(process.wait());
}

#[test]
fn each_client_gets_its_own_answer_once() {
    const CLIENTS: usize = 8;
    for policy in &["look", "after=2ms", "hazard"][..2 + usize::from(is_root())] {
        let servers = ["first server", "second server"].map(Server::start);
        let words = ["--policy", policy, "--max-extra", "30%"];
        let hedge = Hedge::start(servers[0].at, servers[1].at, &words);
        let (at, ends) = (hedge.at, Arc::new(AtomicBool::new(false)));
        let (over, ids) = (Arc::clone(&ends), servers.each_ref().map(|one| one.process.id()));
        let stopper = std::thread::spawn(move || stop_by_turns(ids, &over));
        let client = |client| std::thread::spawn(move || converse(at, client, requests()));
        let clients: Vec<_> = (0..CLIENTS).map(client).collect();
        let posts: usize = clients.into_iter().map(|client| client.join().unwrap()).sum();
        ends.store(true, Relaxed);
        stopper.join().unwrap();
        let done = hedge.end();
        let number = |key: &str| done[key].as_u64().expect("a number");
        assert_eq!(number("requests"), (CLIENTS * requests()) as u64, "{done}");
        assert!(0 < number("duplicates"), "{policy}: {done}");
        assert!(number("duplicates") * 10 <= number("requests") * 3, "{policy}: {done}");
        assert_eq!((number("unanswered"), number("moved")), (0, 0), "{policy}: {done}");
        assert!(posts > 0);
        // Those at the end, when most may have gone wrong.
        for name in (0..CLIENTS).flat_map(|client| {
            let last = requests() - 1;
            (last.saturating_sub(99)..=last)
                .filter(|number| number % 5 == 4)
                .map(move |number| format!("{client}-{number}"))
        }) {
            let counts: u32 = servers.iter().map(|server| server.count(&name)).sum();
            assert_eq!(counts, 1, "POST {name} was worked for once");
        }
    }
}

#[test]
fn dead_servers_are_left_and_both_dead_are_said_at_once() {
    let [mut first, mut second] = ["first server", "second server"].map(Server::start);
    let hedge = Hedge::start(first.at, second.at, &["--policy", "none"]);
    let (at, mut kept) = (hedge.at, Client::connect(hedge.at));
    let mut by = |method: &str| {
        kept.send(method, "/length/0/a", "");
        let answer = kept.answer(method);
        (answer.code, String::from_utf8(answer.body).unwrap())
    };
    assert_eq!(by("GET"), (200, "a 0 by first server\n".to_owned()));
    first.end();
    // The connection that waited is found to be closed, and a new one is refused: nothing was sent.
    assert_eq!(by("POST"), (200, "a 0 by second server\n".to_owned()));
    assert_eq!(by("GET"), (200, "a 0 by second server\n".to_owned()));
    second.end();
    assert_eq!(by("GET").0, 502);
    for method in ["GET", "POST"] {
        let answer = ask(at, method, "/length/0/b");
        assert_eq!((answer.code, answer.body.len()), (502, 0));
    }
    let done = hedge.end();
    assert_eq!((&done["swaps"], &done["duplicates"]), (&1.into(), &0.into()), "{done}");
    assert_eq!(done["unanswered"], 3, "{done}");
}

/// Both stand still: nobody is sent twice for nothing, and who has waited too long is told.
#[test]
fn both_paused() {
    let servers = ["first server", "second server"].map(Server::start);
    let (to, backup) = (servers[0].at, servers[1].at);
    let hedge = Hedge::start(to, backup, &["--give-up", "5s", "--max-extra", "100%"]);
    assert_eq!(ask(hedge.at, "GET", "/length/0/a").code, 200);
    for server in &servers {
        signal(&server.process, Signal::SIGSTOP);
        while !server.is_stopped() {
            std::thread::yield_now();
        }
    }
    assert_eq!(ask(hedge.at, "GET", "/length/0/b").code, 504);
    servers.iter().for_each(|server| signal(&server.process, Signal::SIGCONT));
    assert_eq!(ask(hedge.at, "GET", "/length/0/c").code, 200);
    let done = hedge.end();
    assert_eq!((&done["requests"], &done["unanswered"]), (&3.into(), &1.into()), "{done}");
    let counts: u32 = servers.iter().map(|server| server.count("b")).sum();
    assert!(counts <= 1, "{done}");
}

#[test]
fn what_clients_may_send() {
    let servers = ["first server", "second server"].map(Server::start);
    let hedge = Hedge::start(servers[0].at, servers[1].at, &[]);
    let code = |text: &[u8]| {
        let mut client = Client::connect(hedge.at);
        // It may have said no before all was sent.
        drop(client.stream.get_mut().write_all(text));
        let mut line = String::new();
        drop(client.stream.read_line(&mut line));
        line.split(' ').nth(1).and_then(|code| code.parse::<u16>().ok())
    };
    assert_eq!(code(b"GET /length/0/a HTTP/1.0\r\n\r\n"), Some(200));
    assert_eq!(code(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), Some(505), "HTTP/2");
    assert_eq!(code(b"CONNECT a:80 HTTP/1.1\r\n\r\n"), Some(501));
    let both = b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n";
    assert_eq!(code(both), Some(400));
    // A reset may overtake the answer to one that goes on sending.
    let long = [&b"GET / HTTP/1.1\r\nA: "[..], &vec![b'x'; 10 << 20]].concat();
    assert!(matches!(code(&long), None | Some(431)));
    // One behind the other on one connection, and a client that leaves in the middle.
    let mut client = Client::connect(hedge.at);
    client.send("GET", "/length/0/a", "");
    client.send("GET", "/chunked/0/b", "");
    assert!(client.answer("GET").body.starts_with(b"a 0 by"));
    assert!(client.answer("GET").body.starts_with(b"b 0 by"));
    client.send("GET", "/endless/0/c", "");
    assert_eq!(client.line(), "HTTP/1.1 200 OK\r\n");
    client.bytes(1 << 20);
    // While it is read on, others are served.
    let reader = std::thread::spawn(move || {
        client.bytes(64 << 20);
        drop(client);
    });
    assert_eq!(ask(hedge.at, "GET", "/length/0/e").code, 200);
    reader.join().unwrap();
    assert_eq!(ask(hedge.at, "GET", "/length/0/d").code, 200);
    let done = hedge.end();
    assert_eq!(done["unanswered"], 0, "{done}");
}

/// What each policy made of a benchmark, by its own word; `None` if it lacks something here.
fn benchmarked(words: &[&str]) -> Option<Vec<Value>> {
    let words = [&["bench", "hedge", "--rounds", "1", "--for", "1s", "--json"], words].concat();
    let output = elfen(&words).stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(3) {
        let mut terminal = std::io::stderr();
        writeln!(terminal, "skipped: elfen bench hedge --jvm: {}", said.trim()).unwrap();
        return None;
    }
    assert!(output.status.success(), "{said}");
    let mut told: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let Value::Array(policies) = told["policies"].take() else { panic!("{told}") };
    let names: Vec<&str> = policies.iter().map(|one| one["policy"].as_str().unwrap()).collect();
    let all = ["none", "after=p95", "look", "hazard"];
    assert_eq!(names, all[..3 + usize::from(is_root())]);
    for fared in &policies {
        let number = |key: &str| fared[key].as_f64().expect("a number");
        assert!(number("requests") > 100.0 && number("p50_us") > 0.0, "{fared}");
        assert!(number("duplicates") <= number("requests") / 20.0, "{fared}");
    }
    Some(policies)
}

/// Every policy has its turn, and every answer was its request's: the benchmark looks.
#[test]
fn the_benchmark_ends_with_figures_of_each_policy() {
    let policies = benchmarked(&["--pauses", "2"]).expect("it lacks nothing");
    assert!(policies.iter().all(|one| one["restart_p99_us"].is_null()), "{policies:?}");
    let foreseen = |one: &Value| one["simulated_p99_us"].as_f64() > Some(500.0);
    assert!(policies.iter().all(foreseen), "{policies:?}");
    let words = ["bench", "hedge", "--alone", "--rounds", "1", "--for", "200ms", "--json"];
    let alone = elfen(&words).output().unwrap();
    let alone: Value = serde_json::from_slice(&alone.stdout).expect("JSON");
    assert!(["direct", "proxied"].iter().all(|way| alone[way]["rps"].as_f64() > Some(0.0)));
    for wrong in [&["--for", "1s", "--pauses", "60"][..], &["--jvm", "--pause", "1ms"]] {
        let wrong = elfen(&[&["bench", "hedge"], wrong].concat()).output().unwrap();
        assert_eq!(wrong.status.code(), Some(2));
    }
}

/// The same with servers in Java, of which the first starts anew under each policy.
#[test]
fn and_so_does_that_with_servers_in_java() {
    let Some(policies) = benchmarked(&["--pauses", "2", "--jvm"]) else { return };
    for one in policies {
        assert!(one["restart_p99_us"].as_f64() > Some(0.0), "{one}");
    }
}

#[test]
fn wrong_arguments() {
    let (a, b) = (free_address().to_string(), free_address().to_string());
    let words = |listen: &str, to: &str, backup: &str, more: &[&str]| -> Output {
        let fixed = ["hedge", "--listen", listen, "--to", to, "--backup", backup];
        elfen(&[&fixed[..], more].concat()).output().unwrap()
    };
    let none = ["--policy", "none"];
    let cases: [(Output, i32, &str); 9] = [
        (words(&a, &b, &b, &none), 2, "--to and --backup are the same"),
        (words(&a, &a, &b, &none), 2, "it would send requests to itself"),
        (words("0.0.0.0:7", &b, "127.0.0.1:7", &none), 2, "it would send requests to itself"),
        (words("127.0.0.1:0", &a, &b, &["--methods", "GET,POST"]), 2, "invalid value 'POST'"),
        (words("127.0.0.1:0", &a, &b, &["--policy", "halt"]), 2, "invalid value 'halt'"),
        (words("127.0.0.1:0", &a, &b, &["--max-extra", "5"]), 2, "invalid value '5'"),
        (words("127.0.0.1:0", &a, "192.0.2.1:80", &[]), 2, "one is not on this machine"),
        (words("localhost", &a, &b, &[]), 2, "it is an IP address and a port"),
        (words("127.0.0.1:0", &a, &b, &[]), 1, "nobody listens on port"),
    ];
    for (output, status, why) in cases {
        let said = std::str::from_utf8(&output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(status), "{why}: {said}");
        assert!(said.lines().count() == 1 && said.contains(why), "{why}: {said}");
    }
}
