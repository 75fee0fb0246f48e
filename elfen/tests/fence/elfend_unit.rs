//! Tests of elfend as a unit of systemd: its notifications, its command after a kill, and the
//! packaged units and alerts.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::process::Command;

use elfen_machine::process::children;

use super::SPIN;
use super::process::PATIENCE;
use super::stage::{ELFEND, Fenced, NOBODY, comm, kill, wait_until, wait_until_borrowing};

/// The next notification of the daemon.
fn read_notification(socket: &UnixDatagram) -> String {
    let mut text = [0; 256];
    let length = socket.recv(&mut text).expect("a minute is for a machine that is busy");
    String::from_utf8(text[..length].to_vec()).unwrap()
}

/// Goal: elfend notifies its service manager when it is ready, while it is alive, and when it
/// stops. Method: a socket of the test, with each kind of address.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn the_service_manager_is_notified() {
    let mut fenced = Fenced::start();
    let path = fenced.run_dir().join("notify");
    let name = fenced.heavy.name().to_owned();
    let abstract_name = SocketAddr::from_abstract_name(&name).unwrap();
    let sockets = [
        (UnixDatagram::bind(&path).unwrap(), path.display().to_string()),
        (UnixDatagram::bind_addr(&abstract_name).unwrap(), format!("@{name}")),
    ];
    for (socket, address) in sockets {
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        fenced.end_daemon();
        fenced.restart_by(&["env", &format!("NOTIFY_SOCKET={address}")]);
        while read_notification(&socket) != "READY=1" {}
        assert_eq!(
            [read_notification(&socket), read_notification(&socket)],
            ["WATCHDOG=1", "WATCHDOG=1"]
        );
        kill(fenced.daemon.id(), libc::SIGTERM);
        while read_notification(&socket) != "STOPPING=1" {}
        fenced.daemon.wait().unwrap();
    }
}

/// Goal: after all processes of elfend were killed, the unit's next command freezes the fence.
/// Method: kill all processes before one of them can freeze the fence.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn the_command_after_a_kill_freezes_the_fence() {
    let mut fenced = Fenced::start();
    let batch = fenced.batch(&[], NOBODY, SPIN);
    let keeper = fenced.status().guard_process.unwrap();
    let mut processes = children(fenced.daemon.id()).into_iter();
    let watchdog = processes.find(|&child| comm(child) == "elfend-watchdog").unwrap();
    [keeper, watchdog].iter().for_each(|&process| kill(process, libc::SIGSTOP));
    kill(fenced.daemon.id(), libc::SIGKILL);
    kill(watchdog, libc::SIGKILL);
    fenced.daemon.wait().unwrap();
    kill(keeper, libc::SIGKILL);
    wait_until("its end", || !Path::new(&format!("/proc/{keeper}/exe")).exists());
    let freezer = fenced.fence.0.freezer();
    assert!(!freezer.is_requested().unwrap(), "no process of elfend has frozen it");
    assert_eq!(fenced.prints(&[ELFEND, "--freeze"]), "fence \"batch\": frozen\n");
    wait_until("standing still", || freezer.is_frozen().unwrap());
    // This freeze is not a pause: the next daemon thaws the fence.
    fenced.restart();
    fenced.wait_until_running();
    wait_until_borrowing(batch.id());
}

/// Goal: the packaged units are valid. Method: systemd's own check, with the programs of this
/// build. `packaging/test` boots the units.
#[test]
#[ignore = "needs systemd-analyze"]
fn the_packaged_units_are_valid() {
    let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("packaging");
    let folder = tempfile::tempdir().unwrap();
    for unit in ["elfend.service", "elfen.slice"] {
        let text = std::fs::read_to_string(packaging.join(unit)).unwrap();
        let text = text.replace("/usr/bin/elfend", ELFEND);
        std::fs::write(folder.path().join(unit), text).unwrap();
    }
    let mut command = Command::new("systemd-analyze");
    command.args(["verify", "--man=no", "--recursive-errors=no"]);
    let units = ["elfend.service", "elfen.slice"].map(|unit| folder.path().join(unit));
    match command.args(units).output() {
        Ok(output) => {
            let printed = String::from_utf8_lossy(&output.stderr);
            let of_ours = printed.lines().filter(|line| line.contains("elfen"));
            assert_eq!(of_ours.collect::<Vec<_>>(), Vec::<&str>::new());
            assert!(output.status.success(), "{printed}");
        }
        Err(error) => panic!("needs systemd-analyze: {error}"),
    }
}

/// Goal: the packaged alerts are valid, and fire when they should. Method: promtool checks the
/// rules, and tests them on made-up series.
#[test]
#[ignore = "needs promtool"]
fn the_packaged_alerts_are_valid() {
    let rules = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let rules = rules.join("packaging/prometheus");
    let words = [["check", "rules", "elfen.rules.yml"], ["test", "rules", "elfen.rules.test.yml"]];
    for words in words {
        let output = Command::new("promtool").args(words).current_dir(&rules).output();
        let output = output.expect("needs promtool, which Debian has in prometheus");
        assert!(output.status.success(), "{output:?}");
    }
}
