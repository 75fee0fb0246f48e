//! Goal: a batch program stops for requests whatever it does, and otherwise behaves as without
//! checks. Method: C programs built for each way of checking, the release build of the preload
//! library, and a service, in separate processes.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::Ordering::Relaxed;

use crate::stage::{Batch, Board, Run, Toggle, compile, cpus, idle, library, until};
use elfen_rt::nap::{Kind, block};
use elfen_rt::signal::lane::LaneState;

/// The ways and their compiler flags. Patched functions come with and without room for the whole
/// check, one byte short of it, and at a fixed address.
const WAYS: [(&str, &[&str]); 10] = [
    ("inline", &["-DINLINE"]),
    ("inline-no-pie", &["-DINLINE", "-fno-pie", "-no-pie"]),
    ("mcount", &["-pg"]),
    ("fentry", &["-pg", "-mfentry"]),
    ("cyg", &["-finstrument-functions"]),
    ("patch", &["-fpatchable-function-entry=43"]),
    ("patch-pair", &["-fpatchable-function-entry=19", "-fno-pie", "-no-pie"]),
    ("patch-jump", &["-fpatchable-function-entry=5"]),
    ("patch-almost", &["-fpatchable-function-entry=18"]),
    ("patch-cet", &["-fpatchable-function-entry=43", "-fcf-protection=full"]),
];

/// The programs are built once for all tests.
fn programs() -> &'static [(&'static str, PathBuf)] {
    static BUILT: OnceLock<Vec<(&str, PathBuf)>> = OnceLock::new();
    BUILT.get_or_init(|| {
        let build = |(way, flags): (&'static str, &[&str])| {
            Some((way, compile("programs.c", &format!("programs-{way}"), flags)?))
        };
        WAYS.into_iter().filter_map(build).collect()
    })
}

/// The program for one way of checking, if the compiler supports it.
pub(crate) fn program(way: &str) -> Option<&'static Path> {
    programs().iter().find(|(found, _)| *found == way).map(|(_, program)| program.as_path())
}

pub(crate) fn plain() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| compile("programs.c", "programs-plain", &[]).unwrap())
}

#[test]
fn every_way_stops_a_batch_for_a_request_and_lets_it_go_on() {
    for (way, program) in programs() {
        let (run, mut worker) = Run::new();
        let board = Board::new();
        let mut batch = Batch::start(run.batch(program).args(["loop", &board.id()]));
        for request in 1..=10 {
            let before = board.progress();
            until(way, || board.progress() > before && run.is(LaneState::Running));
            worker.begin(request);
            until(way, || run.is(LaneState::Napping));
            // Two milliseconds on its lane, in which it could make much progress.
            let (before, from_ns) = (board.progress(), batch.busy_ns());
            until(way, || batch.busy_ns() > from_ns + 2_000_000);
            assert_eq!(board.progress(), before, "{way}: a napping thread makes no progress");
            worker.end();
        }
        let before = board.progress();
        until(way, || board.progress() > before);
        board.stop();
        assert!(batch.succeeds(), "{way}");
        assert_eq!(run.lane().naps.load(Relaxed), 10, "{way}");
    }
}

/// Goal: a blocked thread leaves its lane to others, and returns when it is woken. Method: the test
/// plays the waker.
#[test]
fn a_thread_that_blocks_sleeps_in_the_kernel() {
    for way in ["inline", "patch", "mcount"] {
        let Some(program) = program(way) else { continue };
        let (run, mut worker) = Run::new();
        run.nap_by(Kind::Block);
        let board = Board::new();
        let mut batch = Batch::start(run.batch(program).args(["loop", &board.id()]));
        for request in 1..=10 {
            let before = board.progress();
            until(way, || board.progress() > before && run.is(LaneState::Running));
            worker.begin(request);
            until(way, || run.is(LaneState::Napping) && batch.sleeps());
            let before = board.progress();
            worker.end();
            block::wake(&run.lane().wakes);
            until(way, || board.progress() > before);
        }
        board.stop();
        assert!(batch.succeeds(), "{way}");
        assert_eq!(run.lane().naps.load(Relaxed), 10, "{way}");
    }
}

/// A program in which every thread has its own counter.
struct Crowd {
    way: &'static str,
    board: Board,
    batch: Batch,
}

impl Crowd {
    fn start(run: &Run, (way, program): (&'static str, &Path), threads: usize) -> Self {
        let board = Board::of_crowd(threads);
        let mut command = run.batch(program);
        // SAFETY: `idle` makes one system call.
        unsafe { command.pre_exec(idle) };
        let command = command.args(["crowd", &board.id(), &threads.to_string()]);
        let batch = Batch::start(command);
        Self { way, board, batch }
    }

    fn wait_until_each_progresses(&self) {
        let before = self.board.of_each();
        until(self.way, || self.board.of_each().iter().zip(&before).all(|(now, then)| now > then));
    }

    fn wait_until_each_has_run(&self) {
        let threads = self.batch.threads();
        assert_eq!(threads.len(), self.board.of_each().len());
        let before: Vec<u64> = threads.iter().map(|&id| self.batch.switches(id)).collect();
        for (id, before) in threads.into_iter().zip(before) {
            until(self.way, || self.batch.switches(id) > before);
        }
    }

    fn assert_each_stands_still(&self) {
        // In its first turn on the lane, a thread finishes the work that it began before the
        // request.
        self.wait_until_each_has_run();
        let before = self.board.of_each();
        self.wait_until_each_has_run();
        let went_on =
            self.board.of_each().iter().zip(&before).filter(|(now, then)| now != then).count();
        assert_eq!(went_on, 0, "{}: threads that made progress during a request", self.way);
    }
}

/// Goal: every thread of a crowd stops, not only the one on the lane. Method: every thread has its
/// own counter. During a request each thread runs on the lane again and again, and no counter
/// changes.
///
/// Blocked threads take quick turns. Spinning threads leave the lane only when the scheduler
/// preempts them, so there are fewer of them. The crowd runs at SCHED_IDLE, on the lane that no
/// other test uses.
#[test]
fn each_of_a_thousand_threads_stops_for_a_request() {
    let cases = [
        ("inline", Kind::Block, 1000),
        ("mcount", Kind::Block, 1000),
        ("patch", Kind::Block, 1000),
        ("patch", Kind::Spin, 100),
    ];
    for (way, nap, threads) in cases {
        let Some(program) = program(way) else { continue };
        let (run, mut worker) = Run::on_lane(cpus()[1]);
        run.nap_by(nap);
        let mut crowd = Crowd::start(&run, (way, program), threads);
        for request in 1..=2 {
            crowd.wait_until_each_progresses();
            worker.begin(request);
            crowd.assert_each_stands_still();
            worker.end();
        }
        crowd.wait_until_each_progresses();
        crowd.board.stop();
        assert!(crowd.batch.succeeds(), "{way}");
    }
}

/// Goal: code is not changed while threads run. Method: a library that starts a thread before the
/// program does. The lane is busy all the time, so a program with checks would never end.
#[test]
fn a_program_that_has_threads_before_it_starts_is_not_patched() {
    let early = compile("early.c", "early.so", &["-fPIC", "-shared"]).unwrap();
    let Some(program) = program("patch") else { return };
    let (run, mut worker) = Run::new();
    worker.begin(1);
    let mut batch = run.batch(program);
    let preload = elfen_instrument::preload(library(), Some(early.as_os_str()));
    let batch = batch.env("LD_PRELOAD", preload).args(["contexts"]).stdout(Stdio::null());
    let mut batch = batch.spawn().unwrap();
    until("it ends", || batch.try_wait().unwrap().is_some_and(|status| status.success()));
    assert_eq!(run.lane().naps.load(Relaxed), 0);
}

pub(crate) fn output_of(command: &mut Command) -> (String, Option<i32>) {
    let output = command.output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    (String::from_utf8(output.stdout).unwrap(), output.status.code())
}

fn same_with_and_without_checks(arguments: &[&str]) {
    let expected = output_of(Command::new(plain()).args(arguments));
    assert!(expected.0.starts_with(arguments[0]), "{expected:?}");
    for (way, program) in programs() {
        let alone = output_of(Command::new(program).args(arguments));
        assert_eq!(alone, expected, "{way}, started by hand");
        let (run, worker) = Run::new();
        let _toggle = Toggle::start(worker);
        // A quick program may end between two requests.
        until(way, || {
            let found = output_of(run.batch(program).args(arguments));
            assert_eq!(found, expected, "{way}");
            run.lane().naps.load(Relaxed) > 0
        });
    }
}

#[test]
fn a_thousand_threads_run_as_without_checks() {
    same_with_and_without_checks(&["threads"]);
}

#[test]
fn two_hundred_children_run_as_without_checks() {
    same_with_and_without_checks(&["forks"]);
}

/// Method: all descriptors are closed at each step.
#[test]
fn a_chain_of_programs_runs_as_without_checks() {
    same_with_and_without_checks(&["chain", "20", "1"]);
}

#[test]
fn signal_handlers_on_their_own_stack_run_as_without_checks() {
    same_with_and_without_checks(&["signals"]);
}

#[test]
fn coroutines_on_small_stacks_run_as_without_checks() {
    same_with_and_without_checks(&["contexts"]);
}

#[test]
fn blocked_signals_and_a_changed_affinity_stay() {
    same_with_and_without_checks(&["masked"]);
}

/// The liveness test of a service makes system calls, and the C library's wrappers of some calls
/// would end a cancelled thread.
#[test]
fn a_cancelled_thread_works_until_its_cancellation_point() {
    same_with_and_without_checks(&["cancel"]);
}

/// Goal: a hook changes no register with an argument. Method: arguments in all registers, with
/// vectors of every width that this CPU has, while the lane alternates between busy and idle.
#[test]
fn hooks_preserve_all_arguments() {
    for (way, flags) in WAYS.into_iter().filter(|(way, _)| !way.starts_with("inline")) {
        let flags: Vec<&str> = flags.iter().copied().chain(["-Wno-psabi"]).collect();
        let Some(program) = compile("registers.c", &format!("registers-{way}"), &flags) else {
            continue;
        };
        let (run, worker) = Run::new();
        let _toggle = Toggle::start(worker);
        let found = output_of(run.batch(&program).arg("0.3"));
        assert_eq!(found, ("0 wrong\n".to_owned(), Some(0)), "{way}");
        assert!(run.lane().naps.load(Relaxed) > 0, "{way}: it never napped");
    }
}
