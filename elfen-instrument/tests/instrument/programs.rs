//! Goal: a batch program stops for requests whatever it does, and otherwise behaves as without
//! checks. Method: C programs built for each way of checking, the release build of the preload
//! library, and a service, in separate processes.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::stage::{Batch, Board, Run, Toggle, compile, cpus, idle, library, until};
use elfen_rt::nap::{NapKind, block};
use elfen_rt::signal::lane::LaneState;

type Way = (&'static str, &'static [&'static str]);

/// The ways that every compiler supports, and their flags.
const COMMON_WAYS: [Way; 4] = [
    ("inline", &["-DINLINE"]),
    ("inline-no-pie", &["-DINLINE", "-fno-pie", "-no-pie"]),
    ("mcount", &["-pg"]),
    ("cyg", &["-finstrument-functions"]),
];

/// The ways that need GCC, and their flags. Patched functions come with and without room for the
/// whole check, one byte short of it, and at a fixed address.
const GCC_WAYS: [Way; 6] = [
    ("fentry", &["-pg", "-mfentry"]),
    ("patch", &["-fpatchable-function-entry=43"]),
    ("patch-pair", &["-fpatchable-function-entry=19", "-fno-pie", "-no-pie"]),
    ("patch-jump", &["-fpatchable-function-entry=5"]),
    ("patch-almost", &["-fpatchable-function-entry=18"]),
    ("patch-cet", &["-fpatchable-function-entry=43", "-fcf-protection=full"]),
];

/// The programs for some ways of checking.
type Programs = &'static [(&'static str, PathBuf)];

fn build(ways: &[Way]) -> Vec<(&'static str, PathBuf)> {
    let build =
        |&(way, flags): &Way| (way, compile("programs.c", &format!("programs-{way}"), flags));
    ways.iter().map(build).collect()
}

/// The programs are built once for all tests.
fn common_programs() -> Programs {
    static BUILT: OnceLock<Vec<(&str, PathBuf)>> = OnceLock::new();
    BUILT.get_or_init(|| build(&COMMON_WAYS))
}

fn gcc_programs() -> Programs {
    static BUILT: OnceLock<Vec<(&str, PathBuf)>> = OnceLock::new();
    BUILT.get_or_init(|| build(&GCC_WAYS))
}

/// The program for one way of checking.
pub(crate) fn program(way: &str) -> &'static Path {
    let needs_gcc = GCC_WAYS.iter().any(|(found, _)| *found == way);
    let programs = if needs_gcc { gcc_programs() } else { common_programs() };
    let (_, program) = programs.iter().find(|(found, _)| *found == way).unwrap();
    program
}

pub(crate) fn plain() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| compile("programs.c", "programs-plain", &[]))
}

#[test]
fn every_way_stops_a_batch_for_a_request_and_lets_it_go_on() {
    assert_each_stops_and_goes_on(common_programs());
}

#[test]
#[ignore = "needs GCC"]
fn every_way_of_gcc_stops_a_batch_for_a_request_and_lets_it_go_on() {
    assert_each_stops_and_goes_on(gcc_programs());
}

fn assert_each_stops_and_goes_on(programs: Programs) {
    for (way, program) in programs {
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
    assert_blocked_threads_sleep(&["inline", "mcount"]);
}

#[test]
#[ignore = "needs GCC"]
fn a_thread_that_blocks_in_patched_code_sleeps_in_the_kernel() {
    assert_blocked_threads_sleep(&["patch"]);
}

fn assert_blocked_threads_sleep(ways: &[&str]) {
    for &way in ways {
        let program = program(way);
        let (run, mut worker) = Run::new();
        run.nap_by(NapKind::Block);
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
    assert_crowds_stop(&[("inline", NapKind::Block, 1000), ("mcount", NapKind::Block, 1000)]);
}

#[test]
#[ignore = "needs GCC"]
fn each_of_a_thousand_patched_threads_stops_for_a_request() {
    assert_crowds_stop(&[("patch", NapKind::Block, 1000), ("patch", NapKind::Spin, 100)]);
}

fn assert_crowds_stop(cases: &[(&'static str, NapKind, usize)]) {
    static LANE: Mutex<()> = Mutex::new(());
    let _alone = LANE.lock().unwrap_or_else(PoisonError::into_inner);
    for &(way, nap, threads) in cases {
        let program = program(way);
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
#[ignore = "needs GCC"]
fn a_program_that_has_threads_before_it_starts_is_not_patched() {
    let early = compile("early.c", "early.so", &["-fPIC", "-shared"]);
    let program = program("patch");
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

fn same_with_and_without_checks(programs: Programs, arguments: &[&str]) {
    let expected = output_of(Command::new(plain()).args(arguments));
    assert!(expected.0.starts_with(arguments[0]), "{expected:?}");
    for (way, program) in programs {
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
    same_with_and_without_checks(common_programs(), &["threads"]);
}

#[test]
fn two_hundred_children_run_as_without_checks() {
    same_with_and_without_checks(common_programs(), &["forks"]);
}

/// Method: all descriptors are closed at each step.
#[test]
fn a_chain_of_programs_runs_as_without_checks() {
    same_with_and_without_checks(common_programs(), &["chain", "20", "1"]);
}

#[test]
fn signal_handlers_on_their_own_stack_run_as_without_checks() {
    same_with_and_without_checks(common_programs(), &["signals"]);
}

#[test]
fn coroutines_on_small_stacks_run_as_without_checks() {
    same_with_and_without_checks(common_programs(), &["contexts"]);
}

#[test]
fn blocked_signals_and_a_changed_affinity_stay() {
    same_with_and_without_checks(common_programs(), &["masked"]);
}

/// The liveness test of a service makes system calls, and the C library's wrappers of some calls
/// would end a cancelled thread.
#[test]
fn a_cancelled_thread_works_until_its_cancellation_point() {
    same_with_and_without_checks(common_programs(), &["cancel"]);
}

/// The same programs, built in the ways that need GCC.
mod built_by_gcc {
    use super::{gcc_programs, same_with_and_without_checks};

    #[test]
    #[ignore = "needs GCC"]
    fn a_thousand_threads_run_as_without_checks() {
        same_with_and_without_checks(gcc_programs(), &["threads"]);
    }

    #[test]
    #[ignore = "needs GCC"]
    fn two_hundred_children_run_as_without_checks() {
        same_with_and_without_checks(gcc_programs(), &["forks"]);
    }

    #[test]
    #[ignore = "needs GCC"]
    fn a_chain_of_programs_runs_as_without_checks() {
        same_with_and_without_checks(gcc_programs(), &["chain", "20", "1"]);
    }

    #[test]
    #[ignore = "needs GCC"]
    fn signal_handlers_on_their_own_stack_run_as_without_checks() {
        same_with_and_without_checks(gcc_programs(), &["signals"]);
    }

    #[test]
    #[ignore = "needs GCC"]
    fn coroutines_on_small_stacks_run_as_without_checks() {
        same_with_and_without_checks(gcc_programs(), &["contexts"]);
    }

    #[test]
    #[ignore = "needs GCC"]
    fn blocked_signals_and_a_changed_affinity_stay() {
        same_with_and_without_checks(gcc_programs(), &["masked"]);
    }

    #[test]
    #[ignore = "needs GCC"]
    fn a_cancelled_thread_works_until_its_cancellation_point() {
        same_with_and_without_checks(gcc_programs(), &["cancel"]);
    }
}

/// Goal: a hook changes no register with an argument. Method: arguments in all registers, with
/// vectors of every width that this CPU has, while the lane alternates between busy and idle.
#[test]
fn hooks_preserve_all_arguments() {
    assert_arguments_are_preserved(&COMMON_WAYS);
}

#[test]
#[ignore = "needs GCC"]
fn hooks_of_gcc_preserve_all_arguments() {
    assert_arguments_are_preserved(&GCC_WAYS);
}

fn assert_arguments_are_preserved(ways: &[Way]) {
    for (way, flags) in ways.iter().filter(|(way, _)| !way.starts_with("inline")) {
        let flags: Vec<&str> = flags.iter().copied().chain(["-Wno-psabi"]).collect();
        let program = compile("registers.c", &format!("registers-{way}"), &flags);
        let (run, worker) = Run::new();
        let _toggle = Toggle::start(worker);
        let found = output_of(run.batch(&program).arg("0.3"));
        assert_eq!(found, ("0 wrong\n".to_owned(), Some(0)), "{way}");
        assert!(run.lane().naps.load(Relaxed) > 0, "{way}: it never napped");
    }
}
