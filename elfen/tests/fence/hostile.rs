//! Tests of hostile programs in a fence. They try to leave the fence, to gain time by writing into
//! shared pages, and to crowd out other processes.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use elfen_machine::fence::status::Frozen;

use super::SPIN;
use super::pages::compile;
use super::stage::{
    AS_NOBODY, ELFEN, Fenced, KilledOnDrop, NOBODY, comm, kill, ran_ns, wait_until,
};

/// Attempts to leave the fence: a name, and a script that must fail. `$ROOT` is the root of
/// cgroups.
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

/// How long CPUs are sampled at least.
const SAMPLED: Duration = Duration::from_secs(2);

/// The CPU on which a process ran last.
pub(crate) fn cpu_of(process: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(36)?.parse().ok()
}

/// Goal: a program without privileges never runs outside of the fence's lanes. Method: attempts by
/// user `nobody`, in several sessions and processes, and samples of their CPUs. Outside of the
/// fence, the same user's first attempt succeeds.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_program_without_privileges_stays_on_its_lanes() {
    let fenced = Fenced::start();
    let folders = fenced.fence.0.folders();
    let attempts: String = ATTEMPTS
        .iter()
        .map(|(name, what)| format!("({what}) >/dev/null 2>&1; echo \"{name}: $?\";"))
        .collect();
    let orphans = format!("for i in 1 2 3; do (setsid sh -c '{SPIN}' &) & done;");
    let script = |folder: &Path| {
        let root = folder.parent().and_then(Path::parent).unwrap().display();
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
        // Without permission, `nice` prints an error and runs the program unchanged.
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
    drop(batch);

    let mut outside = Command::new("setpriv");
    let outside = outside.args(AS_NOBODY).args(["taskset", "-c", "0", "true"]).status().unwrap();
    assert!(outside.success(), "the attempt can succeed");
}

/// Goal: a program in the fence cannot reach the service managers. Its user's manager would start
/// programs outside of the fence, and the system's manager would move the program out. Method:
/// folders named like their sockets, in a `/run` of the test, listed from inside and outside.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn service_managers_are_out_of_reach() {
    let fenced = Fenced::start();
    let list = |manager: &str, by: &str| {
        let script = format!(
            "mount -t tmpfs none /run && mkdir -p {manager} && {by} sh -c 'ls -d {manager} 2>&1'"
        );
        fenced.run(&["unshare", "--mount", "sh", "-c", &script])
    };
    let of_user = format!("/run/user/{NOBODY}/systemd/private");
    for manager in [&*of_user, "/run/dbus/system_bus_socket"] {
        let (status, printed) =
            list(manager, &format!("{ELFEN} run --fence batch --user {NOBODY} --"));
        assert!(status != Some(0) && printed.contains("Permission denied"), "{printed}");
        let (status, printed) = list(manager, &format!("setpriv {}", AS_NOBODY.join(" ")));
        assert_eq!(status, Some(0), "{printed}");
    }
}

/// Goal: a fenced program cannot see the root folders of its user's other processes in `/proc`. In
/// these folders, the service managers are not hidden. Method: the root folder of such a process,
/// listed from inside and outside.
#[test]
#[ignore = "needs root, two idle CPUs, cgroups and Linux 6.12"]
fn other_processes_of_its_user_are_out_of_reach() {
    // SAFETY: with these arguments the call returns a version, and uses no pointer.
    let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, 0, 0, 1) };
    assert!(version >= 6, "needs scopes of Landlock, which Linux has from 6.12 on");
    let fenced = Fenced::start();
    let by_user = [&["setpriv"], &AS_NOBODY[..]].concat();
    let outside = fenced.command(&[&by_user[..], &["sleep", "600"]].concat()).spawn().unwrap();
    let outside = KilledOnDrop(outside);
    wait_until("a process of the user's", || comm(outside.id()) == "sleep");
    let script = format!("ls -dL /proc/{}/root && echo seen", outside.id());
    let list = |by: &[&str]| fenced.run(&[by, &["sh", "-c", &script]].concat()).1;
    let by_user = list(&by_user);
    assert!(by_user.contains("seen"), "{by_user}");
    let printed = list(&[ELFEN, "run", "--fence", "batch", "--user", NOBODY, "--"]);
    assert!(printed.contains("Permission denied") && !printed.contains("seen"), "{printed}");
}

/// Goal: a process with a real-time class, which ranks above every cgroup, freezes the fence until
/// its class changes. Method: a program of root, because only root may set such a class.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_class_above_the_guards_freezes_the_fence() {
    let fenced = Fenced::start();
    // A kernel with RT_GROUP_SCHED gives new cgroups no real-time budget.
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
    wait_until("the freeze", || fenced.fence().frozen == Some(Frozen::Broken));
    println!("a batch of class SCHED_FIFO was frozen within {:?}", since.elapsed());
    let why = fenced.fence().why().unwrap();
    assert!(why.contains("SCHED_FIFO") && why.contains(&batch.id().to_string()), "{why}");
    assert!(fenced.fence.0.freezer().is_frozen().unwrap());
    let none = libc::sched_param { sched_priority: 0 };
    let pid = i32::try_from(batch.id()).unwrap();
    // SAFETY: `none` is a live sched_param.
    assert_eq!(unsafe { libc::sched_setscheduler(pid, libc::SCHED_OTHER, &none) }, 0);
    fenced.wait_until_running();
}

/// Goal: a process that is in the fence in only one hierarchy is moved back in all of them. Method:
/// the test moves a batch out of one hierarchy of cgroups version 1.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_process_partly_inside_is_put_back() {
    let fenced = Fenced::start();
    let batch = fenced.batch(&[], NOBODY, SPIN);
    let inside = || fenced.fence.0.processes().unwrap().contains(&batch.id());
    wait_until("entering", inside);
    for folder in fenced.fence.0.folders().iter().skip(1) {
        let out = folder.parent().unwrap().join("cgroup.procs");
        fs::write(&out, batch.id().to_string()).unwrap();
        wait_until("being put back", || fenced.fence.0.partly_inside().unwrap().is_empty());
        assert!(inside(), "{}", folder.display());
    }
}

/// Goal: if another process thaws a paused fence, elfend freezes it again. If another process
/// freezes a fence without a pause, it stays frozen. Method: the test thaws and freezes.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_paused_fence_that_is_thawed_is_frozen_again() {
    let fenced = Fenced::start();
    fenced.prints(&[ELFEN, "pause"]);
    wait_until("the pause", || fenced.fence().frozen.is_some());
    let freezer = fenced.fence.0.freezer();
    freezer.thaw().unwrap();
    wait_until("the second freeze", || freezer.is_requested().unwrap());
    fenced.prints(&[ELFEN, "resume"]);
    // elfend did not freeze the fence this time, so it only reports the state.
    freezer.freeze().unwrap();
    wait_until("the report", || fenced.fence().frozen == Some(Frozen::ByOthers));
    freezer.thaw().unwrap();
    fenced.wait_until_running();
}

const SCRIBBLE: &str = "scribble";
/// The largest share of a lane next to a long request that a batch may get, in per mille. The
/// scheduler gives a task at SCHED_IDLE up to 4, and critical sections take 2.
const MAX_HELD_SHARE: u64 = 10;

/// Starts the program in the fence, and waits until it writes. Returns how many pages it can write.
fn start_scribble(fenced: &Fenced, program: &Path, what: &str) -> (KilledOnDrop, usize) {
    let words = [ELFEN, "run", "--fence", "batch", "--user", NOBODY, "--"];
    let mut command = fenced.command(&words);
    command.arg(program).arg(fenced.socket()).arg(what);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut child = KilledOnDrop(child);
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let before: Vec<String> = lines.take_while(|line| line != "ready").collect();
    assert_eq!(comm(child.id()), SCRIBBLE, "it received no pages");
    (child, before.len())
}

/// Goal: a process in a fence gains no time next to a request by writing into the pages from
/// elfend. Neither does a later batch. Method: a program that keeps overwriting one word, or random
/// words, next to an endless request; then a batch that spins.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_batch_gains_nothing_by_writing_into_its_pages() {
    let fenced = Fenced::start();
    let program = fenced.run_dir().join(SCRIBBLE);
    compile("scribble.c", &program);
    let mut shares = Vec::new();
    for what in ["hotplug", "critical", "policy", "ipc", "junk"] {
        let (child, writable) = start_scribble(&fenced, &program, what);
        assert_eq!(writable, 1, "only the page of hints is writable");
        let _worker = fenced.begin_request();
        shares.push((what, fenced.held_share(child.id())));
    }
    let spinning = fenced.batch(&[], NOBODY, SPIN);
    let _worker = fenced.begin_request();
    shares.push(("afterwards", fenced.held_share(spinning.id())));
    println!("per mille of the held lane: {shares:?}");
    assert!(shares.iter().all(|&(_, share)| share < MAX_HELD_SHARE), "{shares:?}");
}

const CROWD: usize = 600;

/// Goal: users can log in while a crowd of processes runs in the fence. The crowd stays on its
/// lane, and a pause freezes it. Method: as many processes as a unit's TasksMax might allow, and a
/// login shell of another user outside of the fence. The shell is what an ssh login runs after it
/// has connected.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn users_can_log_in_next_to_a_crowd() {
    let fenced = Fenced::start();
    let crowd = format!("i=0; while [ $i -lt {CROWD} ]; do i=$((i+1)); ({SPIN}) & done; wait");
    let mut batch = fenced.batch(&[], NOBODY, &crowd);
    let inside = || fenced.fence.0.processes().unwrap();
    wait_until("a crowd", || inside().len() > CROWD);
    let shell = [&["setpriv"], &AS_NOBODY[..], &["sh", "-l", "-c", "echo here"]].concat();
    assert_eq!(fenced.prints(&shell), "here\n");
    assert!(inside().into_iter().filter_map(cpu_of).all(|cpu| cpu == 1), "on its lane");
    fenced.prints(&[ELFEN, "pause"]);
    assert!(fenced.fence.0.freezer().is_frozen().unwrap());
    fenced.prints(&[ELFEN, "resume"]);
    inside().into_iter().for_each(|process| kill(process, libc::SIGKILL));
    wait_until("their end", || inside().is_empty());
    batch.wait().unwrap();
}
