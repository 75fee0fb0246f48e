//! Tests of requests to elfend's socket: what it grants, what it refuses, and which clients it
//! drops.

use std::fs;
use std::io::Read;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use elfen_machine::cgroup::{CgroupPath, Group, Hierarchies};
use elfen_machine::fence::status::{Answer, Request, ask};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};
use socket2::{Domain, SockAddr, Socket, Type};

use super::SPIN;
use super::stage::{ELFEN, ELFEND, Fenced, kill, run, wait_until};

const ENTER: &[u8] = b"{\"do\":\"enter\",\"fence\":\"batch\"}";

/// Goal: root may not command elfend from inside a fence, or without capabilities as in a
/// container. Method: both request another budget and the end of a pause. Then root requests the
/// budget outside, and gets it.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn root_commands_elfend_only_from_outside_of_fences() {
    let fenced = Fenced::start();
    let pid = fenced.daemon.id().to_string();
    let set = [ELFEN, "set", &pid, "--policy", "fixed-budget", "--budget", "3ms"];
    let bare = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"];
    for words in [&set[..], &[ELFEN, "resume"]] {
        let mut inside = fenced.fence.command(words);
        let printed = run(inside.env("ELFEN_RUN_DIR", fenced.run_dir())).1;
        assert!(printed.contains("may not control the fence"), "{words:?}: {printed}");
        fenced.ends(&[&bare[..], words].concat(), 1, "only root may do that");
    }
    fenced.ends(&set, 0, "fixed-budget");
}

/// Goal: a fence may have a name that ends like a record that is being written. Method: such a
/// name; its guard, a pause, and the daemon's death.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn the_name_of_a_fence_may_end_like_an_unfinished_record() {
    let mut fenced = Fenced::start();
    fenced.end_daemon();
    let renamed = fenced.settings().replace("name = \"batch\"", "name = \"batch.new\"");
    fs::write(fenced.settings_file(), renamed).unwrap();
    fenced.restart();
    fenced.wait_until_running();
    let mut batch = fenced.fence.start(&["sh", "-c", SPIN]);
    wait_until("a guard", || fenced.guard().is_some());
    fenced.prints(&[ELFEN, "pause"]);
    let freezer = fenced.fence.0.freezer();
    assert!(freezer.is_requested().unwrap(), "a pause reaches it");
    fenced.prints(&[ELFEN, "resume"]);
    fenced.wait_until_running();
    kill(fenced.daemon.id(), libc::SIGKILL);
    wait_until("the freeze", || freezer.is_requested().unwrap());
    kill(batch.id(), libc::SIGKILL);
    // The guard process and the watchdog may each freeze the fence once, at any time.
    wait_until("the end of the batch", || {
        freezer.thaw().unwrap();
        batch.try_wait().unwrap().is_some()
    });
    fenced.daemon.wait().unwrap();
    fenced.restart();
}

fn new_socket() -> Socket {
    Socket::new(Domain::UNIX, Type::SEQPACKET, None).unwrap()
}

/// A connection that sends nothing.
fn connect(fenced: &Fenced) -> Socket {
    let socket = new_socket();
    socket.connect(&SockAddr::unix(fenced.socket()).unwrap()).unwrap();
    socket
}

/// Whether elfend has kept the connection open.
fn is_open(socket: &Socket) -> bool {
    socket.set_nonblocking(true).unwrap();
    !matches!(socket.peek(&mut [MaybeUninit::uninit()]), Ok(0))
}

/// Goal: silent connections do not keep other clients waiting. Method: more such connections than
/// elfend accepts, then a request. It is answered while the last of them are still open.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn silent_connections_do_not_delay_other_clients() {
    let fenced = Fenced::start();
    for _ in 0..3 {
        let all: Vec<Socket> = (0..100).map(|_| connect(&fenced)).collect();
        assert!(fenced.ask(&Request::Status).is_some());
        let open = all.iter().filter(|socket| is_open(socket)).count();
        assert!(open <= 8, "{open} silent connections of one user are left");
    }
}

/// Connects and sends these bytes. `None` if the kernel refuses them.
fn send(fenced: &Fenced, bytes: &[u8]) -> Option<Socket> {
    let socket = connect(fenced);
    socket.send(bytes).is_ok().then_some(socket)
}

fn receive_answer(mut socket: &Socket) -> String {
    let mut text = vec![0; 1 << 16];
    let length = socket.read(&mut text).unwrap();
    text.truncate(length);
    String::from_utf8(text).unwrap()
}

/// Goal: no request ends the daemon. Method: truncated requests, long requests, and connections
/// without a request; also a file in the place of the socket.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn invalid_requests_are_refused() {
    let mut fenced = Fenced::start();
    for bytes in [&b"{\"do\":\"sta"[..], b"[]", b"\xff\xfe", b"{}"] {
        let answer = receive_answer(&send(&fenced, bytes).unwrap());
        assert!(answer.contains("invalid request"), "{answer}");
    }
    let long = receive_answer(&send(&fenced, &[b' '; 5000]).unwrap());
    assert!(long.contains("at most 4096 bytes"), "{long}");
    assert!(send(&fenced, &vec![b' '; 1 << 20]).is_none(), "the kernel refuses it");
    // elfend closes silent connections after a while, and then accepts others.
    let silent: Vec<_> = (0..100).map(|_| send(&fenced, b"")).collect();
    wait_until("an answer in a crowd", || fenced.ask(&Request::Status).is_some());
    drop(silent);
    let refused = fenced.ask(&Request::Enter { fence: "none".to_owned() });
    assert!(matches!(refused, Some(Answer::Refused { .. })), "{refused:?}");
    assert_eq!(fenced.daemon.try_wait().unwrap(), None, "{}", fenced.log());

    // elfend does not remove a file that is not a socket.
    fenced.end_daemon();
    let socket = fenced.socket();
    fs::write(&socket, "mine").unwrap();
    let script = format!("{} exec {ELFEND}", fenced.home.enter_script());
    fenced.ends(&["sh", "-c", &script], 1, "is not a socket");
    assert_eq!(fs::read(&socket).unwrap(), b"mine");
}

/// Goal: clients that end before their answer leave no descriptors behind, and any number of other
/// clients is answered. Method: 10,000 connections of each kind, one after the other or at once.
/// Compare the daemon's descriptors before and after.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn many_clients_leave_no_descriptors_behind() {
    let fenced = Fenced::start();
    let open = || fs::read_dir(format!("/proc/{}/fd", fenced.daemon.id())).unwrap().count();
    let rest = || std::thread::sleep(std::time::Duration::from_millis(10));
    let before = (0..20).map(|_| (rest(), open()).1).min().unwrap();
    for bytes in [&b""[..], b"{\"do\":\"status\"}", b"{\"do\":\"enter\",\"fence\":\"none\"}"] {
        (0..10_000).for_each(|_| drop(send(&fenced, bytes).unwrap()));
    }
    let socket = fenced.socket();
    let count_answers = || (0..100).filter(|_| ask(&socket, &Request::Status).is_ok()).count();
    let answered: usize = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..100).map(|_| scope.spawn(count_answers)).collect();
        clients.into_iter().map(|client| client.join().unwrap()).sum()
    });
    assert_eq!(answered, 10_000);
    wait_until("the end of all connections", || open() <= before);
    assert_eq!(fenced.fence().frozen, None);
}

/// Opens a connection whose client process requests to enter the fence and then ends. This process
/// keeps the connection open.
fn request_and_exit(fenced: &Fenced) -> Socket {
    let (socket, address) = (new_socket(), SockAddr::unix(fenced.socket()).unwrap());
    // SAFETY: the child makes only system calls, on its copy of this memory.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            let sent = socket.connect(&address).and_then(|()| socket.send(ENTER));
            // SAFETY: _exit takes a number.
            unsafe { libc::_exit(i32::from(sent.is_err())) }
        }
        ForkResult::Parent { child } => {
            assert_eq!(waitpid(child, None), Ok(WaitStatus::Exited(child, 0)));
        }
    }
    socket
}

/// Whether the kernel returns a descriptor of the process at the other end (SO_PEERPIDFD).
fn has_peer_pidfd() -> bool {
    let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let (mut process, mut length) = (-1_i32, 4);
    // SAFETY: the kernel writes at most four bytes.
    let got = unsafe {
        let value = (&raw mut process).cast();
        libc::getsockopt(one.as_raw_fd(), libc::SOL_SOCKET, 77, value, &raw mut length)
    };
    // SAFETY: the kernel has just returned this descriptor, and nothing else closes it.
    (got == 0).then(|| drop(unsafe { OwnedFd::from_raw_fd(process) })).is_some()
}

/// Goal: elfend does not put a process into a fence if its client has ended, because the id may
/// belong to another process by then. Method: while the daemon is stopped, this process sends a
/// request and closes its connection. A child sends one and ends, with its connection left open.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_client_that_has_gone_enters_no_fence() {
    let fenced = Fenced::start();
    kill(fenced.daemon.id(), libc::SIGSTOP);
    drop(send(&fenced, ENTER).unwrap());
    kill(fenced.daemon.id(), libc::SIGCONT);
    // elfend answers requests in order, so it has already handled the first request.
    let processes = fenced.fence().processes;
    let own = std::process::id();
    let inside = fenced.fence.0.holds(own).unwrap();
    if inside {
        Group::new(&Hierarchies::read().unwrap(), CgroupPath::root()).add_process(own).unwrap();
    }
    assert!(!inside && processes == 0, "{processes}");

    if has_peer_pidfd() {
        kill(fenced.daemon.id(), libc::SIGSTOP);
        let open = request_and_exit(&fenced);
        kill(fenced.daemon.id(), libc::SIGCONT);
        let answer = receive_answer(&open);
        assert!(answer.contains("the requesting process has ended"), "{answer}");
    }
}
