//! Goal: a service under `elfen serve` behaves as without it, runs on the request lanes, and is as
//! it was when `elfen serve` ends. Method: shells as services, real signals, and what /proc says of
//! their threads. Request lane 1, so that nothing passes by being on the first CPU anyway. One CPU
//! is not enough: skipped there, in so many words.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use snapbox::data::DataFormat;
use snapbox::{Assert, Data};

fn elfen(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfen"));
    command.env_remove("ELFEN_LANES").arg("serve").args(words);
    command
}

/// `elfen serve` on request lane 1, with a look every 20 ms.
fn serve(words: &[&str]) -> Command {
    elfen(&[&["--lanes", "1:0", "--look-every", "20ms"], words].concat())
}

fn stderr_of(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn two_cpus_or_skip(test: &str) -> bool {
    let enough = fs::read_to_string("/sys/devices/system/cpu/online").unwrap().trim() != "0";
    if !enough {
        let mut terminal = std::io::stderr();
        writeln!(terminal, "skipped: {test}: it takes two CPUs").unwrap();
    }
    enough
}

/// Waits for something that other processes do. A minute is for a machine that is busy.
fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what} does not happen");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn status_line(pid: u32, name: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim_start_matches(':').trim().to_owned()
}

fn cpus(pid: u32) -> String {
    status_line(pid, "Cpus_allowed_list")
}

fn taskset(pid: u32, cpus: &str) {
    let output = Command::new("taskset").args(["-cp", cpus, &pid.to_string()]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

fn kill(pid: u32, signal: i32) {
    // SAFETY: takes numbers; the caller started this process.
    assert_eq!(unsafe { libc::kill(i32::try_from(pid).unwrap(), signal) }, 0);
}

/// A shell that says its process id and its child's, and ends with its input.
struct Shell {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    pids: Vec<u32>,
}

impl Shell {
    fn start(mut command: Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let (input, output) = (child.stdin.take(), child.stdout.take().unwrap());
        let mut output = BufReader::new(output);
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let pids = line.split_whitespace().map(|pid| pid.parse().unwrap()).collect();
        Self { child, input, output, pids }
    }

    /// A service of two processes that nobody serves yet, on the CPUs given.
    fn unserved(on: &str) -> Self {
        let mut command = Command::new("taskset");
        command.args(["-c", on, "sh", "-c", SERVICE]);
        Self::start(command)
    }

    fn end(mut self) -> i32 {
        drop(self.input.take());
        self.child.wait().unwrap().code().unwrap()
    }
}

/// A test that fails must not leave a service behind.
impl Drop for Shell {
    fn drop(&mut self) {
        drop(self.input.take());
        self.child.wait().ok();
    }
}

const SERVICE: &str = "sleep 600 >/dev/null 2>&1 & echo $$ $!; read line; kill $!; wait; exit 7";

/// `elfen serve` beside a service that runs already.
struct Keeper {
    child: Child,
    messages: BufReader<std::process::ChildStderr>,
}

impl Keeper {
    fn start(words: &[&str]) -> Self {
        let mut child = serve(words).stderr(Stdio::piped()).spawn().unwrap();
        let messages = BufReader::new(child.stderr.take().unwrap());
        let mut keeper = Self { child, messages };
        keeper.until("Ctrl-C undoes it");
        keeper
    }

    /// Reads what it says until a line has these words.
    fn until(&mut self, words: &str) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.messages.read_line(&mut line).unwrap(), 0, "{words:?} was not said");
            if line.contains(words) {
                return line;
            }
        }
    }

    /// The rest of what it says, and its status.
    fn end(mut self) -> (String, Option<i32>) {
        let mut rest = String::new();
        self.messages.read_to_string(&mut rest).unwrap();
        (rest, self.child.wait().unwrap().code())
    }
}

#[test]
fn output_input_status_and_signals_are_the_programs_own() {
    if !two_cpus_or_skip("output_input_status_and_signals_are_the_programs_own") {
        return;
    }
    let script = "cat; echo to stderr >&2; grep Cpus_allowed_list /proc/self/status; exit 42";
    let mut command = serve(&["--", "sh", "-c", script]);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"some\0bytes\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(42));
    assert_eq!(output.stdout, b"some\0bytes\nCpus_allowed_list:\t1\n");
    let said = stderr_of(&output);
    assert!(said.contains("elfen: program \"sh\" on CPUs 1, looked after every"), "{said}");
    assert!(said.contains("to stderr\n") && said.contains("CPU 1 idled"), "{said}");
    let status = |program: &[&str]| serve(&[&["--"], program].concat()).output().unwrap().status;
    assert_eq!(status(&["/no/such/program"]).code(), Some(127));
    assert_eq!(status(&["/etc/passwd"]).code(), Some(126));
    for signal in [libc::SIGKILL, libc::SIGTERM, libc::SIGSEGV] {
        let status = status(&["sh", "-c", &format!("kill -{signal} $$")]);
        assert_eq!(status.signal(), Some(signal));
    }
}

/// Goal: nothing stands between the service and whoever started it. Method: the process started is
/// the service, and has no child and no open descriptor that it would not have alone.
#[test]
fn the_service_is_the_process_that_was_started() {
    if !two_cpus_or_skip("the_service_is_the_process_that_was_started") {
        return;
    }
    let script = "echo $$; read line; ls /proc/self/fd | wc -l";
    let descriptors = |command| {
        let mut shell = Shell::start(command);
        let pid = shell.child.id();
        assert_eq!(shell.pids, [pid]);
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        assert_eq!(children, "");
        drop(shell.input.take());
        let mut count = String::new();
        shell.output.read_to_string(&mut count).unwrap();
        count
    };
    let mut alone = Command::new("sh");
    alone.args(["-c", script]);
    let served = descriptors(serve(&["--", "sh", "-c", script]));
    assert_eq!(served, descriptors(alone));
}

/// Goal: a process or thread that leaves the lanes is brought back and named. Method: taskset moves
/// a child of the service away.
#[test]
fn who_leaves_is_brought_back() {
    if !two_cpus_or_skip("who_leaves_is_brought_back") {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("report");
    let mut command = serve(&["--report", "report", "--", "sh", "-c", SERVICE]);
    command.current_dir(scratch.path());
    let shell = Shell::start(command);
    let child = shell.pids[1];
    assert_eq!(cpus(child), "1");
    taskset(child, "0");
    wait_until("bringing it back", || cpus(child) == "1");
    let read = || serde_json::from_slice::<Value>(&fs::read(&file).unwrap()).unwrap();
    wait_until("a report of it", || read()["brought_back"] == 1);
    assert_eq!((&read()["processes"], &read()["threads"]), (&2.into(), &2.into()));
    assert_eq!(shell.end(), 7);
    wait_until("the last report", || read()["ended"] == true);
    let report = read();
    for key in ["moved", "brought_back", "refused", "undone", "wall_ns"] {
        assert!(report[key].is_u64(), "{key}: {report}");
    }
    assert_eq!((&report["lanes"], &report["idle"][0]["cpu"]), (&"1:0".into(), &1.into()));
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 1, "the report alone");
}

/// Goal: a service that runs is moved with all it has, and gets back what it had. Method: two
/// processes, with a CPU of its own for one; SIGINT, as Ctrl-C sends it.
#[test]
fn an_existing_service_is_moved_and_moved_back() {
    if !two_cpus_or_skip("an_existing_service_is_moved_and_moved_back") {
        return;
    }
    let shell = Shell::unserved("0,1");
    let (parent, child) = (shell.pids[0], shell.pids[1]);
    taskset(child, "0");
    let mut keeper = Keeper::start(&["--pid", &parent.to_string()]);
    assert_eq!((cpus(parent), cpus(child)), ("1".into(), "1".into()));
    taskset(child, "0");
    let line = keeper.until("chose CPUs 0 itself");
    assert!(line.contains(&format!("thread {child} (sleep)")), "{line}");
    kill(keeper.child.id(), libc::SIGINT);
    let (rest, status) = keeper.end();
    assert_eq!(status, Some(0));
    assert!(
        rest.contains("2 threads moved, 2 threads moved back, 1 thread brought back"),
        "{rest}"
    );
    assert_eq!((cpus(parent), cpus(child)), ("0-1".into(), "0".into()));
    assert_eq!(shell.end(), 7);
}

/// Goal: the keeper ends with the service. Method: the service ends by itself.
#[test]
fn ends_with_the_service() {
    if !two_cpus_or_skip("ends_with_the_service") {
        return;
    }
    let shell = Shell::unserved("0,1");
    let keeper = Keeper::start(&["--pid", &shell.pids[0].to_string()]);
    assert_eq!(shell.end(), 7);
    assert_eq!(keeper.end().1, Some(0));
}

/// Goal: what is killed does no harm. Method: SIGKILL for the watcher of a service that was
/// started, which is found by its name and session; the service goes on, on its lanes.
#[test]
fn the_service_outlives_its_watcher() {
    if !two_cpus_or_skip("the_service_outlives_its_watcher") {
        return;
    }
    let name = format!("{}", std::process::id());
    let shell = Shell::start(serve(&["--", "sh", "-c", SERVICE, &name]));
    let watcher = || {
        let ours = |pid: &u32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
            words.contains(&name.as_bytes()) && words[0].ends_with(b"elfen")
        };
        let processes = fs::read_dir("/proc").unwrap().flatten();
        processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find(ours)
    };
    let pid = watcher().expect("it watches");
    wait_until("leaving the request lane to the service", || cpus(pid) == "0");
    kill(pid, libc::SIGKILL);
    wait_until("the watcher's end", || watcher().is_none());
    assert_eq!(cpus(shell.pids[0]), "1");
    assert_eq!(shell.end(), 7);
}

/// Goal: who stays when the service's first process ends is spoken of. Method: a child that outlives
/// it, which a look has met.
#[test]
fn who_is_left_behind_is_told() {
    if !two_cpus_or_skip("who_is_left_behind_is_told") {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("report");
    let script = "sleep 600 >/dev/null 2>&1 & echo $$ $!; read line";
    let report = file.to_str().unwrap();
    let mut command = serve(&["--report", report, "--", "sh", "-c", script]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let left: u32 = line.split_whitespace().last().unwrap().parse().unwrap();
    let met = || serde_json::from_slice::<Value>(&fs::read(&file).unwrap()).unwrap();
    wait_until("meeting the child", || met()["processes"] == 2);
    drop(child.stdin.take());
    let output = child.wait_with_output().unwrap();
    kill(left, libc::SIGKILL);
    let said = stderr_of(&output);
    assert!(said.contains("1 of its processes go on, on CPUs 1, and are no longer"), "{said}");
}

/// Goal: a polling service is spoken of. Method: a shell that does nothing but run.
#[test]
fn a_service_that_never_idles_is_told() {
    if !two_cpus_or_skip("a_service_that_never_idles_is_told") {
        return;
    }
    let script = "echo $$; while :; do :; done";
    let mut command = elfen(&["--lanes", "1:0", "--look-every", "60ms", "--", "sh", "-c", script]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let line = lines.find(|line| line.as_ref().unwrap().contains("does not idle")).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(line.unwrap().contains("CPU 1 does not idle, so there is nothing to borrow"));
}

/// The first cgroup folder in which this test may make one of its own.
fn own_cgroup() -> Option<PathBuf> {
    let mounts = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd"];
    let own = |mount: &&str| {
        let folder = Path::new(mount).join(format!("elfen-serve-{}", std::process::id()));
        let usable = Path::new(mount).join("cgroup.procs").exists();
        (usable && fs::create_dir(&folder).is_ok()).then_some(folder)
    };
    mounts.iter().find_map(own)
}

/// Goal: a cgroup's processes are moved, those of its children and of its next life too. Method: a
/// cgroup of the test's own, removed and made again.
#[test]
fn a_cgroup_is_kept_across_restarts() {
    const NAME: &str = "a_cgroup_is_kept_across_restarts";
    if !two_cpus_or_skip(NAME) {
        return;
    }
    let Some(folder) = own_cgroup() else {
        let mut terminal = std::io::stderr();
        writeln!(terminal, "skipped: {NAME}: it takes root, and cgroups to write to").unwrap();
        return;
    };
    let inner = folder.join("inner");
    let enter = |shell: &Shell| {
        fs::create_dir_all(&inner).unwrap();
        fs::write(inner.join("cgroup.procs"), shell.pids[0].to_string()).unwrap();
    };
    let leave = |shell: Shell| {
        let child = shell.pids[1];
        assert_eq!(shell.end(), 7);
        wait_until("the end of the processes", || !Path::new(&format!("/proc/{child}")).exists());
        wait_until("removing the cgroup", || {
            fs::remove_dir(&inner).ok();
            fs::remove_dir(&folder).is_ok()
        });
    };
    let first = Shell::unserved("0,1");
    enter(&first);
    let mut keeper = Keeper::start(&["--cgroup", folder.file_name().unwrap().to_str().unwrap()]);
    assert_eq!((cpus(first.pids[0]), cpus(first.pids[1])), ("1".into(), "0-1".into()));
    leave(first);
    keeper.until("is gone: waiting");
    let second = Shell::unserved("0,1");
    enter(&second);
    wait_until("moving it", || cpus(second.pids[0]) == "1");
    kill(keeper.child.id(), libc::SIGTERM);
    assert_eq!(keeper.end().1, Some(0));
    assert_eq!(cpus(second.pids[0]), "0-1");
    leave(second);
}

/// Goal: what would be done is said, for people and for scripts. Method: files; a service by name.
#[test]
fn dry_runs_are_as_recorded() {
    if !two_cpus_or_skip("dry_runs_are_as_recorded") {
        return;
    }
    for (file, more) in [("dry-run.txt", &[][..]), ("dry-run.json", &["--json"])] {
        let words = [&["--lanes", "0:1", "--dry-run"], more, &["--", "redis-server"]].concat();
        let output = elfen(&words).output().unwrap();
        assert!(output.status.success(), "{}", stderr_of(&output));
        let actual = String::from_utf8(output.stdout).unwrap();
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/serve").join(file);
        let expected = Data::read_from(&path, Some(DataFormat::Text));
        Assert::new().action_env("SNAPSHOTS").normalize_paths(false).eq(actual, expected);
    }
    let shell = Shell::unserved("0,1");
    let output = serve(&["--pid", &shell.pids[0].to_string(), "--dry-run"]).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains(", threads 2, processes 2: moves to CPUs 1; looked after"), "{said}");
    assert_eq!(cpus(shell.pids[0]), "0-1", "nothing was done");
    assert_eq!(shell.end(), 7);
}

#[test]
fn wrong_arguments_start_nothing() {
    if !two_cpus_or_skip("wrong_arguments_start_nothing") {
        return;
    }
    let own = std::process::id().to_string();
    let cases: [(&[&str], i32, &str); 13] = [
        (&[], 2, "required arguments were not provided"),
        (&["--pid", "1", "--", "true"], 2, "cannot be used with"),
        (&["--pid", "1", "--cgroup", "x"], 2, "cannot be used with"),
        (&["--pid", "0"], 2, "0 is not in 1.."),
        (&["--pid", "4294967295"], 2, "there is no process 4294967295; see `pgrep"),
        (&["--pid", &own], 2, "this command is part of it itself; name the service alone"),
        (&["--cgroup", "/no/such"], 2, "there is no cgroup \"/no/such\" under /sys/fs/cgroup"),
        (&["--look-every", "1ms", "--", "true"], 2, "looks are 10ms to 3600s apart"),
        (&["--json", "--", "true"], 2, "--dry-run"),
        (&["--report", "/no/such/file", "--", "true"], 1, "name a file that can be written"),
        (&["--report", "/dev/null", "--", "true"], 1, "it is not a regular file"),
        (&["--lanes", "0:0", "--", "true"], 2, "CPU 0 is named twice"),
        (&["--lanes", "0:99999", "--", "true"], 2, "above the last CPU"),
    ];
    for (arguments, status, says) in cases {
        let lanes: &[&str] = if arguments.contains(&"--lanes") { &[] } else { &["--lanes", "0:1"] };
        let output = elfen(&[lanes, arguments].concat()).output().unwrap();
        let said = stderr_of(&output);
        assert_eq!(output.status.code(), Some(status), "{arguments:?}: {said}");
        assert!(said.contains(says), "{arguments:?}: {said}");
        assert!(said.lines().last().unwrap().starts_with("elfen: "), "{said}");
    }
}
