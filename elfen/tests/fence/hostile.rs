//! What a program in a fence can do to get out.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::time::{Duration, Instant};

use elfen_machine::fence::status::Frozen;

use super::SPIN;
use super::stage::{Fenced, NOBODY, comm, kill, ran_ns, require_fences, wait_until};

/// A name, what to type, and what the shell says of it. `$ROOT` is the root of the cgroups.
const ATTEMPTS: [(&str, &str); 8] = [
    ("affinity", "taskset -pc 0 $$"),
    ("affinity of a child", "taskset -c 0 true"),
    ("a class above", "chrt -f 1 true"),
    ("nice -20", "nice -n -20 true"),
    ("leaving", "echo $$ >$ROOT/cgroup.procs"),
    ("a cgroup of its own", "mkdir $ROOT/elfen-test-hostile"),
    ("wider lanes", "echo 0 >$FENCE/cpuset.cpus"),
    ("thawing", "echo THAWED >$FENCE/freezer.state || echo 0 >$FENCE/cgroup.freeze"),
];

/// For how long it is looked where its processes are, at least.
const SAMPLED: Duration = Duration::from_secs(2);

/// The CPU that a process ran on last.
pub(crate) fn cpu_of(process: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(36)?.parse().ok()
}

/// Goal: an outsider's program spends no sampled instant outside its lanes, whatever it tries.
/// Method: attempts by a user who has nothing, in sessions and processes of their own, and a
/// sampler; and the same user outside of the fence, whose first attempt works.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn an_outsider_stays_on_its_lanes() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_it_runs();
    let folders = fenced.fence.0.folders();
    let attempts: String = ATTEMPTS
        .iter()
        .map(|(name, what)| format!("({what}) >/dev/null 2>&1; echo \"{name}: $?\";"))
        .collect();
    let orphans = format!("for i in 1 2 3; do (setsid sh -c '{SPIN}' &) & done;");
    let script = |folder: &std::path::Path| {
        let root = folder.parent().and_then(std::path::Path::parent).unwrap().display();
        let fence = folder.display();
        format!("ROOT={root} FENCE={fence}; {attempts}")
    };
    let all: String = folders.iter().map(|folder| script(folder)).collect();
    let script = format!("{all} {orphans} echo done; {SPIN}");
    let mut batch = fenced.batch(&[], NOBODY, &script);
    let mut tried = 0;
    for line in BufReader::new(batch.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        if line == "done" {
            break;
        }
        println!("{line}");
        let (name, status) = line.rsplit_once(": ").unwrap();
        // `nice` says that it may not, and runs the program as it is.
        assert!(status != "0" || name == "nice -20", "{line}");
        tried += 1;
    }
    assert_eq!(tried, ATTEMPTS.len() * folders.len());
    let inside = || fenced.fence.0.processes().unwrap();
    wait_until("the orphans", || inside().len() >= 4);
    let (began, since) = (ran_ns(batch.id()), Instant::now());
    let mut samples = 0;
    wait_until("running among its orphans", || {
        for process in inside() {
            if let Some(cpu) = cpu_of(process) {
                assert_eq!(cpu, 1, "process {process}");
                samples += 1;
            }
        }
        since.elapsed() > SAMPLED && ran_ns(batch.id()) > began + 50_000_000
    });
    println!("{samples} samples in {:?}, none of them outside of the lane", since.elapsed());
    assert!(samples > 0);
    kill(batch.id(), libc::SIGKILL);
    batch.wait().unwrap();

    let outside = std::process::Command::new("setpriv")
        .args([
            "--reuid",
            NOBODY,
            "--regid",
            NOBODY,
            "--clear-groups",
            "taskset",
            "-c",
            "0",
            "true",
        ])
        .status()
        .unwrap();
    assert!(outside.success(), "the attempt can succeed");
}

/// Goal: a program in the fence does not reach its user's service manager, which would start
/// another outside, nor the system's, which would take it out. Method: what they listen at, in a
/// `/run` of the test's own, and who looks there from inside and from outside.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn service_managers_of_users_are_out_of_reach() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_it_runs();
    let looks = |manager: &str, by: &str| {
        let script = format!(
            "mount -t tmpfs none /run && mkdir -p {manager} && {by} sh -c 'ls -d {manager} 2>&1'"
        );
        let mut own = fenced.command("unshare", &["--mount", "sh", "-c", &script]);
        let output = own.current_dir("/").output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(said).unwrap())
    };
    let elfen = env!("CARGO_BIN_EXE_elfen");
    let user = format!("--reuid {NOBODY} --regid {NOBODY} --clear-groups");
    let of_user = format!("/run/user/{NOBODY}/systemd/private");
    for manager in [&*of_user, "/run/dbus/system_bus_socket"] {
        let inside = format!("{elfen} run --fence batch --user {NOBODY} --");
        let (seen, said) = looks(manager, &inside);
        assert!(!seen && said.contains("Permission denied"), "{said}");
        let (seen, said) = looks(manager, &format!("setpriv {user}"));
        assert!(seen, "{said}");
    }
}

/// Goal: another process of its user's, outside, lends a fenced program no view of its files, which
/// has the service managers that are hidden. Method: the files of such a process as `/proc` has
/// them, from inside and from outside.
#[test]
#[ignore = "needs root, two idle CPUs, cgroups and Linux 6.12"]
fn other_processes_of_its_user_are_out_of_reach() {
    require_fences();
    // SAFETY: asks for the version, and hands nothing over.
    let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, 0, 0, 1) };
    assert!(version >= 6, "needs scopes of Landlock, which Linux has from 6.12 on");
    let fenced = Fenced::start();
    fenced.wait_until_it_runs();
    let user = ["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"];
    let mut outside = fenced.command("setpriv", &user).args(["sleep", "600"]).spawn().unwrap();
    wait_until("a process of the user's", || comm(outside.id()) == "sleep");
    let script = format!("ls -dL /proc/{}/root && echo seen", outside.id());
    let looks = |program: &str, words: &[&str]| {
        let mut command = fenced.command(program, words);
        let output = command.args(["sh", "-c", &script]).current_dir("/").output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        String::from_utf8(said).unwrap()
    };
    let by_user = looks("setpriv", &user);
    let inside = ["run", "--fence", "batch", "--user", NOBODY, "--"];
    let said = looks(env!("CARGO_BIN_EXE_elfen"), &inside);
    kill(outside.id(), libc::SIGKILL);
    outside.wait().unwrap();
    assert!(by_user.contains("seen"), "{by_user}");
    assert!(said.contains("Permission denied") && !said.contains("seen"), "{said}");
}

/// Goal: a class that ranks above every cgroup is found, and the fence stands still until it is
/// gone. Method: root, which is the only user that may.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_class_above_guards_freezes_the_fence() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_it_runs();
    // A kernel with groups of real-time tasks gives a new one no time.
    for group in [&fenced.heavy, &fenced.fence] {
        for folder in group.0.folders() {
            let file = folder.join("cpu.rt_runtime_us");
            if file.exists() {
                fs::write(file, "1000").unwrap();
            }
        }
    }
    let mut batch = fenced.batch(&[], "root", "echo ready; exec chrt -f 1 sleep 600");
    batch.stdout.as_mut().unwrap().read_exact(&mut [0; 6]).unwrap();
    wait_until("its class", || comm(batch.id()) == "sleep");
    let since = Instant::now();
    wait_until("finding it", || fenced.fence().frozen == Some(Frozen::Broken));
    println!("a batch of class SCHED_FIFO stood still {:?} after it had it", since.elapsed());
    let why = fenced.fence().why().unwrap();
    assert!(why.contains("SCHED_FIFO") && why.contains(&batch.id().to_string()), "{why}");
    assert!(fenced.fence.0.freezer().is_frozen().unwrap());
    let none = libc::sched_param { sched_priority: 0 };
    let pid = i32::try_from(batch.id()).unwrap();
    // SAFETY: `none` is a live sched_param.
    assert_eq!(unsafe { libc::sched_setscheduler(pid, libc::SCHED_OTHER, &none) }, 0);
    fenced.wait_until_it_runs();
    kill(batch.id(), libc::SIGKILL);
    batch.wait().unwrap();
}

/// Goal: a process that stands in the fence with one leg is put into it. Method: one that is moved
/// out where the hierarchies are several.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn nobody_is_half_inside() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_it_runs();
    let mut batch = fenced.batch(&[], NOBODY, SPIN);
    let inside = || fenced.fence.0.processes().unwrap().contains(&batch.id());
    wait_until("entering", inside);
    for folder in fenced.fence.0.folders().iter().skip(1) {
        let out = folder.parent().unwrap().join("cgroup.procs");
        fs::write(&out, batch.id().to_string()).unwrap();
        wait_until("being put back", || fenced.fence.0.partly_inside().unwrap().is_empty());
        assert!(inside(), "{}", folder.display());
    }
    kill(batch.id(), libc::SIGKILL);
    batch.wait().unwrap();
}

/// Goal: somebody who lets a paused fence go is not the one who decides. Method: a hand that thaws.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_paused_fence_that_is_thawed_is_frozen_again() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_it_runs();
    assert!(fenced.elfen(&["pause"]).status.success());
    wait_until("knowing it", || fenced.fence().frozen.is_some());
    let freezer = fenced.fence.0.freezer();
    freezer.thaw().unwrap();
    wait_until("being frozen again", || freezer.is_requested().unwrap());
    assert!(fenced.elfen(&["resume"]).status.success());
    // Frozen by somebody else, without a pause: theirs to undo, and no secret.
    freezer.freeze().unwrap();
    wait_until("saying so", || fenced.fence().frozen == Some(Frozen::ByOthers));
    freezer.thaw().unwrap();
    fenced.wait_until_it_runs();
}
