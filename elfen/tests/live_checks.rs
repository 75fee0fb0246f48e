//! Goal: programs that are given checks while they run do the same work, whatever they are in the
//! middle of, and whoever is killed. Method: a program of everything (`live_checks/work.c`), with
//! its libraries and static, without symbols, beside a request lane that is busy and idle in turns;
//! output and status have to be those that it has alone.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use serde_json::Value;

#[path = "live_checks/filtered.rs"]
mod filtered;
#[path = "live_checks/java.rs"]
mod java;
mod needs;

/// The lanes are there once.
static LANES: Mutex<()> = Mutex::new(());
const ROUNDS: u32 = 10;
/// The half of the work: rounds, and another program that is begun at their end.
const WORK: &str = "3";

/// A request lane on CPU 0, for as long as this lives.
struct Turns {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Turns {
    fn start() -> Self {
        const TURN: Duration = Duration::from_micros(300);
        let stop = Arc::new(AtomicBool::new(false));
        let told = stop.clone();
        let turns = move || {
            let cpu = [1_u64];
            // SAFETY: the kernel reads 8 bytes of `cpu`; 0 is this thread.
            let pinned = unsafe { libc::syscall(libc::SYS_sched_setaffinity, 0, 8, cpu.as_ptr()) };
            assert_eq!(pinned, 0);
            for turn in 0_u32.. {
                if told.load(Relaxed) {
                    return;
                }
                let start = Instant::now();
                while start.elapsed() < TURN {}
                // Pauses of different lengths, so that turns meet the batch anywhere.
                thread::sleep(Duration::from_micros(400 + u64::from(turn * 7919 % 1000)));
            }
        };
        Self { stop, thread: Some(thread::spawn(turns)) }
    }
}

impl Drop for Turns {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

fn elfen(options: &[&str], program: &Path) -> Command {
    let live = ["--signal", "tasks", "--inject", "live"];
    run(&[&live, options].concat(), program)
}

/// With the checks that it chooses itself.
fn elfen_by_default(program: &Path) -> Command {
    run(&[], program)
}

fn run(options: &[&str], program: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfen"));
    command.args(["run", "--lanes", "0:1"]).args(options).arg("--").arg(program);
    command.env_remove("ELFEN_LANES").stdin(Stdio::null());
    command
}

/// Fails where there can be no live checks.
#[track_caller]
fn require_live_checks() {
    needs::idle_lanes();
    let output = elfen(&[], Path::new("/bin/true")).output().unwrap();
    assert!(output.status.success(), "needs live checks: {output:?}");
}

/// Builds the program, stripped, and linked by these options.
fn build(folder: &Path, name: &str, options: &[&str]) -> PathBuf {
    build_of("work.c", folder, name, options)
}

fn build_of(source: &str, folder: &Path, name: &str, options: &[&str]) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/live_checks").join(source);
    let program = folder.join(name);
    let mut compiler = Command::new("cc");
    compiler.args(["-O2", "-pthread", "-s"]).args(options).arg("-o").arg(&program).arg(source);
    let output = compiler.output().unwrap();
    assert!(output.status.success(), "needs a compiler that links what is {name}: {output:?}");
    program
}

fn did(output: &Output) -> (String, Option<i32>) {
    (String::from_utf8_lossy(&output.stdout).into_owned(), output.status.code())
}

/// Whether these are above zero.
fn all_there<const N: usize>(live: &Value, words: [&str; N]) -> bool {
    words.iter().all(|word| live.pointer(word).unwrap().as_u64().unwrap() > 0)
}

/// Lends lanes to a program for more and more rounds, until its live checks are as they should be;
/// each time it does what it does alone.
fn lent_for(program: &Path, rounds: [&str; 3], enough: impl Fn(&Value) -> bool) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let report = folder.path().join("report");
    let mut live = Value::Null;
    for rounds in rounds {
        let alone = did(&Command::new(program).arg(rounds).output().unwrap());
        assert_eq!(alone.1, Some(3), "{alone:?}");
        let turns = Turns::start();
        let mut command = elfen(&["--report", report.to_str().unwrap()], program);
        let output = command.arg(rounds).output().unwrap();
        drop(turns);
        assert_eq!(did(&output), alone, "{output:?}");
        let report: Value = serde_json::from_slice(&fs::read(&report).unwrap()).unwrap();
        live = report["live"].clone();
        if enough(&live) {
            break;
        }
    }
    live
}

#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn programs_do_the_same_work_with_checks_written_into_them() {
    let _lanes = LANES.lock();
    require_live_checks();
    let folder = tempfile::tempdir().unwrap();
    for (name, options) in [("dynamic", &[][..]), ("static", &["-static"][..])] {
        let program = build(folder.path(), name, options);
        let alone = did(&Command::new(&program).output().unwrap());
        assert_eq!(alone.1, Some(3), "{alone:?}");
        let report = folder.path().join("report");
        let turns = Turns::start();
        let output = elfen(&["--report", report.to_str().unwrap()], &program).output().unwrap();
        drop(turns);
        assert_eq!(did(&output), alone, "{name}: {}", String::from_utf8_lossy(&output.stderr));
        let report: Value = serde_json::from_slice(&fs::read(&report).unwrap()).unwrap();
        let live = &report["live"];
        assert_eq!(report["inject"], "live");
        for word in [&live["places"]["on"], &live["drills"], &live["bells"], &live["processes"]] {
            assert!(word.as_u64().unwrap() > 0, "{name}: {live}");
        }
        assert!(live["refused"].is_null(), "{live}");
    }
}

/// Goal: loops without a call, which take a nanosecond a round and have no instruction that is as
/// long as a jump, are given checks all the same, and do what they did. Method: such a program,
/// stripped, dynamic and static, for as long as it takes: several instructions are moved together,
/// rounds stand behind the check, and it rings.
#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn loops_without_a_call_are_given_checks_and_rounds() {
    let _lanes = LANES.lock();
    require_live_checks();
    let folder = tempfile::tempdir().unwrap();
    let has_rounds =
        |live: &Value| all_there(live, ["/places/several", "/places/rounds", "/bells"]);
    for (name, options) in [("loops", &[][..]), ("static loops", &["-static"][..])] {
        let program = build_of("rounds.c", folder.path(), name, options);
        let last = lent_for(&program, ["500000000", "2000000000", "8000000000"], has_rounds);
        assert!(has_rounds(&last), "{name}: {last}");
    }
}

/// Goal: an interpreter, of which no loop is known and every place runs too often, keeps a check,
/// and does what it did. Method: a small one, for as long as it takes.
#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn an_interpreter_keeps_a_check_that_runs_too_often() {
    let _lanes = LANES.lock();
    require_live_checks();
    let folder = tempfile::tempdir().unwrap();
    let program = build_of("interpreter.c", folder.path(), "interpreter", &[]);
    let has_one = |live: &Value| all_there(live, ["/places/dense", "/bells"]);
    let last = lent_for(&program, ["20000000", "100000000", "400000000"], has_one);
    assert!(has_one(&last), "{last}");
}

/// Goal: a program that meets no request is left as it is. Method: its mappings, while it runs.
#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn a_program_that_meets_no_request_is_not_touched() {
    let _lanes = LANES.lock();
    require_live_checks();
    let folder = tempfile::tempdir().unwrap();
    let report = folder.path().join("report");
    let options = ["--report", report.to_str().unwrap()];
    // On a machine where other programs use CPU 0, those are its requests.
    let program = build(folder.path(), "alone", &[]);
    let output = elfen(&options, &program).output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    let report: Value = serde_json::from_slice(&fs::read(&report).unwrap()).unwrap();
    let touched = report["live"]["processes"].as_u64().unwrap() > 0;
    assert!(!touched || report["naps"].as_u64().unwrap() > 0, "{report}");
}

/// Goal: only the batch is given checks, and no other program that has its rank and its lane.
/// Method: a program that nobody lends anything, beside a batch that sleeps: drills miss it, and it
/// is left as it is.
#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn who_is_none_of_the_batch_is_not_touched() {
    let _lanes = LANES.lock();
    require_live_checks();
    let folder = tempfile::tempdir().unwrap();
    let program = build_of("rounds.c", folder.path(), "stranger", &[]);
    let mut stranger = Command::new("taskset");
    let stranger = stranger.args(["-c", "1", "chrt", "-i", "0"]).arg(&program);
    let mut stranger = stranger.arg("100000000000").stdout(Stdio::null()).spawn().unwrap();
    let mapped = || fs::read_to_string(format!("/proc/{}/maps", stranger.id())).unwrap();
    // It is past its exec, and has mapped what it needs.
    thread::sleep(Duration::from_millis(500));
    let before = mapped();
    assert!(before.contains("stranger"), "{before}");
    let report = folder.path().join("report");
    let turns = Turns::start();
    let mut command = elfen(&["--report", report.to_str().unwrap()], Path::new("/bin/sleep"));
    let output = command.arg("2").output().unwrap();
    drop(turns);
    let after = mapped();
    stranger.kill().unwrap();
    stranger.wait().unwrap();
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_slice(&fs::read(&report).unwrap()).unwrap();
    assert!(all_there(&report["live"], ["/missed", "/missed_by/passing"]), "{report}");
    assert_eq!(after, before, "{report}");
}

/// Goal: a program that somebody else traces is left to its guard, which says so, and does the same
/// work. Method: strace and gdb, as batch programs that start it.
#[test]
#[ignore = "needs root, two idle CPUs, eBPF, strace and gdb"]
fn traced_programs_are_left_to_their_guards() {
    let _lanes = LANES.lock();
    require_live_checks();
    needs::programs(&["strace", "gdb"]);
    let folder = tempfile::tempdir().unwrap();
    let program = build(folder.path(), "traced", &[]);
    let program = program.to_str().unwrap();
    let (alone, _) = did(&Command::new(program).arg(WORK).output().unwrap());
    let (report, calls) = (folder.path().join("report"), folder.path().join("calls"));
    let options = ["--report", report.to_str().unwrap()];
    let strace = ["-f", "-o", calls.to_str().unwrap(), program, WORK];
    let quietly = "handle all nostop noprint pass";
    let gdb = ["-batch", "-nx", "-ex", quietly, "-ex", "run", "--args", program, WORK];
    for (tracer, words) in [("strace", &strace[..]), ("gdb", &gdb[..])] {
        let turns = Turns::start();
        let output = elfen(&options, Path::new(tracer)).args(words).output().unwrap();
        drop(turns);
        let (printed, status) = did(&output);
        let lines: Vec<&str> = printed.lines().collect();
        assert!(alone.lines().all(|line| lines.contains(&line)), "{tracer}: {output:?}");
        // gdb's own status is another.
        assert!(tracer == "gdb" || status == Some(3) && printed == alone, "{output:?}");
        let report: Value = serde_json::from_slice(&fs::read(&report).unwrap()).unwrap();
        let why = report["live"]["refused"].as_str().unwrap_or_default();
        assert!(why == "a debugger or tracer has it", "{tracer}: {}", report["live"]);
        let told = format!("without checks: {why}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(&told), "{output:?}");
    }
}

/// Goal: who is traced for a while is left to the guard for as long, and has checks afterwards.
/// Method: a program whose child traces it in its first half second, for as long as it takes.
#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn a_tracer_that_has_gone_leaves_nothing_behind() {
    let _lanes = LANES.lock();
    require_live_checks();
    let folder = tempfile::tempdir().unwrap();
    let program = build_of("traced.c", folder.path(), "traced", &[]);
    let has_checks = |live: &Value| {
        all_there(live, ["/places/on", "/bells"])
            && live["missed_by"]["refused"].as_u64() > Some(0)
            && live["refused"].is_null()
    };
    let last = lent_for(&program, ["20000000", "60000000", "200000000"], has_checks);
    assert!(has_checks(&last), "{last}");
}

/// Goal: whenever the keeper is killed, while it learns above all, the batch's output is right or
/// the batch is killed as well. Method: rounds; a seed says when. `LIVE_KILLED_ROUNDS=200` plays
/// that many, `ELFEN_SEED` repeats one.
#[test]
#[ignore = "needs root, two idle CPUs and eBPF"]
fn a_keeper_that_is_killed_leaves_no_wrong_output() {
    let _lanes = LANES.lock();
    require_live_checks();
    let number = |name: &str| std::env::var(name).ok()?.parse().ok();
    let rounds = number("LIVE_KILLED_ROUNDS").unwrap_or(ROUNDS);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let first = number("ELFEN_SEED").unwrap_or(now.subsec_nanos());
    let folder = tempfile::tempdir().unwrap();
    let program = build(folder.path(), "killed", &[]);
    let alone = did(&Command::new(&program).arg(WORK).output().unwrap());
    assert_eq!(alone.1, Some(3), "{alone:?}");
    let _turns = Turns::start();
    for seed in (0..rounds).map(|round| first.wrapping_add(round)) {
        let wait = Duration::from_micros(u64::from(seed.wrapping_mul(2_654_435_761) % 300_000));
        let mut front = elfen(&[], &program);
        let front = front.arg(WORK).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        thread::sleep(wait);
        kill_keeper(&front);
        let output = front.wait_with_output().unwrap();
        let killed = output.status.signal() == Some(libc::SIGKILL)
            || output.status.code() == Some(128 + libc::SIGKILL);
        let never = String::from_utf8_lossy(&output.stderr).contains("before it had started");
        let right = did(&output) == alone || killed || never && output.stdout.is_empty();
        assert!(right, "seed {seed}, after {wait:?}: {output:?}");
    }
}

fn kill_keeper(front: &Child) {
    let id = front.id();
    let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
    if let Some(keeper) = children.split_whitespace().next().and_then(|pid| pid.parse().ok()) {
        // SAFETY: kill takes numbers; the front, which has not been waited for, is its parent.
        unsafe { libc::kill(keeper, libc::SIGKILL) };
    }
}
