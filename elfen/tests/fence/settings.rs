//! Tests of settings that change while the daemon runs, and of services that are confined to their
//! request lanes.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};

use elfen_machine::process::children;
use elfen_rt::service::Service;

use super::SPIN;
use super::stage::{
    ELFEN, ELFEND, Fenced, KilledOnDrop, NOBODY, OwnCgroup, comm, kill, settings, wait_until,
    wait_until_borrowing,
};

/// The variable that makes this test program a service; its value names the page.
const PUBLISHES: &str = "FENCE_TEST_PUBLISHES";

fn allowed_cpus(process: u32) -> String {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    line.unwrap_or_default().trim().to_owned()
}

/// Starts a service that pins itself to the batch lane.
fn start_pinned(cgroup: &OwnCgroup) -> KilledOnDrop {
    let child = cgroup.start(&["taskset", "-c", "1", "sh", "-c", SPIN]);
    wait_until("a service", || allowed_cpus(child.id()) == "1");
    child
}

fn taskset(cpu: &str, process: u32) -> bool {
    let mut command = Command::new("taskset");
    command.args(["-pc", cpu, &process.to_string()]).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().unwrap().success()
}

/// Goal: a service with `confine` runs only on its request lane, even if it sets another affinity.
/// SIGHUP with other settings, or `--release`, ends the confinement. Method: a service that pins
/// itself to the batch lane, and its affinity as the kernel reports it.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_service_is_confined_to_its_request_lane() {
    let mut fenced = Fenced::start();
    let place = fenced.heavy.child("service");
    place.0.make().unwrap();
    let service = start_pinned(&place);
    let all = place.0.effective_cpus().unwrap();
    let more = format!("lanes = \"0:1\"\ncgroup = \"{}\"\nconfine = true", place.name());
    let confining = fenced.settings().replacen("lanes = \"0:1\"", &more, 1);
    for round in 1..=2 {
        fenced.reload(&confining);
        wait_until("its request lane", || allowed_cpus(service.id()) == "0");
        assert!(!taskset("1", service.id()), "it cannot return to the batch lane");
        wait_until("the report", || !fenced.status().confined.is_empty());
        place.0.keep_to_parent().unwrap();
        wait_until("being put back", || allowed_cpus(service.id()) == "0");
        wait_until("counting it", || fenced.status().confined[0].repaired == 1);
        let counted = format!(
            "elfen_service_confined_repaired_total{{service=\"{}\",cgroup=\"/{}\"}} 1\n",
            fenced.heavy.name(),
            place.name()
        );
        fenced.ends(&[ELFEN, "metrics", "--once"], 0, &counted);
        fenced.ends(&[ELFEN, "status"], 0, &format!("/{} on CPUs 0", place.name()));
        fenced.wait_until_running();
        if round == 1 {
            fenced.reload(&fenced.settings());
            wait_until("the end of the confinement", || place.0.effective_cpus().unwrap() == all);
            assert_eq!(fenced.status().confined, []);
            assert!(taskset("1", service.id()));
        }
    }
    let printed = fenced.check();
    assert!(printed.contains(&format!("cgroup /{}: ", place.name())), "{printed}");
    assert!(printed.contains("limited to CPUs 0"), "{printed}");

    // The confinement stays after a stop of elfend, and the next start finds it.
    fenced.end_daemon();
    assert_eq!(allowed_cpus(service.id()), "0");
    fenced.restart();
    wait_until("finding it", || !fenced.status().confined.is_empty());
    fenced.end_daemon();
    fenced.ends(&[ELFEND, "--release"], 0, "may run on all CPUs");
    assert_eq!(place.0.effective_cpus().unwrap(), all);
    assert!(taskset("1", service.id()));
}

/// Goal: invalid settings change nothing. A fence with a new name stays the same fence. A fence
/// that is no longer listed becomes an ordinary cgroup. Method: SIGHUP, with a batch inside.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn sighup_reloads_the_settings() {
    let fenced = Fenced::start();
    let batch = fenced.batch(&[], NOBODY, SPIN);
    wait_until_borrowing(batch.id());
    let usual = fenced.settings();
    let keeper = fenced.status().guard_process;
    let wrong = [
        ("no file", String::new(), "names lanes to lend"),
        ("a lane of two", usual.replace("0:1", "0:1,0:2"), "named twice"),
        ("too far", usual.replace(fenced.fence.name(), "a/b"), "do not outrank"),
    ];
    for (what, text, why) in wrong {
        fenced.reload(&text);
        let log_has = |text: &str| fenced.log().contains(text);
        wait_until(what, || log_has("the settings are unchanged") && log_has(why));
        assert_eq!(
            (fenced.status().guard_process, fenced.fence().frozen),
            (keeper, None),
            "{what}"
        );
    }
    wait_until_borrowing(batch.id());

    fenced.reload(&usual.replace("\"batch\"", "\"night\""));
    wait_until("its new name", || fenced.fence().name == "night");
    fenced.wait_until_running();
    assert_ne!(fenced.status().guard_process, keeper, "other guards");
    assert_eq!(fenced.fence().repaired, []);
    wait_until_borrowing(batch.id());
    fenced.prints(&[ELFEN, "pause"]);
    fenced.ends(&[ELFEN, "resume"], 0, "resumed: night");

    let other = fenced.heavy.child("other");
    fenced.reload(&usual.replace(fenced.fence.name(), other.name()));
    wait_until("another fence", || fenced.fence().path == other.0.path);
    let group = &fenced.fence.0;
    assert!(!group.rank().unwrap().idle && !group.freezer().is_requested().unwrap());
    assert_eq!(group.effective_cpus().unwrap(), group.parent().effective_cpus().unwrap());
    wait_until_borrowing(batch.id());
}

/// The metrics at an address; `None` if no process serves them.
fn scrape(address: SocketAddr) -> Option<String> {
    let mut client = TcpStream::connect(address).ok()?;
    client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").ok()?;
    let mut text = String::new();
    client.read_to_string(&mut text).ok()?;
    Some(text)
}

/// Goal: elfend serves metrics only at the address in its settings, by a process that it replaces
/// after its end. An address that is in use changes nothing. Method: settings with and without an
/// address, a client, and a kill of the serving process.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn metrics_are_served_at_the_address_of_the_settings() {
    let fenced = Fenced::start();
    let usual = fenced.settings();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let served = format!("metrics = \"{address}\"\n{usual}");
    fenced.reload(&served);
    let stays = || fenced.log().contains("the settings are unchanged: metrics at");
    wait_until("refusing it", stays);
    drop(taken);
    fenced.reload(&served);
    let prints = |line: &str| scrape(address).is_some_and(|text| text.contains(line));
    wait_until("a scrape", || prints("elfen_elfend_up 1\n"));
    wait_until("its fence", || {
        prints("elfen_fence_holds{fence=\"batch\",guarantee=\"place\"} 1\n")
    });
    assert!(prints("elfen_confinement{level=\"fence\"} 1\n"), "{:?}", scrape(address));
    assert!(prints("elfen_lane_offline{cpu=\"1\"} 0\n"), "{:?}", scrape(address));
    let children = || children(fenced.daemon.id());
    let keeper = fenced.status().guard_process.unwrap();
    let is_server = |child: &u32| *child != keeper && comm(*child) != "elfend-watchdog";
    let [server] = *children().into_iter().filter(is_server).collect::<Vec<_>>() else {
        panic!("{:?}", children())
    };
    kill(server, libc::SIGKILL);
    wait_until("another server", || children().iter().all(|child| *child != server));
    wait_until("a scrape", || prints("elfen_elfend_up 1\n"));
    assert_eq!(fenced.fence().frozen, None);
    // A watchdog that starts now inherits the listening socket.
    let watchdog = || children().into_iter().find(|child| comm(*child) == "elfend-watchdog");
    let first = watchdog().unwrap();
    kill(first, libc::SIGKILL);
    wait_until("another watchdog", || watchdog().is_some_and(|second| second != first));
    fenced.reload(&usual);
    wait_until("its end", || TcpStream::connect(address).is_err());
    fenced.reload(&served);
    wait_until("a scrape", || prints("elfen_elfend_up 1\n"));
}

/// Runs before the test runner, so that a process that was started as a service runs no tests.
#[used]
#[unsafe(link_section = ".init_array")]
static PUBLISH_IF_ASKED: extern "C" fn() = publish_if_asked;

/// If the variable is set, publishes until this process is killed.
extern "C" fn publish_if_asked() {
    let Ok(name) = std::env::var(PUBLISHES) else { return };
    let service = Service::open_with_mode(&name, 1, 0o644).unwrap();
    let _worker = service.claim(0, 0).unwrap();
    loop {
        std::thread::park();
    }
}

/// Goal: a fence that contains a process of the service is refused. Method: a process that
/// publishes, in a cgroup that the settings list as a fence.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_fence_with_its_service_inside_is_refused() {
    let fenced = Fenced::start();
    let own = fenced.heavy.child("service");
    own.0.make().unwrap();
    let page = format!("{}-x", fenced.heavy.name());
    let test = std::env::current_exe().unwrap();
    let mut service = own.command(&[test.to_str().unwrap()]);
    let service = service.env(PUBLISHES, &page).stdout(Stdio::null()).spawn().unwrap();
    let service = KilledOnDrop(service);
    fs::write(fenced.settings_file(), settings(&page, own.name())).unwrap();
    let why = format!("holds process {} of service", service.id());
    wait_until("refusing it", || fenced.check().contains(&why));
    drop(service);
    assert!(fenced.check().contains("fence \"batch\": cgroup"), "{}", fenced.check());
    Service::open_with_mode(&page, 1, 0o644).unwrap().remove().unwrap();
}
