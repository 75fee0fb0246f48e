//! What a fence does not take: settings, users, requests that make no sense. Each is one line, and
//! changes nothing.

use std::fs;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use elfen_machine::cgroup::{CgroupPath, Group, Hierarchies};
use elfen_machine::fence::status::{Answer, Request, address, ask};

use super::stage::{Fenced, NOBODY, Own, kill, require_fences, settings, wait_until};

/// Goal: settings that cannot be held are refused before anything is made, whether they are only
/// checked or not. Method: one mistake each.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn settings_that_cannot_be_held() {
    require_fences();
    let fenced = Fenced::start();
    let (file, other) = (fenced.run_dir().join("other.toml"), fenced.run_dir().join("other"));
    let elfend = |text: &str, words: &[&str]| {
        fs::write(&file, text).unwrap();
        let mut command = fenced.command(env!("CARGO_BIN_EXE_elfend"), words);
        let output = command.arg("--settings").arg(&file).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.lines().count() <= 1 && !said.contains("panicked"), "{said}");
        (output.status.code(), said)
    };
    let own = Own::new("refused");
    let deep = format!("{}/b/c", own.name());
    let in_unit =
        |unit: &str| settings("s", "x").replace("cgroup = \"x\"", &format!("unit = \"{unit}\""));
    let fence = |cgroup: &str| {
        format!("{}[[fence]]\nname = \"b\"\ncgroup = \"{cgroup}\"\n", settings("s", "a/x"))
    };
    let another = |lanes: &str| {
        let service = format!("[[service]]\nname = \"t\"\nlanes = \"{lanes}\"\n[[fence]]");
        settings("s", "x").replace("[[fence]]", &service)
    };
    let cases = [
        (settings("s", "/"), 2, "the root holds everything"),
        (settings("s", "system.slice"), 2, "must never be frozen"),
        (settings("s", "a/../b"), 2, "invalid cgroup path"),
        (settings("s", &deep), 2, "guards do not outrank"),
        (fence("a/x/y"), 2, "one is inside of the other"),
        (fence("b/x"), 2, "no place outranks both /b/x and /a/x"),
        (another("0:3"), 2, "CPU 0 is named twice"),
        (another("1:2"), 2, "CPU 1 is named twice"),
        (settings("s", "x").replace("0:1", ""), 2, "the list of pairs is empty"),
        (settings("s", "x").replace("lanes", "lane"), 2, "unknown field"),
        (in_unit("a\\nb.slice"), 2, "invalid unit name"),
        (in_unit("elfen.slice"), 3, "requires systemd"),
    ];
    for (text, status, why) in cases {
        if why == "requires systemd" && elfen_machine::systemd::is_running() {
            continue;
        }
        for words in [&["--check"][..], &["--run-dir", other.to_str().unwrap()]] {
            let (found, said) = elfend(&text, words);
            assert!(found == Some(status) && said.contains(why), "{why}: {found:?} {said}");
        }
    }
    assert!(!own.0.exists() && !other.exists());
    own.0.make().unwrap();
    fs::write(&file, settings("s", own.name())).unwrap();
    let check = |by: &[&str], script: &str, words: &[&str]| {
        let mut command = fenced.command(by[0], &[&by[1..], &["sh", "-c", script], words].concat());
        let output = command.env("ELFEN_SETTINGS", &file).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), said)
    };
    let check_in = |home: &Own| {
        format!("{} exec {} --check", home.enter_script(), env!("CARGO_BIN_EXE_elfend"))
    };
    let (status, said) = check(&["env"], &check_in(&own), &[]);
    assert!(status == Some(2) && said.contains("holds elfend"), "{said}");
    let first = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"];
    let script = format!("{} sh -c \"$0\"; exit $?", own.enter_script());
    let (status, said) = check(&first, &script, &[&check_in(&fenced.home)]);
    assert!(status == Some(2) && said.contains("holds the first process"), "{said}");

    let (status, said) = elfend(&settings("s", "x"), &[]);
    assert!(status == Some(1) && said.contains("another elfend"), "{said}");
    let (status, said) = elfend(&settings("s", "x"), &["--release"]);
    assert!(status == Some(1) && said.contains("stop it first"), "{said}");
}

/// Goal: a machine that cannot hold a fence is told so, with what it lacks, and a run without one
/// says its level, and runs. Method: one without any cgroups, and one without those of CPUs, as the
/// daemon and the command see them.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_machine_without_cgroups() {
    require_fences();
    let mut fenced = Fenced::start();
    fenced.end_daemon();
    let cpusets = "/sys/fs/cgroup/cpuset";
    // Of version 2 they are not mounted apart: a guest has a kernel without them.
    let apart = Path::new(cpusets).join("cpuset.cpus").exists();
    let machines = [("/sys/fs/cgroup", "cpu"), (cpusets, "cpuset")];
    for (mounted, lacks) in machines.into_iter().take(1 + usize::from(apart)) {
        let bare = |words: &str| {
            let script = format!("umount -R {mounted} && exec {words}");
            let mut command = fenced.command("unshare", &["--mount", "sh", "-c", &script]);
            let output = command.output().unwrap();
            let said = [output.stdout, output.stderr].concat();
            (output.status.code(), String::from_utf8_lossy(&said).into_owned())
        };
        let why = format!("no hierarchy here has the {lacks} controller");
        for option in ["--check", ""] {
            let (status, said) = bare(&format!("{} {option}", env!("CARGO_BIN_EXE_elfend")));
            assert!(status == Some(3) && said.contains(&why), "{status:?} {said}");
        }
        let report = fenced.run_dir().join("report");
        let run = format!(
            "{} run --lanes 0:1 --signal service --service {} --report {} -- sh -c 'exit 7'",
            env!("CARGO_BIN_EXE_elfen"),
            fenced.heavy.name(),
            report.display()
        );
        let (status, said) = bare(&run);
        assert!(status == Some(7) && said.contains("level affinity"), "{status:?} {said}");
        let report = fs::read_to_string(&report).unwrap();
        assert!(report.contains("\"level\": \"affinity\""), "{report}");
    }
}

/// Goal: a program that has more rights than its user asks for no fence in root's name. Method:
/// `elfen` with the bit of root's, started by nobody.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_setuid_program_is_not_its_user() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_it_runs();
    let elfen = fenced.copy(Path::new(env!("CARGO_BIN_EXE_elfen")));
    fs::set_permissions(&elfen, fs::Permissions::from_mode(0o4755)).unwrap();
    let nobody = ["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", &elfen];
    let mut command = fenced.command("setpriv", &nobody);
    let output = command.args(["run", "--fence", "batch", "--", "true"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("name another user"), "{said}");
    assert_eq!(fenced.fence().processes, 0);
}

/// Goal: who may not, is told so. Method: nobody, and root without a user.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn users_who_may_not() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_it_runs();
    let elfen = fenced.copy(Path::new(env!("CARGO_BIN_EXE_elfen")));
    let nobody = ["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"];
    let as_nobody = |words: &[&str]| {
        let mut command = fenced.command("setpriv", &nobody);
        let output = command.arg(&elfen).args(words).current_dir("/").output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (status, said) = as_nobody(&["run", "--fence", "batch", "--", "true"]);
    assert!(status == Some(1) && said.contains("group elfen"), "{said}");
    let (status, said) = as_nobody(&["pause"]);
    assert!(status == Some(1) && said.contains("run it as root"), "{said}");
    let (status, said) = as_nobody(&["resume"]);
    assert!(status == Some(1) && said.contains("only root may do that"), "{said}");
    let (status, said) = as_nobody(&["status"]);
    assert_eq!(status, Some(0), "{said}");

    let said_to_root = |words: &[&str]| {
        let output = fenced.elfen(words);
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (status, said) = said_to_root(&["run", "--fence", "batch", "--", "true"]);
    assert!(status == Some(2) && said.contains("can leave its fence"), "{said}");
    let user = ["run", "--user", NOBODY, "--fence"];
    let (status, said) = said_to_root(&[&user[..], &["other", "--", "true"]].concat());
    assert!(status == Some(2) && said.contains("name one of: batch"), "{said}");
    let lanes = ["batch", "--lanes", "0:1", "--", "true"];
    let (status, said) = said_to_root(&[&user[..], &lanes].concat());
    assert!(status == Some(2) && said.contains("cannot be used with"), "{said}");
    let (status, _) = said_to_root(&[&user[..], &["batch", "--", "sh", "-c", "exit 7"]].concat());
    assert_eq!(status, Some(7), "the program's own");
    let (status, _) = said_to_root(&[&user[..], &["batch", "--", "/no/such"]].concat());
    assert_eq!(status, Some(127));
    // From inside of a fence.
    let script = format!("{elfen} run --fence batch --user {NOBODY} -- true");
    let inner = [&["run", "--user", "root", "--fence", "batch", "--", "sh", "-c"], &[&*script][..]];
    let (status, said) = said_to_root(&inner.concat());
    assert!(status == Some(1) && said.contains("is in fence \"batch\" already"), "{said}");
}

/// A connection that has sent these bytes.
fn sent(fenced: &Fenced, bytes: &[u8]) -> Option<OwnedFd> {
    let (address, length) = address(&fenced.run_dir().join("elfend.sock")).unwrap();
    // SAFETY: socket takes numbers.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) };
    assert!(fd >= 0);
    // SAFETY: the kernel has just given us this descriptor.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: the kernel reads `length` bytes of `address`.
    let connected = unsafe { libc::connect(fd, (&raw const address).cast(), length) };
    assert_eq!(connected, 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the kernel reads `bytes`.
    let sent = unsafe { libc::send(fd, bytes.as_ptr().cast(), bytes.len(), libc::MSG_NOSIGNAL) };
    (sent >= 0).then_some(socket)
}

fn answer(socket: &OwnedFd) -> String {
    let mut text = vec![0_u8; 1 << 16];
    // SAFETY: the kernel writes at most `text.len()` bytes into `text`.
    let got = unsafe { libc::recv(socket.as_raw_fd(), text.as_mut_ptr().cast(), text.len(), 0) };
    text.truncate(usize::try_from(got).unwrap());
    String::from_utf8(text).unwrap()
}

/// Goal: nothing that is sent stops the daemon. Method: halves, lengths, and who says nothing.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn requests_that_make_no_sense() {
    require_fences();
    let mut fenced = Fenced::start();
    for bytes in [&b"{\"do\":\"sta"[..], b"[]", b"\xff\xfe", b"{}"] {
        let said = answer(&sent(&fenced, bytes).unwrap());
        assert!(said.contains("invalid request"), "{said}");
    }
    let long = answer(&sent(&fenced, &[b' '; 5000]).unwrap());
    assert!(long.contains("at most 4096 bytes"), "{long}");
    assert!(sent(&fenced, &vec![b' '; 1 << 20]).is_none(), "the kernel refuses it");
    // Who connects and says nothing is closed after a while, and others have their turn.
    let silent: Vec<_> = (0..100).map(|_| sent(&fenced, b"")).collect();
    wait_until("an answer in a crowd", || fenced.ask(&Request::Status).is_some());
    drop(silent);
    let refused = fenced.ask(&Request::Enter { fence: "none".to_owned() });
    assert!(matches!(refused, Some(Answer::Refused { .. })), "{refused:?}");
    assert_eq!(fenced.daemon.try_wait().unwrap(), None, "{}", fenced.said());

    // What is no socket is not removed.
    fenced.end_daemon();
    let socket = fenced.run_dir().join("elfend.sock");
    fs::write(&socket, "mine").unwrap();
    let script = format!("{} exec \"$0\"", fenced.home.enter_script());
    let elfend = env!("CARGO_BIN_EXE_elfend");
    let output = fenced.command("sh", &["-c", &script, elfend]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("no socket"), "{said}");
    assert_eq!(fs::read(&socket).unwrap(), b"mine");
}

/// Goal: however many ask, one after the other or at once, and die before they are answered, those
/// that live are answered, and nothing of the others stays. Method: 10,000 connections of each
/// kind, and the daemon's descriptors before and after.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn crowds_leave_nothing_behind() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_it_runs();
    let open = || fs::read_dir(format!("/proc/{}/fd", fenced.daemon.id())).unwrap().count();
    let rest = || std::thread::sleep(std::time::Duration::from_millis(10));
    let before = (0..20).map(|_| (rest(), open()).1).min().unwrap();
    for bytes in [&b""[..], b"{\"do\":\"status\"}", b"{\"do\":\"enter\",\"fence\":\"none\"}"] {
        (0..10_000).for_each(|_| drop(sent(&fenced, bytes).unwrap()));
    }
    let socket = fenced.run_dir().join("elfend.sock");
    let asks = || (0..100).filter(|_| ask(&socket, &Request::Status).is_ok()).count();
    let answered: usize = std::thread::scope(|scope| {
        let crowd: Vec<_> = (0..100).map(|_| scope.spawn(asks)).collect();
        crowd.into_iter().map(|one| one.join().unwrap()).sum()
    });
    assert_eq!(answered, 10_000);
    wait_until("having closed them all", || open() <= before);
    assert_eq!(fenced.fence().frozen, None);
}

/// A connection by a process that asks for a fence and ends, but for whose end of it this has now.
fn left_open(fenced: &Fenced) -> OwnedFd {
    let (address, length) = address(&fenced.run_dir().join("elfend.sock")).unwrap();
    // SAFETY: socket takes numbers.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) };
    assert!(fd >= 0);
    // SAFETY: the kernel has just given us this descriptor.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let request = b"{\"do\":\"enter\",\"fence\":\"batch\"}";
    // SAFETY: the child makes system calls alone, on memory that it has a copy of.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: the kernel reads `length` bytes of `address`.
        unsafe { libc::connect(fd, (&raw const address).cast(), length) };
        let (at, bytes) = (request.as_ptr().cast(), request.len());
        // SAFETY: the kernel reads `request`.
        unsafe { libc::send(fd, at, bytes, libc::MSG_NOSIGNAL) };
        // SAFETY: takes a number. The child ends without a word.
        unsafe { libc::_exit(0) };
    }
    // SAFETY: waits for the child, and writes nothing.
    assert_eq!(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }, child);
    socket
}

/// Whether the kernel hands out the process at the other end of a socket.
fn has_peers() -> bool {
    let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let (mut process, mut length) = (-1_i32, 4);
    // SAFETY: the kernel writes four bytes at most.
    let got = unsafe {
        let value = (&raw mut process).cast();
        libc::getsockopt(one.as_raw_fd(), libc::SOL_SOCKET, 77, value, &raw mut length)
    };
    // SAFETY: the kernel has given us this descriptor.
    (got == 0).then(|| drop(unsafe { OwnedFd::from_raw_fd(process) })).is_some()
}

/// Goal: a process that asks to be put into a fence and is gone before it is, is not: its id may be
/// another's by then. Method: this process asks and hangs up, while the daemon stands still;
/// another one asks and ends, and leaves the connection open.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn who_is_gone_is_put_nowhere() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_it_runs();
    kill(fenced.daemon.id(), libc::SIGSTOP);
    drop(sent(&fenced, b"{\"do\":\"enter\",\"fence\":\"batch\"}").unwrap());
    kill(fenced.daemon.id(), libc::SIGCONT);
    // What was asked later is answered later.
    let processes = fenced.fence().processes;
    let own = std::process::id();
    let inside = fenced.fence.0.holds(own).unwrap();
    if inside {
        Group::new(&Hierarchies::read().unwrap(), CgroupPath::root()).add_process(own).unwrap();
    }
    assert!(!inside && processes == 0, "{processes}");

    if has_peers() {
        kill(fenced.daemon.id(), libc::SIGSTOP);
        let open = left_open(&fenced);
        kill(fenced.daemon.id(), libc::SIGCONT);
        let said = answer(&open);
        assert!(said.contains("the process that asked is gone"), "{said}");
    }
}

/// Goal: without root, elfend says what it takes. Method: nobody, and Ctrl-C to one that runs.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn elfend_without_root_and_by_ctrl_c() {
    require_fences();
    let mut fenced = Fenced::start();
    let elfend = fenced.copy(Path::new(env!("CARGO_BIN_EXE_elfend")));
    for words in [&[][..], &["--release"]] {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"]).arg(&elfend);
        let file = fenced.run_dir().parent().unwrap().join("elfend.toml");
        let output = command.args(words).env("ELFEN_SETTINGS", file).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && said.contains("only root"), "{said}");
    }
    kill(fenced.daemon.id(), libc::SIGINT);
    assert!(fenced.daemon.wait().unwrap().success());
    assert!(!fenced.run_dir().join("elfend.sock").exists());
}
