//! Goal: `elfen top` restores the terminal however it ends, and its keys work. Method: a terminal
//! of the test (a pty), every way to end, and a run whose policy the keys change.

mod needs;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use elfen_rt::service::Service;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::pty::{OpenptyResult, Winsize, openpty};
use nix::sys::signal::{Signal, kill};
use nix::sys::termios::{Termios, tcgetattr};
use nix::unistd::Pid;

const PATIENCE: Duration = Duration::from_secs(30);

/// The two ends of a pseudo-terminal, and the output to it.
struct Terminal {
    keyboard: File,
    device: OwnedFd,
    written: Arc<Mutex<Vec<u8>>>,
}

impl Terminal {
    fn new(columns: u16, rows: u16) -> Self {
        let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        let OpenptyResult { master, slave: device } = openpty(&size, None).expect("a terminal");
        // If programs inherited the keyboard end, the terminal would not hang up when the test
        // ends.
        for end in [&master, &device] {
            fcntl(end, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).unwrap();
        }
        let keyboard = File::from(master);
        let (mut screen, written) =
            (keyboard.try_clone().unwrap(), Arc::new(Mutex::new(Vec::new())));
        let kept = written.clone();
        thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(n @ 1..) = screen.read(&mut buffer) {
                kept.lock().unwrap().extend_from_slice(&buffer[..n]);
            }
        });
        Self { keyboard, device, written }
    }

    fn modes(&self) -> Termios {
        tcgetattr(&self.device).unwrap()
    }

    fn start(&self) -> Child {
        let end = || Stdio::from(self.device.try_clone().unwrap());
        let mut command = Command::new(env!("CARGO_BIN_EXE_elfen"));
        command.args(["top", "--every", "50ms"]).stdin(end()).stdout(end()).stderr(end());
        command.env("ELFEN_CONFIG", "/dev/null");
        // SAFETY: between fork and exec, `begin_session` makes two system calls.
        unsafe { command.pre_exec(begin_session) };
        command.spawn().expect("elfen starts")
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.written.lock().unwrap()).into_owned()
    }

    fn wait_for(&self, what: &str) {
        let start = Instant::now();
        while !self.text().contains(what) {
            assert!(start.elapsed() < PATIENCE, "no {what:?} in {:?}", self.text());
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn press(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }
}

/// Begins a session with this terminal, so that Ctrl-C becomes a signal.
fn begin_session() -> std::io::Result<()> {
    nix::unistd::setsid()?;
    // SAFETY: TIOCSCTTY takes a number.
    if unsafe { libc::ioctl(0, libc::TIOCSCTTY, 0) } < 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(())
}

fn pid(process: u32) -> Pid {
    Pid::from_raw(i32::try_from(process).expect("a pid"))
}

/// The only child of `elfen top`, which is the process that draws.
fn child_of(parent: u32) -> Pid {
    let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap();
    pid(children.split_whitespace().next().expect("a child").parse().expect("a pid"))
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    Keys(&'static str),
    Parent(Signal),
    Child(Signal),
}

#[test]
fn the_terminal_is_restored_however_elfen_top_ends() {
    let ends = [
        (End::Keys("q"), Some(0)),
        (End::Keys("\x03"), Some(0)),
        (End::Parent(Signal::SIGTERM), Some(0)),
        (End::Parent(Signal::SIGHUP), Some(0)),
        (End::Parent(Signal::SIGKILL), None),
        (End::Child(Signal::SIGKILL), Some(1)),
        (End::Child(Signal::SIGSEGV), Some(1)),
        (End::Child(Signal::SIGABRT), Some(1)),
        (End::Child(Signal::SIGTERM), Some(0)),
    ];
    for (end, code) in ends {
        let mut terminal = Terminal::new(80, 24);
        let before = terminal.modes();
        let mut elfen = terminal.start();
        terminal.wait_for("q quit");
        assert_ne!(terminal.modes(), before, "keys are not echoed");
        let draws = child_of(elfen.id());
        match end {
            End::Keys(keys) => terminal.press(keys),
            End::Parent(signal) => kill(pid(elfen.id()), signal).unwrap(),
            End::Child(signal) => kill(draws, signal).unwrap(),
        }
        assert_eq!(elfen.wait().unwrap().code(), code, "{end:?}: {:?}", terminal.text());
        // After SIGKILL the other process restores the terminal, after some time.
        terminal.wait_for("\x1b[?25h\x1b[?1049l");
        let start = Instant::now();
        while terminal.modes() != before {
            assert!(start.elapsed() < PATIENCE, "{end:?}: {:?}", terminal.modes());
            thread::sleep(Duration::from_millis(5));
        }
        if code == Some(1) {
            // The message is still on its way through the terminal.
            terminal.wait_for("elfen: the terminal: ");
        }
        let text = terminal.text();
        let after = text.rsplit_once("\x1b[?1049l").expect("it left the alternate screen").1;
        assert!(!after.contains("\x1b["), "{end:?}: drawn afterwards: {after:?}");
        assert_eq!(after.contains("elfen: the terminal: "), code == Some(1), "{end:?}: {after:?}");
    }
}

/// Policy, budget and pid of the batch with this program name, from `elfen status`.
fn status_of(batch: &str) -> Option<(String, u64, u64)> {
    let output = Command::new(env!("CARGO_BIN_EXE_elfen")).args(["status", "--json"]).output();
    let report: serde_json::Value = serde_json::from_slice(&output.unwrap().stdout).unwrap();
    let found = report["batches"].as_array()?.iter().find(|b| b["program"] == batch)?.clone();
    let policy = found["policy"].as_str()?.to_owned();
    Some((policy, found["budget_ns"].as_u64()?, found["pid"].as_u64()?))
}

#[test]
fn keys_change_policy_and_budget_of_the_selected_batch() {
    needs::two_cpus();
    let name = format!("top-{}", std::process::id());
    let service = Service::open(&name, 1).expect("a page");
    let worker = service.claim(0, 0).expect("the lane is free");
    // A program with a unique name.
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join(&name);
    fs::copy("/bin/sleep", &program).unwrap();
    let mut run = Command::new(env!("CARGO_BIN_EXE_elfen"));
    run.args(["run", "--lanes", "0:1", "--source", "service", "--service", &name, "--"]);
    run.env("ELFEN_CONFIG", "/dev/null").arg(&program).arg("60").stderr(Stdio::null());
    let mut run = run.spawn().expect("elfen starts");
    let becomes = |policy: &str, budget_ns| {
        let start = Instant::now();
        loop {
            match status_of(&name) {
                Some((found, budget, pid)) if found == policy && budget == budget_ns => return pid,
                found => assert!(start.elapsed() < PATIENCE, "{policy}: {found:?}"),
            }
            thread::sleep(Duration::from_millis(20));
        }
    };
    let batch = becomes("borrow-idle", 0);
    let mut terminal = Terminal::new(200, 50);
    let mut top = terminal.start();
    terminal.wait_for(&format!("{batch}"));
    let start = Instant::now();
    while !terminal.text().contains(&format!("> {batch} ")) {
        assert!(start.elapsed() < PATIENCE, "{batch} is never selected");
        terminal.press("\x1b[B");
        thread::sleep(Duration::from_millis(100));
    }
    terminal.press("p");
    becomes("fixed-budget", 1_000_000);
    terminal.wait_for("fixed-budget, budget 1.00 ms");
    terminal.press("+");
    becomes("fixed-budget", 2_000_000);
    terminal.press("-");
    becomes("fixed-budget", 1_000_000);
    terminal.press("pp");
    becomes("borrow-idle", 0);
    terminal.press("+");
    terminal.wait_for("borrow-idle has no budget");
    terminal.press("q");
    assert_eq!(top.wait().unwrap().code(), Some(0));
    kill(pid(run.id()), Signal::SIGTERM).unwrap();
    run.wait().unwrap();
    drop(worker);
    service.remove().unwrap();
}

/// Goal: without a terminal, `elfen top` prints text. Method: a pipe; and an invalid interval.
#[test]
fn without_a_terminal_elfen_top_prints_text() {
    let elfen = |words: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_elfen")).args(words).output().expect("elfen starts")
    };
    let once = elfen(&["top", "--once"]);
    let text = String::from_utf8(once.stdout).unwrap();
    assert_eq!(once.status.code(), Some(0));
    assert!(text.starts_with("elfen ") && !text.contains(['\x1b', '\r']), "{text:?}");
    let often = elfen(&["top", "--every", "1us"]);
    assert_eq!(often.status.code(), Some(2));
}
