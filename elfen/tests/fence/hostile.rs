//! Hostile programs in a fence: attempts to leave it, to gain time by writing into shared pages,
//! and to crowd out other processes.
//!
//! `FENCE_ROUNDS=200 cargo test -p elfen --test fence crowd -- --nocapture` prints the times of
//! logins next to a crowd.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use elfen_machine::fence::status::Frozen;
use elfen_rt::clock::monotonic_ns;
use elfen_rt::service::Worker;

use super::SPIN;
use super::stage::{
    AS_NOBODY, Fenced, NOBODY, comm, end, kill, ran_ns, require_fences, run, wait_until,
};
use super::stops::{print_percentiles, rounds};

/// Attempts to leave: a name, and a script that must fail. `$ROOT` is the root of the cgroups.
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

/// The least time of sampling.
const SAMPLED: Duration = Duration::from_secs(2);

/// The last CPU that a process ran on.
pub(crate) fn cpu_of(process: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(36)?.parse().ok()
}

/// Goal: a program without privileges never runs outside of the fence's lanes, whatever it tries.
/// Method: attempts by user nobody, in several sessions and processes, and samples of their CPUs;
/// outside of the fence, the first attempt of the same user succeeds.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_program_without_privileges_stays_on_its_lanes() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_running();
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
        // If `nice` lacks permission, it prints that and runs the program unchanged.
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
    end(&mut batch);

    let mut outside = Command::new("setpriv");
    let outside = outside.args(AS_NOBODY).args(["taskset", "-c", "0", "true"]).status().unwrap();
    assert!(outside.success(), "the attempt can succeed");
}

/// Goal: a program in the fence reaches neither the service manager of its user, which would start
/// programs outside, nor that of the system, which would move it out. Method: folders named like
/// their sockets, in a `/run` of the test, listed from inside and from outside.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn service_managers_are_out_of_reach() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_running();
    let list = |manager: &str, by: &str| {
        let script = format!(
            "mount -t tmpfs none /run && mkdir -p {manager} && {by} sh -c 'ls -d {manager} 2>&1'"
        );
        let mut own = fenced.command("unshare", &["--mount", "sh", "-c", &script]);
        let output = own.current_dir("/").output().unwrap();
        let printed = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(printed).unwrap())
    };
    let elfen = env!("CARGO_BIN_EXE_elfen");
    let user = AS_NOBODY.join(" ");
    let of_user = format!("/run/user/{NOBODY}/systemd/private");
    for manager in [&*of_user, "/run/dbus/system_bus_socket"] {
        let inside = format!("{elfen} run --fence batch --user {NOBODY} --");
        let (seen, printed) = list(manager, &inside);
        assert!(!seen && printed.contains("Permission denied"), "{printed}");
        let (seen, printed) = list(manager, &format!("setpriv {user}"));
        assert!(seen, "{printed}");
    }
}

/// Goal: a fenced program cannot see the files of another process of its user outside, where the
/// service managers are not hidden. Method: the root folder of such a process in `/proc`, listed
/// from inside and from outside.
#[test]
#[ignore = "needs root, two idle CPUs, cgroups and Linux 6.12"]
fn other_processes_of_its_user_are_out_of_reach() {
    require_fences();
    // SAFETY: this call returns the version, and passes no pointer.
    let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, 0, 0, 1) };
    assert!(version >= 6, "needs scopes of Landlock, which Linux has from 6.12 on");
    let fenced = Fenced::start();
    fenced.wait_until_running();
    let user = AS_NOBODY;
    let mut outside = fenced.command("setpriv", &user).args(["sleep", "600"]).spawn().unwrap();
    wait_until("a process of the user's", || comm(outside.id()) == "sleep");
    let script = format!("ls -dL /proc/{}/root && echo seen", outside.id());
    let list = |program: &str, words: &[&str]| {
        run(fenced.command(program, words).args(["sh", "-c", &script]).current_dir("/")).1
    };
    let by_user = list("setpriv", &user);
    let inside = ["run", "--fence", "batch", "--user", NOBODY, "--"];
    let printed = list(env!("CARGO_BIN_EXE_elfen"), &inside);
    end(&mut outside);
    assert!(by_user.contains("seen"), "{by_user}");
    assert!(printed.contains("Permission denied") && !printed.contains("seen"), "{printed}");
}

/// Goal: a process with a real-time class, which ranks above every cgroup, freezes the fence until
/// it changes its class. Method: a program of root, the only user that may take such a class.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_class_above_the_guards_freezes_the_fence() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_running();
    // A kernel with RT_GROUP_SCHED gives new groups no real-time budget.
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
    end(&mut batch);
}

/// Goal: a process that is in the fence in one hierarchy only is put back in all of them. Method:
/// the test moves a batch out of one hierarchy of cgroups version 1.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_process_partly_inside_is_put_back() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_running();
    let mut batch = fenced.batch(&[], NOBODY, SPIN);
    let inside = || fenced.fence.0.processes().unwrap().contains(&batch.id());
    wait_until("entering", inside);
    for folder in fenced.fence.0.folders().iter().skip(1) {
        let out = folder.parent().unwrap().join("cgroup.procs");
        fs::write(&out, batch.id().to_string()).unwrap();
        wait_until("being put back", || fenced.fence.0.partly_inside().unwrap().is_empty());
        assert!(inside(), "{}", folder.display());
    }
    end(&mut batch);
}

/// Goal: a paused fence that another process thaws is frozen again. A fence that another process
/// freezes without a pause stays frozen. Method: the test thaws and freezes.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_paused_fence_that_is_thawed_is_frozen_again() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_running();
    assert!(fenced.elfen(&["pause"]).status.success());
    wait_until("the pause", || fenced.fence().frozen.is_some());
    let freezer = fenced.fence.0.freezer();
    freezer.thaw().unwrap();
    wait_until("the second freeze", || freezer.is_requested().unwrap());
    assert!(fenced.elfen(&["resume"]).status.success());
    // elfend did not freeze the fence this time, so it only reports the state.
    freezer.freeze().unwrap();
    wait_until("the report", || fenced.fence().frozen == Some(Frozen::ByOthers));
    freezer.thaw().unwrap();
    fenced.wait_until_running();
}

const SCRIBBLE: &str = "scribble";
/// The largest share that a batch may get of a lane next to a long request, per mille. The
/// scheduler gives a task at SCHED_IDLE up to 4, and critical sections take 2.
const MAX_HELD_SHARE: u64 = 10;

fn build_scribble(folder: &Path) -> PathBuf {
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let file = folder.join(SCRIBBLE);
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-Wall", "-Werror", "-I"]).arg(here.join("../elfen-rt/include"));
    cc.arg(here.join("tests/fence/scribble.c")).arg("-o").arg(&file);
    assert!(cc.status().unwrap().success());
    file
}

/// Starts the program in the fence, and waits until it writes. Returns how many pages it can write.
fn start_scribble(fenced: &Fenced, program: &Path, what: &str) -> (Child, usize) {
    let words = ["run", "--fence", "batch", "--user", NOBODY, "--"];
    let mut command = fenced.command(env!("CARGO_BIN_EXE_elfen"), &words);
    command.arg(program).arg(fenced.run_dir().join("elfend.sock")).arg(what).current_dir("/");
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let before: Vec<String> = lines.take_while(|line| line != "ready").collect();
    assert_eq!(comm(child.id()), SCRIBBLE, "it received no pages");
    (child, before.len())
}

fn begin_request(fenced: &Fenced) -> Worker<'_> {
    let mut worker = fenced.service().claim(0, 0).unwrap();
    worker.begin(1);
    worker
}

/// Goal: a process in a fence gets no more of its lane next to a request by writing into the pages
/// that elfend passed to it, and neither does a later batch. Method: a program that keeps
/// overwriting one word, or random words, next to a request without end; then a batch that spins.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_batch_gains_nothing_by_writing_into_its_pages() {
    require_fences();
    let folder = tempfile::tempdir().unwrap();
    let program = build_scribble(folder.path());
    let fenced = Fenced::start();
    fenced.wait_until_running();
    let mut shares = Vec::new();
    for what in ["hotplug", "critical", "policy", "ipc", "junk"] {
        let (mut child, writable) = start_scribble(&fenced, &program, what);
        assert_eq!(writable, 1, "only the page of hints is writable");
        let worker = begin_request(&fenced);
        shares.push((what, fenced.held_share(child.id())));
        drop(worker);
        end(&mut child);
    }
    let mut spinning = fenced.batch(&[], NOBODY, SPIN);
    let worker = begin_request(&fenced);
    shares.push(("afterwards", fenced.held_share(spinning.id())));
    drop(worker);
    end(&mut spinning);
    println!("per mille of the held lane: {shares:?}");
    assert!(shares.iter().all(|&(_, share)| share < MAX_HELD_SHARE), "{shares:?}");
}

const CROWD: usize = 600;

/// The time of a login shell of another user, from its start to its first output: what remains of
/// an ssh login once it is connected. The shell runs in the cgroup of this test, outside of the
/// fence.
fn log_in() -> u64 {
    let began = monotonic_ns();
    let mut shell = Command::new("setpriv");
    shell.args(AS_NOBODY);
    shell.args(["sh", "-l", "-c", "echo here"]).current_dir("/").stdin(Stdio::null());
    let answer = shell.output().unwrap();
    assert!(answer.status.success() && answer.stdout == b"here\n", "{answer:?}");
    monotonic_ns() - began
}

fn crowd_script() -> String {
    format!("i=0; while [ $i -lt {CROWD} ]; do i=$((i+1)); ({SPIN}) & done; wait")
}

/// The crowd, at nice 19 and without a fence. It is killed when this drops.
struct UnfencedCrowd(Child);

impl UnfencedCrowd {
    fn start() -> Self {
        use std::os::unix::process::CommandExt;
        let mut command = Command::new("nice");
        command.args(["-n", "19", "sh", "-c", &crowd_script()]).stdin(Stdio::null());
        Self(command.process_group(0).spawn().unwrap())
    }

    fn size(&self) -> usize {
        let task = format!("/proc/{0}/task/{0}/children", self.0.id());
        fs::read_to_string(task).unwrap_or_default().split_whitespace().count()
    }
}

impl Drop for UnfencedCrowd {
    fn drop(&mut self) {
        // SAFETY: takes numbers; the group is that of our child, which has not been waited for.
        unsafe { libc::killpg(i32::try_from(self.0.id()).unwrap(), libc::SIGKILL) };
        self.0.wait().ok();
    }
}

/// Goal: users can log in next to a crowd in the fence; the crowd stays on its lane, and a pause
/// freezes it. Method: as many processes as the TasksMax of a unit might allow, logins, and the
/// same without a fence.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn users_can_log_in_next_to_a_crowd() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_running();
    let logins = |of: usize| (0..rounds(of)).map(|_| log_in()).collect();
    print_percentiles("a login shell alone", logins(20));
    let mut batch = fenced.batch(&[], NOBODY, &crowd_script());
    let inside = || fenced.fence.0.processes().unwrap();
    wait_until("a crowd", || inside().len() > CROWD);
    print_percentiles(&format!("next to {CROWD} processes in the fence"), logins(20));
    assert!(inside().into_iter().filter_map(cpu_of).all(|cpu| cpu == 1), "on its lane");
    let began = monotonic_ns();
    assert!(fenced.elfen(&["pause"]).status.success());
    print_percentiles("elfen pause of the crowd", vec![monotonic_ns() - began]);
    assert!(fenced.fence.0.freezer().is_frozen().unwrap());
    assert!(fenced.elfen(&["resume"]).status.success());
    inside().into_iter().for_each(|process| kill(process, libc::SIGKILL));
    wait_until("their end", || inside().is_empty());
    batch.wait().unwrap();

    let unfenced = UnfencedCrowd::start();
    wait_until("a crowd", || unfenced.size() == CROWD);
    print_percentiles("next to the crowd at nice 19, without a fence", logins(5));
}
