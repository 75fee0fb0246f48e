//! A running `elfen-search`, and an index for it.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::LazyLock;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use tempfile::TempDir;

pub(crate) const SEARCH: &str = env!("CARGO_BIN_EXE_elfen-search");

pub(crate) fn search(args: &[&str]) -> Output {
    Command::new(SEARCH).args(args).output().expect("elfen-search was built")
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

/// A small index of the built-in corpus, built once.
pub(crate) static INDEX: LazyLock<TempDir> = LazyLock::new(|| {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let output = search(&["index", "--docs", "300", text(&scratch.path().join("index"))]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    scratch
});

/// A running service. It is killed when the test ends.
#[derive(Debug)]
pub(crate) struct Service {
    pub(crate) child: Child,
    pub(crate) stdout: BufReader<ChildStdout>,
    pub(crate) address: SocketAddr,
    pub(crate) name: String,
}

impl Service {
    pub(crate) fn start(more: &[&str]) -> Self {
        Self::start_at("127.0.0.1:0", more)
    }

    pub(crate) fn start_at(address: &str, more: &[&str]) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Relaxed);
        let name = format!("search-test-{}-{number}", std::process::id());
        let index = INDEX.path().join("index");
        let mut child = Command::new(SEARCH)
            .args(["serve", "--listen", address, "--service-name", &name])
            .args(more)
            .arg(&index)
            .stdout(Stdio::piped())
            .spawn()
            .expect("elfen-search was built");
        let mut stdout = BufReader::new(child.stdout.take().expect("it is piped"));
        let mut line = String::new();
        stdout.read_line(&mut line).expect("it says where it serves");
        let address = line.trim().strip_prefix("serving on ").expect("its address");
        let address = address.parse().expect("an address");
        Self { child, stdout, address, name }
    }

    pub(crate) fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).expect("it listens")
    }

    /// Sends these bytes and returns everything that the service sends until it closes the
    /// connection.
    pub(crate) fn exchange(&self, bytes: &[u8]) -> String {
        let mut stream = self.connect();
        // The service may close the connection before it has read everything.
        drop(stream.write_all(bytes));
        drop(stream.shutdown(Shutdown::Write));
        let mut answer = Vec::new();
        drop(stream.read_to_end(&mut answer));
        String::from_utf8_lossy(&answer).into_owned()
    }

    pub(crate) fn get(&self, target: &str) -> (u16, String) {
        let request = format!("GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        let answer = self.exchange(request.as_bytes());
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        (head[9..12].parse().expect("a status"), body.to_owned())
    }

    /// Anonymous memory of the service.
    pub(crate) fn memory_kib(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id()));
        let status = status.expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse().ok());
        kib.expect("Linux says it so")
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).expect("a pid"));
        kill(pid, signal).expect("it runs");
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if self.child.try_wait().expect("it is ours").is_none() {
            self.child.kill().expect("it runs");
            self.child.wait().expect("it was killed");
        }
        let page = elfen_rt::service::Service::open(&self.name, 1);
        if let Ok(page) = page {
            page.remove().expect("it is ours");
        }
    }
}
