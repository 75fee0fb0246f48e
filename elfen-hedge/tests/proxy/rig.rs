//! Shared parts of the proxy's tests: the proxy and servers in separate processes, servers in
//! threads that record every byte, and clients.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) fn hedge(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfen-hedge"));
    command.args(words);
    command
}

pub(crate) fn signal(process: u32, signal: Signal) {
    kill(Pid::from_raw(i32::try_from(process).unwrap()), signal).expect("it runs");
}

/// `hazard` loads eBPF programs, which needs root.
#[track_caller]
pub(crate) fn require_root() {
    assert!(nix::unistd::geteuid().is_root(), "needs root");
}

/// Waits for a condition.
pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "waiting for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

pub(crate) fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// A server in a separate process. Dropping it ends the process.
pub(crate) struct Server {
    pub(crate) process: Child,
    pub(crate) at: SocketAddr,
}

impl Server {
    pub(crate) fn start(name: &str) -> Self {
        Self::start_at(name, 0)
    }

    pub(crate) fn start_at(name: &str, port: u16) -> Self {
        let mut command = hedge(&["answer", name, "--port", &port.to_string()]);
        let mut process =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let port: u16 = line.trim().parse().expect("a port");
        Self { process, at: SocketAddr::from(([127, 0, 0, 1], port)) }
    }

    pub(crate) fn pair() -> [Self; 2] {
        ["first server", "second server"].map(Self::start)
    }

    pub(crate) fn end(&mut self) {
        // The process may have ended already.
        drop(self.process.kill());
        drop(self.process.wait());
    }

    pub(crate) fn is_stopped(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.process.id())).unwrap();
        stat.rsplit_once(") ").unwrap().1.starts_with('T')
    }

    /// How often the server has worked for a name.
    pub(crate) fn count(&self, name: &str) -> u32 {
        count(self.at, name)
    }
}

pub(crate) fn count(at: SocketAddr, name: &str) -> u32 {
    let answer = ask(at, "GET", &format!("/count/0/{name}"));
    answer.text().trim().parse().expect("a number")
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

/// The proxy under test.
pub(crate) struct Hedge {
    pub(crate) process: Child,
    /// The lines on the proxy's standard error.
    said: Receiver<String>,
    pub(crate) at: SocketAddr,
}

impl Hedge {
    pub(crate) fn start(to: SocketAddr, backup: SocketAddr, words: &[&str]) -> Self {
        let (to, backup) = (to.to_string(), backup.to_string());
        let fixed = ["--listen", "127.0.0.1:0", "--to", &to, "--backup", &backup, "--json"];
        let mut command = hedge(&[&fixed[..], words].concat());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn().expect("it starts");
        let said = lines(process.stderr.take().unwrap());
        let line = said.recv_timeout(PATIENCE).unwrap();
        let at = line.trim().rsplit_once(' ').and_then(|(_, at)| at.parse().ok());
        Self { process, said, at: at.unwrap_or_else(|| panic!("{line}")) }
    }

    /// The next line on the proxy's standard error.
    pub(crate) fn says(&self) -> String {
        self.said.recv_timeout(PATIENCE).expect("it says something")
    }

    /// Ends the proxy. Returns its final report, and its remaining lines on standard error.
    pub(crate) fn end(mut self) -> (Value, String) {
        signal(self.process.id(), Signal::SIGTERM);
        let mut text = String::new();
        self.process.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        assert!(self.process.wait().unwrap().success());
        let said: String = self.said.iter().collect();
        (serde_json::from_str(&text).expect("JSON"), said)
    }
}

impl Drop for Hedge {
    fn drop(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

fn lines(of: ChildStderr) -> Receiver<String> {
    let (tell, lines) = channel();
    std::thread::spawn(move || {
        let mut reader = BufReader::new(of);
        let mut line = String::new();
        while reader.read_line(&mut line).is_ok_and(|count| count > 0) {
            if tell.send(std::mem::take(&mut line)).is_err() {
                return;
            }
        }
    });
    lines
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) code: u16,
    /// Converted to lower case.
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }
}

/// A client's connection, which handles one answer after the other.
pub(crate) struct Client {
    pub(crate) stream: BufReader<TcpStream>,
}

impl Client {
    pub(crate) fn connect(to: SocketAddr) -> Self {
        let stream = TcpStream::connect(to).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { stream: BufReader::new(stream) }
    }

    pub(crate) fn send(&mut self, method: &str, path: &str, body: &str) {
        let length = body.len();
        let head = format!("{method} {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n");
        self.write(format!("{head}\r\n{body}").as_bytes());
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) {
        self.stream.get_mut().write_all(bytes).unwrap();
    }

    /// Closes the client's side.
    pub(crate) fn half_close(&mut self) {
        self.stream.get_mut().shutdown(Shutdown::Write).unwrap();
    }

    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        assert!(self.stream.read_line(&mut line).unwrap() > 0, "an answer has begun");
        line
    }

    pub(crate) fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    pub(crate) fn answer(&mut self, to: &str) -> Answer {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            head += &self.line();
        }
        head.make_ascii_lowercase();
        let code = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a code");
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let body = if to == "HEAD" || code == 204 || code == 304 {
            Vec::new()
        } else if let Some(length) = length {
            self.bytes(length.parse().unwrap())
        } else if head.contains("transfer-encoding: chunked\r\n") {
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
            let size = self.line();
            let size = usize::from_str_radix(size.trim_end(), 16).unwrap();
            if size == 0 {
                assert_eq!(self.line(), "\r\n", "no trailers");
                return all;
            }
            all.extend(self.bytes(size));
            assert_eq!(self.bytes(2), b"\r\n");
        }
    }

    /// Whether the other side has closed without further bytes.
    pub(crate) fn is_over(&mut self) -> bool {
        match self.stream.read(&mut [0]) {
            Ok(count) => count == 0,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

pub(crate) fn ask(to: SocketAddr, method: &str, path: &str) -> Answer {
    let mut client = Client::connect(to);
    client.send(method, path, "");
    client.answer(method)
}

/// The requests that a server in a thread received: each head with its body.
pub(crate) type Got = Arc<Mutex<Vec<String>>>;

/// A server in a thread. It passes every request to `answer`, together with the stream for the
/// answer. If `answer` returns false, it closes the connection. It finds the end of requests only
/// by Content-Length and CRLF.
pub(crate) struct Backend {
    pub(crate) at: SocketAddr,
    pub(crate) got: Got,
    _ends: Sender<()>,
}

impl Backend {
    pub(crate) fn start(
        answer: impl Fn(&str, &mut TcpStream) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self::start_at(0, answer)
    }

    pub(crate) fn start_at(
        port: u16,
        answer: impl Fn(&str, &mut TcpStream) -> bool + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        let (at, got) = (listener.local_addr().unwrap(), Got::default());
        let (ends, over) = channel();
        let (answer, seen) = (Arc::new(answer), Arc::clone(&got));
        std::thread::spawn(move || accept(&listener, &over, &seen, &answer));
        Self { at, got, _ends: ends }
    }

    /// A server that answers each request with its path.
    pub(crate) fn echo() -> Self {
        Self::start(|request, stream| {
            let path = request.split(' ').nth(1).unwrap_or_default();
            let length = path.len();
            let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{path}");
            stream.write_all(answer.as_bytes()).is_ok()
        })
    }

    pub(crate) fn requests(&self) -> Vec<String> {
        self.got.lock().unwrap().clone()
    }
}

fn accept<A>(listener: &TcpListener, over: &Receiver<()>, seen: &Got, answer: &Arc<A>)
where
    A: Fn(&str, &mut TcpStream) -> bool + Send + Sync + 'static,
{
    listener.set_nonblocking(true).unwrap();
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false).unwrap();
                let (seen, answer) = (Arc::clone(seen), Arc::clone(answer));
                std::thread::spawn(move || serve(stream, &seen, &*answer));
            }
            Err(_) => match over.recv_timeout(Duration::from_millis(2)) {
                Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {}
                _ => return,
            },
        }
    }
}

fn serve(mut stream: TcpStream, seen: &Got, answer: &dyn Fn(&str, &mut TcpStream) -> bool) {
    let mut bytes = Vec::new();
    let mut piece = [0; 4096];
    loop {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let whole = text.split_once("\r\n\r\n").and_then(|(head, _)| {
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
            let end = head.len() + 4 + length.map_or(0, |length| length.parse().unwrap());
            (bytes.len() >= end).then_some(end)
        });
        if let Some(end) = whole {
            let request = String::from_utf8_lossy(&bytes[..end]).into_owned();
            bytes.drain(..end);
            seen.lock().unwrap().push(request.clone());
            if !answer(&request, &mut stream) {
                return;
            }
            continue;
        }
        match stream.read(&mut piece) {
            Ok(0) | Err(_) => break,
            Ok(count) => bytes.extend_from_slice(&piece[..count]),
        }
    }
    if !bytes.is_empty() {
        // Bytes after the last request have been smuggled in.
        seen.lock().unwrap().push(String::from_utf8_lossy(&bytes).into_owned());
    }
}
