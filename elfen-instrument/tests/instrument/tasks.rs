//! Goal: a batch obeys the kernel's task map exactly as long as the kernel writes it. Method: the
//! real eBPF program, and a real request lane with a thread that works and sleeps.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use elfen_kernel::task_map::Loaded;
use elfen_rt::inherit::TaskMapSource;
use elfen_rt::signal::lane::LaneState;
use elfen_rt::signal::task::TaskMap;

use crate::programs::program;
use crate::stage::{Batch, Board, Run, cpus, pin, until};

/// The descriptor numbers by which the batch finds the map and its link.
const DESCRIPTORS: [i32; 2] = [900, 901];

/// Loads and attaches the kernel's program for this test.
#[track_caller]
fn attach() -> (Loaded, TaskMap) {
    let loaded = Loaded::load().unwrap_or_else(|error| panic!("needs root and eBPF: {error}"));
    let map = loaded.map().unwrap();
    (loaded, map)
}

/// A thread on the request lane that works on demand. It ends when this value drops, also when a
/// test fails.
struct RequestThread {
    order: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

const SLEEP: u64 = 0;
const WORK: u64 = 1;
const END: u64 = 2;

impl RequestThread {
    fn start(cpu: u32) -> Self {
        let order = Arc::new(AtomicU64::new(SLEEP));
        let requested = order.clone();
        let serve = move || {
            pin(cpu).unwrap();
            loop {
                match requested.load(Relaxed) {
                    SLEEP => thread::sleep(Duration::from_micros(200)),
                    WORK => std::hint::spin_loop(),
                    _ => return,
                }
            }
        };
        Self { order, thread: Some(thread::spawn(serve)) }
    }

    fn work(&self) {
        self.order.store(WORK, Relaxed);
    }

    fn sleep(&self) {
        self.order.store(SLEEP, Relaxed);
    }
}

impl Drop for RequestThread {
    fn drop(&mut self) {
        self.order.store(END, Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// Fails unless the CPU idles at least 2 % of a second, as seen from another CPU. Other programs on
/// the CPU make the batch nap too, which is correct but would disturb the test. Tests that run at
/// the same time compile, and finish within a minute.
#[track_caller]
fn require_idle(map: &TaskMap, cpu: u32) {
    const SECONDS: u32 = 60;
    const LOOKS: usize = 1000;
    let slot = map.slot(cpu).unwrap();
    let from = cpus().into_iter().find(|&other| other != cpu).unwrap();
    let look = || {
        pin(from).unwrap();
        let idles = || {
            thread::sleep(Duration::from_millis(1));
            !slot.is_busy()
        };
        (0..SECONDS).any(|_| (0..LOOKS).filter(|_| idles()).count() >= LOOKS / 50)
    };
    let idle = thread::scope(|scope| scope.spawn(look).join().unwrap());
    assert!(idle, "needs two idle CPUs: others keep CPU {cpu} busy");
}

fn batch(run: &Run, map: &TaskMap, program: &Path) -> Command {
    let mut command = run.batch_with(program, Some(TaskMapSource::Descriptors(DESCRIPTORS)));
    let ours = map.descriptors().unwrap();
    let ours = [ours.tasks.raw(), ours.link.raw()];
    let hand_on = move || {
        for (from, to) in ours.into_iter().zip(DESCRIPTORS) {
            // SAFETY: takes numbers; the copy has no close-on-exec flag.
            if unsafe { libc::dup2(from, to) } < 0 {
                return Err(std::io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: `hand_on` only makes system calls.
    unsafe { command.pre_exec(hand_on) };
    command
}

#[test]
#[ignore = "needs root, two idle CPUs, eBPF and GCC"]
fn a_thread_on_the_request_lane_stops_the_batch() {
    let [first, second] = cpus();
    assert_ne!(first, second, "needs two CPUs");
    let (_loaded, map) = attach();
    require_idle(&map, second);
    for way in ["inline", "patch", "fentry"] {
        let program = program(way);
        let run = Run::on_tasks(first, second);
        let (board, request) = (Board::new(), RequestThread::start(second));
        let mut batch = Batch::start(batch(&run, &map, program).args(["loop", &board.id()]));
        for _ in 0..5 {
            let before = board.progress();
            until(way, || board.progress() > before + 1000);
            request.work();
            until(way, || run.is(LaneState::Napping));
            request.sleep();
        }
        board.stop();
        assert!(batch.succeeds(), "{way}");
    }
}

/// Goal: a batch does not nap forever after the eBPF program is gone. Method: the batch closes all
/// its descriptors, the lane is busy, and the last process that holds the map closes it.
#[test]
#[ignore = "needs root, two idle CPUs, eBPF and GCC"]
fn a_task_map_that_is_no_longer_written_stops_no_batch() {
    let [first, second] = cpus();
    assert_ne!(first, second, "needs two CPUs");
    let (loaded, map) = attach();
    let program = program("patch");
    require_idle(&map, second);
    let run = Run::on_tasks(first, second);
    let (board, request) = (Board::new(), RequestThread::start(second));
    let mut batch = batch(&run, &map, program);
    let mut batch = Batch::start(batch.args(["loop-closed", &board.id()]));
    until("it runs without descriptors", || board.progress() > 1000);
    request.work();
    until("it naps", || run.is(LaneState::Napping));
    drop((map, loaded));
    let before = board.progress();
    until("it goes on", || board.progress() > before + 1000);
    board.stop();
    assert!(batch.succeeds());
}

/// Method: the batch gets descriptors that do not belong to the map.
#[test]
fn descriptors_of_other_files_are_ignored() {
    let program = program("mcount");
    let [first, second] = cpus();
    let run = Run::on_tasks(first, second);
    let board = Board::new();
    let mut batch = run.batch_with(program, Some(TaskMapSource::Descriptors([0, 1])));
    let mut batch = Batch::start(batch.args(["loop", &board.id()]));
    until("it runs", || board.progress() > 1000);
    board.stop();
    assert!(batch.succeeds());
}
