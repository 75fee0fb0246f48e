//! What elfend grants over its socket, and how long a request waits.

use std::fs;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use elfen_machine::fence::status::Request;
use elfen_rt::pages;

use super::SPIN;
use super::stage::{Fenced, kill, require_fences, wait_until};

/// Goal: root in a fence, or without capabilities as in a container, commands no fence. Method:
/// both ask for another budget and for the end of a pause; then root outside, which is granted it.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn root_commands_only_from_outside() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_it_runs();
    let elfen = env!("CARGO_BIN_EXE_elfen");
    let pid = fenced.daemon.id().to_string();
    let set = [elfen, "set", &pid, "--policy", "fixed-budget", "--budget", "3ms"];
    let bare = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"];
    let inside = |words: &[&str]| {
        fenced.says_in(&fenced.fence, fenced.command(words[0], &[]).args(&words[1..]))
    };
    let outside = |words: &[&str]| {
        let output = fenced.command(words[0], &words[1..]).output().unwrap();
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    };
    let resume = [elfen, "resume"];
    for words in [&set[..], &resume] {
        let said = inside(words);
        assert!(said.contains("must not command it"), "{words:?}: {said}");
        let said = outside(&[&bare[..], words].concat());
        assert!(said.contains("only root may do that"), "{words:?}: {said}");
    }
    let said = outside(&set);
    assert!(said.contains("fixed-budget"), "{said}");
}

/// Goal: a fence whose name ends as that of a file that is being written is held like others.
/// Method: such a name; its guard, a pause, and the daemon's death.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_fence_may_be_named_like_a_new_file() {
    require_fences();
    let mut fenced = Fenced::start();
    let settings = fs::read_to_string(fenced.settings_file()).unwrap();
    fenced.end_daemon();
    let renamed = settings.replace("name = \"batch\"", "name = \"batch.new\"");
    fs::write(fenced.settings_file(), renamed).unwrap();
    fenced.restart();
    fenced.wait_until_it_runs();
    let script = format!("{} {SPIN}", fenced.fence.enter_script());
    let mut batch = fenced.command("sh", &["-c", &script]).spawn().unwrap();
    wait_until("a guard", || fenced.guard().is_some());
    assert!(fenced.elfen(&["pause"]).status.success());
    let freezer = fenced.fence.0.freezer();
    assert!(freezer.is_requested().unwrap(), "a pause reaches it");
    assert!(fenced.elfen(&["resume"]).status.success());
    fenced.wait_until_it_runs();
    kill(fenced.daemon.id(), libc::SIGKILL);
    wait_until("freezing it", || freezer.is_requested().unwrap());
    kill(batch.id(), libc::SIGKILL);
    // Keeper and watchdog each freeze it once, when they come to it.
    wait_until("the end of the batch", || {
        freezer.thaw().unwrap();
        batch.try_wait().unwrap().is_some()
    });
    fenced.daemon.wait().unwrap();
    fenced.restart();
}

/// A connection that says nothing.
fn silent(fenced: &Fenced) -> OwnedFd {
    let path = fenced.run_dir().join("elfend.sock");
    let (address, length) = pages::socket_address(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: socket takes numbers.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) };
    assert!(fd >= 0);
    // SAFETY: the kernel has just given us this descriptor.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: the kernel reads `length` bytes of `address`.
    assert_eq!(unsafe { libc::connect(fd, (&raw const address).cast(), length) }, 0);
    socket
}

fn is_open(socket: &OwnedFd) -> bool {
    let mut byte = 0_u8;
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: the kernel writes at most one byte.
    unsafe { libc::recv(socket.as_raw_fd(), (&raw mut byte).cast(), 1, flags) != 0 }
}

/// Goal: connections that say nothing take no places from others. Method: more of them than there
/// are places, then a question; it is answered although the last of them are still open.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn silent_connections_keep_nobody_waiting() {
    require_fences();
    let fenced = Fenced::start();
    for _ in 0..3 {
        let all: Vec<OwnedFd> = (0..100).map(|_| silent(&fenced)).collect();
        assert!(fenced.ask(&Request::Status).is_some());
        let open = all.iter().filter(|socket| is_open(socket)).count();
        assert!(open <= 8, "{open} silent connections of one user are left");
    }
}
