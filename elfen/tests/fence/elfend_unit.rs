//! What a unit of systemd's asks of the daemon.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use elfen_machine::process::children;

use super::SPIN;
use super::stage::{Fenced, NOBODY, comm, kill, ran_ns, require_fences, wait_until};

/// The next thing that the daemon says.
fn said(socket: &UnixDatagram) -> String {
    let mut text = [0; 256];
    let length = socket.recv(&mut text).expect("a minute is for a machine that is busy");
    String::from_utf8(text[..length].to_vec()).unwrap()
}

/// Goal: who started it knows that it is ready, that it lives, and that it stops. Method: a socket
/// of the test's own, by both kinds of name.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn the_service_manager_is_told() {
    require_fences();
    let mut fenced = Fenced::start();
    let path = fenced.run_dir().join("notify");
    let name = fenced.heavy.name().to_owned();
    let abstract_name = SocketAddr::from_abstract_name(&name).unwrap();
    let sockets = [
        (UnixDatagram::bind(&path).unwrap(), path.display().to_string()),
        (UnixDatagram::bind_addr(&abstract_name).unwrap(), format!("@{name}")),
    ];
    for (socket, address) in sockets {
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        fenced.end_daemon();
        fenced.daemon = fenced.daemon_command().env("NOTIFY_SOCKET", address).spawn().unwrap();
        while said(&socket) != "READY=1" {}
        assert_eq!([said(&socket), said(&socket)], ["WATCHDOG=1", "WATCHDOG=1"]);
        fenced.wait_for_socket();
        kill(fenced.daemon.id(), libc::SIGTERM);
        while said(&socket) != "STOPPING=1" {}
        fenced.daemon.wait().unwrap();
    }
}

/// Goal: when all processes of elfend are killed, what the unit runs after them freezes the fence.
/// Method: all killed, so that none of them can; the batch runs on until then.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn what_runs_after_a_kill_freezes() {
    require_fences();
    let mut fenced = Fenced::start();
    fenced.wait_until_it_runs();
    let mut batch = fenced.batch(&[], NOBODY, SPIN);
    let keeper = fenced.status().keeper.unwrap();
    let mut processes = children(fenced.daemon.id()).into_iter();
    let watchdog = processes.find(|&child| comm(child) == "elfend-watchdog").unwrap();
    [keeper, watchdog].iter().for_each(|&process| kill(process, libc::SIGSTOP));
    kill(fenced.daemon.id(), libc::SIGKILL);
    kill(watchdog, libc::SIGKILL);
    fenced.daemon.wait().unwrap();
    kill(keeper, libc::SIGKILL);
    wait_until("its end", || !Path::new(&format!("/proc/{keeper}/exe")).exists());
    let freezer = fenced.fence.0.freezer();
    assert!(!freezer.is_requested().unwrap(), "nobody is left who could");
    let frozen = fenced.command(env!("CARGO_BIN_EXE_elfend"), &["--freeze"]).output().unwrap();
    assert!(frozen.status.success(), "{frozen:?}");
    assert_eq!(String::from_utf8_lossy(&frozen.stdout), "fence \"batch\": frozen\n");
    wait_until("standing still", || freezer.is_frozen().unwrap());
    // It is no pause: the next daemon lets it go.
    let before = ran_ns(batch.id());
    fenced.restart();
    fenced.wait_until_it_runs();
    wait_until("borrowing again", || ran_ns(batch.id()) > before + 2_000_000);
    kill(batch.id(), libc::SIGKILL);
    batch.wait().unwrap();
}

/// Goal: the units are what systemd reads. Method: its own check of units, in a folder where their
/// programs are ours; elsewhere the packages' test has a booted one.
#[test]
#[ignore = "needs systemd-analyze"]
fn the_units_are_read() {
    let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("packaging");
    let folder = tempfile::tempdir().unwrap();
    for unit in ["elfend.service", "elfen.slice"] {
        let text = std::fs::read_to_string(packaging.join(unit)).unwrap();
        let text = text.replace("/usr/bin/elfend", env!("CARGO_BIN_EXE_elfend"));
        std::fs::write(folder.path().join(unit), text).unwrap();
    }
    let mut command = Command::new("systemd-analyze");
    command.args(["verify", "--man=no", "--recursive-errors=no"]);
    let units = ["elfend.service", "elfen.slice"].map(|unit| folder.path().join(unit));
    match command.args(units).output() {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            let of_ours = said.lines().filter(|line| line.contains("elfen"));
            assert_eq!(of_ours.collect::<Vec<_>>(), Vec::<&str>::new());
            assert!(output.status.success(), "{said}");
        }
        Err(error) => panic!("needs systemd-analyze: {error}"),
    }
}

/// Goal: the alerts are what Prometheus reads, and fire when they should. Method: its own check of
/// rules, and of what follows from series.
#[test]
#[ignore = "needs promtool"]
fn the_alerts_are_read() {
    let rules = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let rules = rules.join("packaging/prometheus");
    let words = [["check", "rules", "elfen.rules.yml"], ["test", "rules", "elfen.rules.test.yml"]];
    for words in words {
        let output = Command::new("promtool").args(words).current_dir(&rules).output();
        let output = output.expect("needs promtool, which Debian has in prometheus");
        assert!(output.status.success(), "{output:?}");
    }
}
