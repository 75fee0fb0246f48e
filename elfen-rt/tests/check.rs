//! Goal: a thread with checks naps while the request lane of its current lane is busy, and a check
//! has no other effect. Method: two processes. The test plays the service and `elfen run`. Its
//! child is this same program, started again as the batch. The child's progress and its lanes are
//! in shared memory.

use std::process::{Child, Command};
use std::sync::atomic::{AtomicU64, Ordering::*};
use std::time::{Duration, Instant};

use elfen_rt::inherit::Inherited;
use elfen_rt::memory::{Access, Memory};
use elfen_rt::process::pid_namespace;
use elfen_rt::service::{Service, Worker};
use elfen_rt::signal::control::{ControlSlot, PolicyKind, Settings};
use elfen_rt::signal::lane::{LaneSlot, LaneState};
use elfen_rt::signal::page::{Page, Slot};

/// Request lanes that no machine has, so that only the test makes them busy.
const REQUEST_CPUS: [u32; 2] = [6001, 6002];

/// How long the test waits for an expected event.
const PATIENCE: Duration = Duration::from_secs(60);

fn segment(bytes: usize) -> Memory {
    let memory = Memory::create_segment(libc::IPC_PRIVATE, bytes, 0o600).unwrap();
    memory.remove_name().unwrap();
    memory
}

fn page<S: Slot>(slots: u32) -> Page<S> {
    Page::format(segment(Page::<S>::bytes(slots)), slots, pid_namespace(), &[0; 32]).unwrap()
}

fn id<S: Slot>(page: &Page<S>) -> i32 {
    page.memory().segment_id().unwrap()
}

/// Words that the test and its child both write.
struct Board {
    memory: Memory,
}

impl Board {
    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < 8);
        // SAFETY: the segment has 8 words, is aligned to a page, and lives as long as `self`.
        let word = unsafe { self.memory.base().cast::<AtomicU64>().add(index) };
        // SAFETY: as above, and both sides use atomics.
        unsafe { word.as_ref() }
    }

    /// The child's progress counter.
    fn progress(&self) -> &AtomicU64 {
        self.word(0)
    }

    /// The child ends when this is set.
    fn stop(&self) -> &AtomicU64 {
        self.word(1)
    }

    /// The test's next order to the child.
    fn order(&self) -> &AtomicU64 {
        self.word(2)
    }

    /// The process that counts: the child, or a child of it.
    fn counter(&self) -> &AtomicU64 {
        self.word(3)
    }
}

/// Two CPUs that this process may use; the same CPU twice if there is only one.
fn cpus() -> [u32; 2] {
    // SAFETY: an all-zero cpu_set_t is an empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is a local value, and its size is passed along.
    assert_eq!(unsafe { libc::sched_getaffinity(0, size_of_val(&set), &mut set) }, 0);
    // SAFETY: the kernel filled `set` in, and every index is below its size.
    let mut usable = (0..1024u32).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu as usize, &set) });
    let first = usable.next().unwrap();
    [first, usable.next().unwrap_or(first)]
}

fn pin(cpu: u32) {
    // SAFETY: an all-zero cpu_set_t is an empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `cpu` came from `cpus`.
    unsafe { libc::CPU_SET(cpu as usize, &mut set) };
    // SAFETY: `set` is a local value, and its size is passed along.
    assert_eq!(unsafe { libc::sched_setaffinity(0, size_of_val(&set), &set) }, 0);
}

/// Waits for an event that must happen.
fn until(what: &str, happens: impl Fn() -> bool) {
    let start = Instant::now();
    while !happens() {
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// The CPU time of a process.
fn busy_ns(process: i32) -> i64 {
    let mut clock = 0;
    // SAFETY: `clock` is a local value.
    assert_eq!(unsafe { libc::clock_getcpuclockid(process, &mut clock) }, 0);
    let mut used = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `used` is a local value.
    assert_eq!(unsafe { libc::clock_gettime(clock, &mut used) }, 0);
    used.tv_sec * 1_000_000_000 + used.tv_nsec
}

fn service_name(name: &str) -> String {
    format!("{name}-{}", std::process::id())
}

/// A run of two pairs, its service, and its batch.
struct Run {
    lanes: Page<LaneSlot>,
    control: Page<ControlSlot>,
    service: &'static Service,
    board: Board,
    batch: Child,
}

impl Run {
    fn start(name: &str, role: &str, settings: &Settings) -> (Self, [Worker<'static>; 2]) {
        let name = service_name(name);
        // The service lives as long as the test, so its workers need no owner.
        let service: &'static Service = Box::leak(Box::new(Service::open(&name, 2).unwrap()));
        let workers = [0, 1].map(|at: u32| service.claim(at, REQUEST_CPUS[at as usize]).unwrap());
        let (lanes, control) = (page::<LaneSlot>(2), page::<ControlSlot>(1));
        let batch_cpus = cpus();
        // With one CPU, no thread ever runs on the second pair's batch lane.
        let second = if batch_cpus[0] == batch_cpus[1] { 6003 } else { batch_cpus[1] };
        lanes.slot(0).unwrap().assign(batch_cpus[0], REQUEST_CPUS[0]);
        lanes.slot(1).unwrap().assign(second, REQUEST_CPUS[1]);
        control.slot(0).unwrap().publish(settings);
        let board = Board { memory: segment(64) };
        let page = id(service.page());
        let inherited = Inherited {
            lanes: id(&lanes),
            control: id(&control),
            tasks: None,
            service: Some(page),
        };
        let batch = batch(role, &board).env("ELFEN_RUN", inherited.to_string()).spawn().unwrap();
        (Self { lanes, control, service, board, batch }, workers)
    }

    fn lane(&self, index: u32) -> &LaneSlot {
        self.lanes.slot(index).unwrap()
    }

    fn is(&self, index: u32, state: LaneState) -> bool {
        self.lane(index).state().is_some_and(|(found, _)| found == state)
    }

    fn progress(&self) -> u64 {
        self.board.progress().load(Relaxed)
    }

    fn assert_runs(&self) {
        let before = self.progress();
        until("the batch runs", || self.progress() > before);
    }

    /// Asserts that the batch naps: it makes no progress although it has its CPU for 2 ms.
    fn assert_naps(&self) {
        let counter = i32::try_from(self.board.counter().load(Relaxed)).unwrap();
        let (before, from_ns) = (self.progress(), busy_ns(counter));
        until("the batch is on its lane", || busy_ns(counter) > from_ns + 2_000_000);
        assert_eq!(self.progress(), before, "a napping thread makes no progress");
    }

    fn finish(mut self) {
        self.board.stop().store(1, Relaxed);
        assert!(self.batch.wait().unwrap().success());
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // After a failed test, the batch still runs.
        let _killed = self.batch.kill();
        let _reaped = self.batch.wait();
        self.service.page().memory().remove_name().unwrap();
    }
}

const ROLE: &str = "CHECK_TEST_ROLE";
const BOARD: &str = "CHECK_TEST_BOARD";
const NAME: &str = "CHECK_TEST_SERVICE";

/// Starts this program again as a batch.
fn batch(role: &str, board: &Board) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env(ROLE, role).env(BOARD, board.memory.segment_id().unwrap().to_string());
    command
}

/// Runs before the test runner, because a process that was started as a batch runs no tests.
#[used]
#[unsafe(link_section = ".init_array")]
static BATCH_IF_ASKED: extern "C" fn() = batch_if_asked;

extern "C" fn batch_if_asked() {
    if let Ok(role) = std::env::var(ROLE) {
        batch_program(&role);
        std::process::exit(0);
    }
}

fn batch_program(role: &str) {
    let id = std::env::var(BOARD).unwrap().parse().unwrap();
    let board = Board { memory: Memory::attach_id(id, Access::Write).unwrap() };
    let [first, second] = cpus();
    pin(first);
    match role {
        "loop" => run_until_stopped(&board, || ()),
        "float" => run_until_stopped(&board, || {
            if board.order().swap(0, Relaxed) == 1 {
                pin(second);
            }
        }),
        "critical" => {
            let held = elfen_rt::critical();
            while board.order().load(Relaxed) == 0 {
                elfen_rt::check!();
                board.progress().fetch_add(1, Relaxed);
            }
            drop(held);
            run_until_stopped(&board, || ());
        }
        "errno" => errno_is_kept(&board),
        "fork" => fork(&board),
        "serve" => serve(),
        other => panic!("no role {other}"),
    }
}

fn run_until_stopped(board: &Board, also: impl Fn()) {
    board.counter().store(std::process::id().into(), Relaxed);
    while board.stop().load(Relaxed) == 0 {
        elfen_rt::check!();
        board.progress().fetch_add(1, Relaxed);
        also();
    }
}

fn set_errno(value: i32) {
    // SAFETY: the call takes nothing, and returns the address of this thread's errno.
    let at = unsafe { libc::__errno_location() };
    // SAFETY: errno lives as long as this thread, and only this thread writes it.
    unsafe { *at = value };
}

fn errno_is_kept(board: &Board) {
    board.counter().store(std::process::id().into(), Relaxed);
    while board.stop().load(Relaxed) == 0 {
        set_errno(77);
        elfen_rt::check!();
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(77), "a check keeps errno");
        board.progress().fetch_add(1, Relaxed);
    }
}

/// Forks a child that goes on with checks, and waits for it.
fn fork(board: &Board) {
    elfen_rt::check!();
    // SAFETY: the child only makes loads, stores and checks, then exits.
    if unsafe { libc::fork() } == 0 {
        run_until_stopped(board, || ());
        // SAFETY: _exit ends the child without the parent's exit handlers.
        unsafe { libc::_exit(0) };
    }
    // SAFETY: wait accepts a null pointer for the status.
    unsafe { libc::wait(std::ptr::null_mut()) };
}

#[test]
fn a_busy_request_lane_stops_the_batch_and_an_idle_one_lets_it_run() {
    for role in ["loop", "errno", "fork"] {
        let (run, [mut worker, _other]) = Run::start(role, role, &Settings::BORROW_IDLE);
        for round in 1..=20 {
            run.assert_runs();
            assert!(run.is(0, LaneState::Running), "{role}, {round}");
            worker.begin(round);
            until("the batch naps", || run.is(0, LaneState::Napping));
            run.assert_naps();
            worker.end();
        }
        run.assert_runs();
        assert_eq!(run.lane(0).naps.load(Relaxed), 20, "{role}");
        assert_eq!(run.lane(0).reaction.count(), 20, "{role}: each reaction is measured");
        run.finish();
    }
}

#[test]
fn a_queue_stops_the_batch_as_well() {
    let (run, [mut worker, _other]) = Run::start("queue", "loop", &Settings::BORROW_IDLE);
    run.assert_runs();
    worker.begin(1);
    until("the batch naps", || run.is(0, LaneState::Napping));
    run.service.set_queue_len(0, 3);
    worker.end();
    run.assert_naps();
    run.service.set_queue_len(0, 0);
    run.assert_runs();
    run.finish();
}

/// Method: the batch moves to the second pair's lane while only the second request lane is busy.
#[test]
fn a_thread_that_moves_checks_for_its_new_lane() {
    assert_ne!(cpus()[0], cpus()[1], "needs two CPUs");
    let (run, [_first, mut second]) = Run::start("float", "float", &Settings::BORROW_IDLE);
    run.assert_runs();
    second.begin(1);
    run.assert_runs();
    assert!(!run.is(1, LaneState::Napping), "the batch is not on that lane yet");
    run.board.order().store(1, Relaxed);
    until("the batch naps on its new lane", || run.is(1, LaneState::Napping));
    run.assert_naps();
    second.end();
    run.assert_runs();
    run.finish();
}

/// Method: a service in another process is killed while a request runs in its slot.
#[test]
fn a_dead_service_does_not_stop_the_batch() {
    let (run, [ours, _other]) = Run::start("dead", "loop", &Settings::BORROW_IDLE);
    run.assert_runs();
    drop(ours);
    let mut service = batch("serve", &run.board).env(NAME, service_name("dead")).spawn().unwrap();
    until("the batch naps", || run.is(0, LaneState::Napping));
    service.kill().unwrap();
    service.wait().unwrap();
    let slot = run.service.page().slot(0).unwrap();
    assert_ne!(
        slot.running_request.load(Relaxed),
        0,
        "the dead service's request stays in its slot"
    );
    run.assert_runs();
    run.finish();
}

/// Works on one request for ever.
fn serve() -> ! {
    let service = Service::open(&std::env::var(NAME).unwrap(), 2).unwrap();
    let mut worker = service.claim(0, REQUEST_CPUS[0]).unwrap();
    worker.begin(5);
    loop {
        std::thread::park();
    }
}

/// Method: in a critical section the batch runs next to a request until the bound. Leaving the
/// section is a check.
#[test]
fn a_critical_section_delays_a_nap_and_does_not_prevent_it() {
    let (run, [mut worker, _other]) = Run::start("critical", "critical", &Settings::BORROW_IDLE);
    run.assert_runs();
    worker.begin(1);
    until("the batch naps in its critical section", || run.is(0, LaneState::Napping));
    worker.end();
    run.assert_runs();
    run.board.order().store(1, Relaxed);
    run.assert_runs();
    run.finish();
}

#[test]
fn a_budget_is_shared_and_ends() {
    let budget_ns = 3_000_000;
    let fixed = Settings { policy: PolicyKind::FixedBudget, budget_ns, ..Settings::BORROW_IDLE };
    let (run, [mut worker, _other]) = Run::start("budget", "loop", &fixed);
    // The thread's first check sees the idle lane, which a budget requires.
    run.assert_runs();
    worker.begin(1);
    until("the budget is spent", || run.is(0, LaneState::Napping));
    let slot = run.service.page().slot(0).unwrap();
    let (_, napped_at_ns) = run.lane(0).state().unwrap();
    let shared_ns = napped_at_ns - slot.request_started_ns.load(Relaxed);
    assert!(shared_ns >= budget_ns, "napped after {shared_ns} ns of {budget_ns}");
    run.assert_naps();
    worker.end();
    run.assert_runs();
    run.finish();
}

/// Goal: a request on an idle lane gets its budget, although checks on an idle lane do not take the
/// slow path. Method: requests that end within their budgets, so that the batch never naps.
#[test]
fn every_request_that_finds_the_lane_idle_has_a_budget() {
    let budget_ns = u64::MAX / 2;
    let fixed = Settings { policy: PolicyKind::FixedBudget, budget_ns, ..Settings::BORROW_IDLE };
    let (run, [mut worker, _other]) = Run::start("budgets", "loop", &fixed);
    run.assert_runs();
    let [state, _, finished, _] = &run.lane(0).inputs.policy_state;
    for request in 1..=20 {
        until("a check sees the idle lane", || {
            state.load(Relaxed) == 1 && finished.load(Relaxed) == request - 1
        });
        worker.begin(request);
        until("a check gives the request a budget", || state.load(Relaxed) == 2);
        run.assert_runs();
        worker.end();
    }
    assert_eq!(run.lane(0).naps.load(Relaxed), 0);
    run.finish();
}

#[test]
fn a_changed_policy_applies_from_the_next_request() {
    let (run, [mut worker, _other]) = Run::start("change", "loop", &Settings::BORROW_IDLE);
    run.assert_runs();
    let generous = Settings {
        policy: PolicyKind::FixedBudget,
        budget_ns: u64::MAX / 2,
        ..Settings::BORROW_IDLE
    };
    run.control.slot(0).unwrap().publish(&generous);
    worker.begin(1);
    until("the batch naps: no check has seen an idle lane since", || run.is(0, LaneState::Napping));
    worker.end();
    run.assert_runs();
    worker.begin(2);
    run.assert_runs();
    assert!(run.is(0, LaneState::Running));
    worker.end();
    run.finish();
}

/// Goal: without a run, or with an invalid `ELFEN_RUN`, a batch runs on as if it had no checks.
/// Method: a batch for each invalid value.
#[test]
fn without_a_run_checks_have_no_effect() {
    let broken =
        ["", "2 2 3", "2 0 0 - - - -", "2 0 0 - - - nobody", "2 0 0 2 2 2 -", "9 1 1 1 1 1 1"];
    for inherited in [None].into_iter().chain(broken.map(Some)) {
        let board = Board { memory: segment(64) };
        let mut command = batch("errno", &board);
        command.env_remove("ELFEN_RUN");
        if let Some(inherited) = inherited {
            command.env("ELFEN_RUN", inherited);
        }
        let mut child = command.spawn().unwrap();
        until("the batch runs", || board.progress().load(Relaxed) > 1000);
        board.stop().store(1, Relaxed);
        assert!(child.wait().unwrap().success(), "{inherited:?}");
    }
}
