//! Goal: programs that get checks while they run do the same work. This holds whatever they do at
//! that time, and even if the supervisor is killed. Method: a program with many kinds of work
//! (`live_checks/work.c`), dynamic and static, without symbols. It runs next to a request lane that
//! is alternately busy and idle. Output and status must equal those without Elfen.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use elfen_machine::process::children;
use elfen_rt::service::{Service, Worker};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

mod filtered;
mod java;
#[path = "../needs/mod.rs"]
mod needs;
mod zoo;

const ROUNDS: u32 = 10;
/// The argument for half of the work: a number of rounds, after which another program starts.
const WORK: &str = "3";

/// A thread on CPU 0 that alternately works and pauses, until this value drops.
struct BusyTurns {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl BusyTurns {
    /// Starts busy periods of 300 us that the kernel reports. The pauses have different lengths, so
    /// that requests begin anywhere in the batch's code.
    fn start() -> Self {
        let pause = |turn: u64| Duration::from_micros(400 + turn * 7919 % 1000);
        Self::start_with(None, Duration::from_micros(300), pause)
    }

    /// Starts busy periods of this length. With a service, they are requests on its page.
    fn start_with(
        service: Option<Arc<Service>>,
        length: Duration,
        pause: impl Fn(u64) -> Duration + Send + 'static,
    ) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let turns = move || {
            let mut cpus = CpuSet::new();
            cpus.set(0).unwrap();
            sched_setaffinity(Pid::from_raw(0), &cpus).unwrap();
            let mut worker = service.as_ref().map(|service| service.claim(0, 0).unwrap());
            for turn in (0..).take_while(|_| !stopped.load(Relaxed)) {
                worker.iter_mut().for_each(|worker| worker.begin(1));
                let start = Instant::now();
                while start.elapsed() < length {}
                worker.iter_mut().for_each(Worker::end);
                thread::sleep(pause(turn));
            }
        };
        Self { stop, thread: Some(thread::spawn(turns)) }
    }
}

impl Drop for BusyTurns {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

fn elfen_run_live(options: &[&str], program: &Path) -> Command {
    let live = ["--source", "tasks", "--checks", "live"];
    elfen_run(&[&live, options].concat(), program)
}

fn elfen_run(options: &[&str], program: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfen"));
    command.args(["run", "--lanes", "0:1"]).args(options).arg("--").arg(program);
    command.env_remove("ELFEN_LANES").stdin(Stdio::null());
    command
}

/// Only one test at a time uses the lanes.
#[track_caller]
fn reserve_lanes() -> MutexGuard<'static, ()> {
    static LANES: Mutex<()> = Mutex::new(());
    let lanes = LANES.lock().unwrap_or_else(PoisonError::into_inner);
    needs::idle_lanes();
    lanes
}

/// Reserves the lanes. Fails on machines that do not support live checks.
#[track_caller]
fn take_lanes() -> MutexGuard<'static, ()> {
    let lanes = reserve_lanes();
    let output = elfen_run_live(&[], Path::new("/bin/true")).output().unwrap();
    assert!(output.status.success(), "needs live checks: {output:?}");
    lanes
}

/// Runs a program with live checks, next to requests. Also returns the report.
fn run_next_to_requests(program: &Path, arguments: &[&str]) -> (Output, Value) {
    let folder = tempfile::tempdir().unwrap();
    let report = folder.path().join("report");
    let turns = BusyTurns::start();
    let mut command = elfen_run_live(&["--json-out", report.to_str().unwrap()], program);
    let output = command.args(arguments).output().unwrap();
    drop(turns);
    let report = fs::read(&report).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    (output, serde_json::from_slice(&report).unwrap())
}

/// The output and status of a program that runs without `elfen`.
fn run_alone(program: &Path, arguments: &[&str]) -> (String, Option<i32>) {
    let alone = output_and_status(&Command::new(program).args(arguments).output().unwrap());
    assert_eq!(alone.1, Some(3), "{alone:?}");
    alone
}

/// Builds the program of `work.c`, stripped, with these options.
fn build(folder: &Path, name: &str, options: &[&str]) -> PathBuf {
    build_source("work.c", folder, name, options)
}

fn build_source(source: &str, folder: &Path, name: &str, options: &[&str]) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/live_checks").join(source);
    let program = folder.join(name);
    let mut compiler = Command::new("cc");
    compiler.args(["-O2", "-pthread", "-s"]).args(options).arg("-o").arg(&program).arg(source);
    let output = compiler.output().unwrap();
    assert!(output.status.success(), "needs a compiler that links what is {name}: {output:?}");
    program
}

fn output_and_status(output: &Output) -> (String, Option<i32>) {
    (String::from_utf8_lossy(&output.stdout).into_owned(), output.status.code())
}

/// Whether all of these figures are above zero.
fn all_positive<const N: usize>(live: &Value, words: [&str; N]) -> bool {
    words.iter().all(|word| live.pointer(word).unwrap().as_u64().unwrap() > 0)
}

/// Runs a program with increasing numbers of rounds, until its live checks are as expected. Asserts
/// each time that output and status equal those without Elfen.
fn run_until(program: &Path, rounds: [&str; 3], enough: impl Fn(&Value) -> bool) {
    let mut last = Value::Null;
    for rounds in rounds {
        let alone = run_alone(program, &[rounds]);
        let (output, mut report) = run_next_to_requests(program, &[rounds]);
        assert_eq!(output_and_status(&output), alone, "{output:?}");
        last = report["live"].take();
        if enough(&last) {
            return;
        }
    }
    panic!("{program:?}: {last}");
}

#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn programs_do_the_same_work_with_live_checks() {
    let _lanes = take_lanes();
    let folder = tempfile::tempdir().unwrap();
    for (name, options) in [("dynamic", &[][..]), ("static", &["-static"][..])] {
        let program = build(folder.path(), name, options);
        let alone = run_alone(&program, &[]);
        let (output, report) = run_next_to_requests(&program, &[]);
        let printed = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output_and_status(&output), alone, "{name}: {printed}");
        let live = &report["live"];
        assert_eq!(report["checks"], "live");
        let counts = ["/sites/on", "/probes", "/stopped_by_check", "/processes"];
        assert!(all_positive(live, counts), "{name}: {live}");
        assert!(live["refused"].is_null(), "{live}");
    }
}

/// Goal: loops without calls get checks and do the same work, although a round takes a nanosecond
/// and each instruction is shorter than a jump. Method: such a program, stripped, dynamic and
/// static. It runs until several instructions were moved together, rounds of the loop follow the
/// check, and a check rings.
#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn loops_without_calls_get_checks() {
    let _lanes = take_lanes();
    let folder = tempfile::tempdir().unwrap();
    let has_rounds =
        |live: &Value| all_positive(live, ["/sites/several", "/sites/rounds", "/stopped_by_check"]);
    for (name, options) in [("loops", &[][..]), ("static loops", &["-static"][..])] {
        let program = build_source("rounds.c", folder.path(), name, options);
        run_until(&program, ["500000000", "2000000000", "8000000000"], has_rounds);
    }
}

/// Goal: an interpreter keeps a check and does the same work, although none of its loops is known
/// and every site runs too often. Method: a small interpreter, until it has such a check.
#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn an_interpreter_keeps_a_check_that_runs_too_often() {
    let _lanes = take_lanes();
    let folder = tempfile::tempdir().unwrap();
    let program = build_source("interpreter.c", folder.path(), "interpreter", &[]);
    let has_one = |live: &Value| all_positive(live, ["/sites/dense", "/stopped_by_check"]);
    run_until(&program, ["20000000", "100000000", "400000000"], has_one);
}

/// Goal: a program that never runs next to a request is not changed. Method: the report of a run
/// without requests.
#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn a_program_without_requests_is_not_changed() {
    let _lanes = take_lanes();
    let folder = tempfile::tempdir().unwrap();
    let report = folder.path().join("report");
    let options = ["--json-out", report.to_str().unwrap()];
    // Other programs of the machine on CPU 0 count as requests.
    let program = build(folder.path(), "alone", &[]);
    let output = elfen_run_live(&options, &program).output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    let report: Value = serde_json::from_slice(&fs::read(&report).unwrap()).unwrap();
    let touched = report["live"]["processes"].as_u64().unwrap() > 0;
    assert!(!touched || report["naps"].as_u64().unwrap() > 0, "{report}");
}

/// Goal: only the batch gets checks, and not another program with the same rank on its lane.
/// Method: such a program next to a batch that sleeps. Probes report the program as missed, and its
/// mappings do not change.
#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn programs_outside_of_the_batch_are_not_changed() {
    let _lanes = take_lanes();
    let folder = tempfile::tempdir().unwrap();
    let program = build_source("rounds.c", folder.path(), "stranger", &[]);
    let mut stranger = Command::new("taskset");
    let stranger = stranger.args(["-c", "1", "chrt", "-i", "0"]).arg(&program);
    let mut stranger = stranger.arg("100000000000").stdout(Stdio::null()).spawn().unwrap();
    let mapped = || fs::read_to_string(format!("/proc/{}/maps", stranger.id())).unwrap();
    // After this time, the program has called exec and mapped its libraries.
    thread::sleep(Duration::from_millis(500));
    let before = mapped();
    assert!(before.contains("stranger"), "{before}");
    let (output, report) = run_next_to_requests(Path::new("/bin/sleep"), &["2"]);
    let after = mapped();
    stranger.kill().unwrap();
    stranger.wait().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(all_positive(&report["live"], ["/missed", "/missed_by/passing"]), "{report}");
    assert_eq!(after, before, "{report}");
}

/// Goal: a program under a tracer is left to its guard, the report says so, and the program does
/// the same work. Method: strace and gdb as batch programs that start it.
#[test]
#[ignore = "needs root, two idle CPUs, eBPF, strace and gdb"]
fn traced_programs_are_left_to_their_guards() {
    let _lanes = take_lanes();
    needs::programs(&["strace", "gdb"]);
    let folder = tempfile::tempdir().unwrap();
    let program = build(folder.path(), "traced", &[]);
    let (alone, _) = run_alone(&program, &[WORK]);
    let program = program.to_str().unwrap();
    let calls = folder.path().join("calls");
    let strace = ["-f", "-o", calls.to_str().unwrap(), program, WORK];
    let quietly = "handle all nostop noprint pass";
    let gdb = ["-batch", "-nx", "-ex", quietly, "-ex", "run", "--args", program, WORK];
    for (tracer, words) in [("strace", &strace[..]), ("gdb", &gdb[..])] {
        let (output, report) = run_next_to_requests(Path::new(tracer), words);
        let (printed, status) = output_and_status(&output);
        let lines: Vec<&str> = printed.lines().collect();
        assert!(alone.lines().all(|line| lines.contains(&line)), "{tracer}: {output:?}");
        // gdb exits with its own status.
        assert!(tracer == "gdb" || status == Some(3) && printed == alone, "{output:?}");
        let why = report["live"]["refused"].as_str().unwrap_or_default();
        assert!(why == "a debugger or tracer has it", "{tracer}: {}", report["live"]);
        let why_not = format!("without checks: {why}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(&why_not), "{output:?}");
    }
}

/// Goal: a program under a tracer is left to its guard, and gets checks after the tracer has
/// detached. Method: a program whose child traces it for its first half second, run until it has
/// checks.
#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn a_program_gets_checks_after_its_tracer_has_gone() {
    let _lanes = take_lanes();
    let folder = tempfile::tempdir().unwrap();
    let program = build_source("traced.c", folder.path(), "traced", &[]);
    let has_checks = |live: &Value| {
        all_positive(live, ["/sites/on", "/stopped_by_check"])
            && live["missed_by"]["refused"].as_u64() > Some(0)
            && live["refused"].is_null()
    };
    run_until(&program, ["20000000", "60000000", "200000000"], has_checks);
}

/// Goal: if the supervisor is killed at any time, above all while it learns, the batch's output is
/// correct or the batch is killed, too. Method: rounds with random times. `LIVE_KILLED_ROUNDS=200`
/// sets their number, and `ELFEN_SEED` repeats a round.
#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn a_killed_supervisor_causes_no_wrong_output() {
    let _lanes = take_lanes();
    let number = |name: &str| std::env::var(name).ok()?.parse().ok();
    let rounds = number("LIVE_KILLED_ROUNDS").unwrap_or(ROUNDS);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let first = number("ELFEN_SEED").unwrap_or(now.subsec_nanos());
    let folder = tempfile::tempdir().unwrap();
    let program = build(folder.path(), "killed", &[]);
    let alone = run_alone(&program, &[WORK]);
    let _turns = BusyTurns::start();
    for seed in (0..rounds).map(|round| first.wrapping_add(round)) {
        let wait = Duration::from_micros(u64::from(seed.wrapping_mul(2_654_435_761) % 300_000));
        let mut launcher = elfen_run_live(&[], &program);
        let launcher =
            launcher.arg(WORK).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        thread::sleep(wait);
        kill_supervisor(&launcher);
        let output = launcher.wait_with_output().unwrap();
        let killed = output.status.signal() == Some(libc::SIGKILL)
            || output.status.code() == Some(128 + libc::SIGKILL);
        let never = String::from_utf8_lossy(&output.stderr).contains("before it had started");
        let right =
            output_and_status(&output) == alone || killed || never && output.stdout.is_empty();
        assert!(right, "seed {seed}, after {wait:?}: {output:?}");
    }
}

fn kill_supervisor(launcher: &Child) {
    if let Some(&supervisor) = children(launcher.id()).first() {
        // The supervisor's parent is the launcher, which this test has not waited for. The
        // supervisor may have ended.
        let _gone = kill(Pid::from_raw(supervisor.cast_signed()), Signal::SIGKILL);
    }
}
