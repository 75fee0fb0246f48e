//! Goal: a lane's steps decide by what its request lane does, and its slot says what the
//! batch borrowed and overlapped.
//! Method: the test is the kernel and the service: it writes a task map of its own with a simulated
//! clock, and steps at chosen times, as a guard and as a thread that checks.

mod histories;

use std::sync::atomic::Ordering::Relaxed;

use elfen_rt::lane::{Hand, Lane, Memory as LaneMemory};
use elfen_rt::memory::Memory;
use elfen_rt::policy::Verdict::{self, Nap, Run};
use elfen_rt::service::{Service, Worker};
use elfen_rt::signal::control::{ControlSlot, PolicyKind, Settings};
use elfen_rt::signal::lane::{LaneInputs, LaneSlot, LaneState, REQUEST_OFFLINE};
use elfen_rt::signal::page::{Page, Slot};
use elfen_rt::signal::service::ServiceReader;
use elfen_rt::signal::task::{TaskMap, TaskSlot, UNKNOWN};

const US: u64 = 1_000;
const REQUEST: u32 = 0;
const BATCH: u32 = 1;
const CLAIM: u64 = 7;

fn page<S: Slot>() -> Page<S> {
    let memory = Memory::create_segment(libc::IPC_PRIVATE, Page::<S>::bytes(1), 0o600).unwrap();
    memory.remove_name().unwrap();
    Page::format(memory, 1, 0, &[0; 32]).unwrap()
}

/// One pair with the kernel's half played by the test.
struct Pair {
    tasks: TaskMap,
    control: Page<ControlSlot>,
    lane: Page<LaneSlot>,
    /// The guard's own.
    inputs: LaneInputs,
    memory: LaneMemory,
}

impl Pair {
    fn new() -> Self {
        let (control, lane) = (page::<ControlSlot>(), page::<LaneSlot>());
        lane.slot(0).unwrap().account_claim.store(CLAIM, Relaxed);
        let (tasks, inputs, memory) =
            (TaskMap::for_tests(2), LaneInputs::default(), LaneMemory::default());
        let pair = Self { tasks, control, lane, inputs, memory };
        pair.account(|account| account.claim.store(CLAIM, Relaxed));
        pair
    }

    fn lane(&self) -> Lane<'_> {
        self.with_service(None)
    }

    fn with_service<'a>(&'a self, service: Option<&'a ServiceReader>) -> Lane<'a> {
        Lane {
            batch_cpu: BATCH,
            request_cpu: REQUEST,
            tasks: Some(&self.tasks),
            service,
            control: self.control.slot(0).unwrap(),
            slot: self.slot(),
            inputs: &self.slot().inputs,
            memory: &self.memory,
        }
    }

    /// The same for one that steps as this hand.
    fn in_hand<'a>(&'a self, hand: Hand, service: Option<&'a ServiceReader>) -> Lane<'a> {
        let lane = self.with_service(service);
        match hand {
            Hand::Guard => Lane { inputs: &self.inputs, ..lane },
            Hand::Check => lane,
        }
    }

    fn set_hotplug(&self, bits: u64) {
        for inputs in [&self.inputs, &self.slot().inputs] {
            inputs.hotplug.store(bits, Relaxed);
        }
    }

    fn slot(&self) -> &LaneSlot {
        self.lane.slot(0).unwrap()
    }

    fn request(&self) -> &TaskSlot {
        self.tasks.slot(REQUEST).unwrap()
    }

    fn account(&self, write: impl Fn(&elfen_rt::signal::account::Account)) {
        write(self.tasks.account_for_tests(BATCH, 0));
    }

    /// The request lane switches, as `kernel/bpf` writes it for a watched CPU.
    fn switch(&self, task: u64, now_ns: u64) {
        let slot = self.request();
        let since_ns = slot.busy_since_ns.load(Relaxed);
        slot.task.store(task, Relaxed);
        slot.switched_at_ns.store(now_ns, Relaxed);
        if task == 0 && since_ns != 0 {
            slot.busy_ns.fetch_add(now_ns - since_ns, Relaxed);
            slot.busy_since_ns.store(0, Relaxed);
        } else if task != 0 && since_ns == 0 {
            slot.busy_since_ns.store(now_ns, Relaxed);
        }
    }

    /// The batch's task is switched in on its lane, or out of it.
    fn batch_runs(&self, runs: bool, now_ns: u64) {
        let busy_ns = self.request().snapshot().unwrap().busy_until_ns(now_ns);
        self.account(|account| {
            let since_ns = account.since_ns.swap(if runs { now_ns } else { 0 }, Relaxed);
            if since_ns != 0 {
                account.ran_ns.fetch_add(now_ns - since_ns, Relaxed);
                account.shared_ns.fetch_add(busy_ns - account.busy_at_ns.load(Relaxed), Relaxed);
            }
            account.busy_at_ns.store(busy_ns, Relaxed);
        });
    }

    /// A guard's turn: it takes the lane from the batch, steps, and gives it
    /// back if the batch may run.
    fn guard(&self, stopped_ns: u64, now_ns: u64) -> Verdict {
        self.batch_runs(false, stopped_ns);
        let verdict =
            self.in_hand(Hand::Guard, None).step(Hand::Guard, stopped_ns, now_ns).verdict();
        if verdict == Run {
            self.batch_runs(true, now_ns);
        }
        verdict
    }

    fn check(&self, now_ns: u64) -> Verdict {
        self.lane().step(Hand::Check, now_ns, now_ns).verdict()
    }

    /// Borrowed, overlapped, napped.
    fn counted(&self) -> [u64; 3] {
        let slot = self.slot();
        [&slot.borrowed_ns, &slot.overlapped_ns, &slot.napped_ns].map(|word| word.load(Relaxed))
    }
}

#[test]
fn a_check_overlaps_until_it_sees_and_naps_from_then_on() {
    let pair = Pair::new();
    pair.switch(0, 10 * US);
    pair.batch_runs(true, 100 * US);
    assert_eq!(pair.check(100 * US), Run);
    pair.switch(7, 150 * US);
    assert_eq!(pair.check(180 * US), Nap);
    // It naps on its CPU, which to the kernel is running.
    pair.switch(0, 400 * US);
    assert_eq!(pair.check(403 * US), Run);
    pair.lane().leave(500 * US);
    assert_eq!(pair.counted(), [(50 + 97) * US, 30 * US, 223 * US]);
    assert_eq!(pair.slot().reaction.max_ns(), 30 * US);
    assert_eq!(pair.slot().wake.max_ns(), 3 * US);
    assert_eq!(pair.slot().naps.load(Relaxed), 1);
    assert_eq!(pair.slot().state(), Some((LaneState::Off, 500 * US)));
}

#[test]
fn a_guard_counts_until_it_got_the_lane() {
    let pair = Pair::new();
    pair.switch(0, 10 * US);
    assert_eq!(pair.guard(90 * US, 100 * US), Run);
    pair.switch(7, 150 * US);
    assert_eq!(pair.guard(180 * US, 195 * US), Nap);
    assert_eq!(pair.counted(), [50 * US, 30 * US, 0]);
    assert_eq!(pair.slot().reaction.max_ns(), 30 * US);
    assert_eq!(pair.slot().state(), Some((LaneState::Held, 195 * US)));
    pair.switch(0, 400 * US);
    assert_eq!(pair.guard(403 * US, 403 * US), Run);
    pair.switch(7, 450 * US);
    // It was on its way to the lane when the request began.
    assert_eq!(pair.guard(440 * US, 460 * US), Nap);
    assert_eq!(pair.counted()[..2], [(50 + 37) * US, 30 * US]);
    assert_eq!(pair.slot().reaction.count(), 2);
}

/// The scheduler gives a task at SCHED_IDLE a little of the lane that its guard holds, and a
/// stranger may take the lane from both.
#[test]
fn what_leaks_in_beside_a_guard_is_overlap_and_a_strangers_time_is_nobodys() {
    let pair = Pair::new();
    pair.switch(0, 10 * US);
    pair.guard(20 * US, 20 * US);
    pair.switch(7, 100 * US);
    pair.guard(110 * US, 110 * US);
    pair.batch_runs(true, 300 * US);
    pair.batch_runs(false, 304 * US);
    // From 304 to 900 a stranger runs: the kernel counts nothing for the batch.
    pair.switch(0, 900 * US);
    pair.guard(900 * US, 900 * US);
    assert_eq!(pair.counted()[..2], [80 * US, 14 * US]);
}

/// A thread that naps by itself is on its CPU, and the guard leaves it at that.
#[test]
fn a_guard_over_a_napping_thread_counts_no_overlap() {
    let pair = Pair::new();
    pair.switch(0, 10 * US);
    pair.batch_runs(true, 20 * US);
    pair.check(20 * US);
    pair.switch(7, 100 * US);
    assert_eq!(pair.check(101 * US), Nap);
    assert_eq!(pair.guard(500 * US, 500 * US), Nap);
    pair.batch_runs(true, 700 * US);
    pair.batch_runs(false, 703 * US);
    pair.switch(0, 900 * US);
    pair.guard(900 * US, 900 * US);
    assert_eq!(pair.counted()[..2], [80 * US, US]);
    assert_eq!(pair.slot().naps.load(Relaxed), 1);
}

/// Between two requests the guard comes first: the thread that naps is still in its nap when the
/// second begins.
#[test]
fn a_thread_that_naps_on_from_one_request_into_the_next_counts_no_overlap() {
    let pair = Pair::new();
    pair.switch(0, 10 * US);
    pair.batch_runs(true, 20 * US);
    pair.check(20 * US);
    pair.switch(7, 100 * US);
    assert_eq!(pair.check(101 * US), Nap);
    pair.switch(0, 200 * US);
    assert_eq!(pair.guard(201 * US, 201 * US), Run);
    pair.switch(7, 205 * US);
    pair.switch(0, 900 * US);
    assert_eq!(pair.check(901 * US), Run);
    pair.lane().leave(1000 * US);
    assert_eq!(pair.counted()[..2], [(80 + 99) * US, US]);
    assert_eq!(pair.slot().naps.load(Relaxed), 1);
}

/// A thread that died in its nap does not hide for ever what the others run.
#[test]
fn a_guard_takes_a_nap_that_outlasts_its_bound_for_over() {
    let pair = Pair::new();
    pair.switch(7, 10 * US);
    pair.batch_runs(true, 20 * US);
    assert_eq!(pair.check(20 * US), Nap);
    let late = 20 * US + 100_000 * US;
    pair.switch(0, 100 * US);
    assert_eq!(pair.guard(late, late), Run);
    pair.switch(7, late + 10 * US);
    pair.batch_runs(false, late + 30 * US);
    pair.lane().leave(late + 30 * US);
    assert_eq!(pair.counted()[..2], [10 * US, 20 * US]);
}

#[test]
fn a_request_that_no_look_met_is_overlapped_all_the_same() {
    let pair = Pair::new();
    pair.switch(0, 10 * US);
    pair.guard(100 * US, 100 * US);
    pair.switch(7, 120 * US);
    pair.switch(0, 127 * US);
    assert_eq!(pair.guard(200 * US, 200 * US), Run);
    assert_eq!(pair.counted(), [93 * US, 7 * US, 0]);
    assert_eq!(pair.slot().reaction.count(), 0);
}

/// A hypervisor can stop a CPU in the middle of its own words: nothing is counted
/// then, and nothing is lost.
#[test]
fn a_slot_that_cannot_be_read_counts_at_the_next_look() {
    let pair = Pair::new();
    pair.switch(0, 10 * US);
    pair.guard(20 * US, 20 * US);
    pair.switch(7, 100 * US);
    pair.switch(0, 110 * US);
    pair.batch_runs(false, 200 * US);
    pair.request().switches_begun.fetch_add(1, Relaxed);
    let step = |now_ns| pair.lane().step(Hand::Guard, now_ns, now_ns).verdict();
    assert_eq!(step(200 * US), Nap, "a lane that switches all the time is busy");
    assert_eq!(pair.counted()[..2], [0, 0]);
    pair.request().switches.fetch_add(1, Relaxed);
    assert_eq!(step(300 * US), Run);
    assert_eq!(pair.counted()[..2], [170 * US, 10 * US]);
}

#[test]
fn reaction_counts_from_idle_to_busy_and_not_from_a_switch_among_tasks() {
    let pair = Pair::new();
    pair.switch(0, 10 * US);
    pair.check(20 * US);
    pair.switch(7, 30 * US);
    pair.switch(8, 40 * US);
    pair.check(50 * US);
    assert_eq!(pair.slot().reaction.max_ns(), 20 * US);
}

#[test]
fn looking_again_during_a_nap_is_the_same_nap() {
    let pair = Pair::new();
    pair.switch(7, 10 * US);
    for now in [20, 30, 40] {
        assert_eq!(pair.check(now * US), Nap);
    }
    pair.lane().leave(60 * US);
    assert_eq!(pair.slot().naps.load(Relaxed), 1);
    assert_eq!(pair.counted(), [0, 0, 40 * US]);
    assert_eq!(pair.slot().reaction.count(), 0, "it never ran next to this request");
}

#[test]
fn an_unknown_task_and_no_source_at_all_count_as_busy_and_an_offline_lane_does_not() {
    let pair = Pair::new();
    pair.request().task.store(UNKNOWN, Relaxed);
    assert_eq!(pair.check(US), Nap);
    pair.set_hotplug(REQUEST_OFFLINE);
    assert_eq!(pair.check(2 * US), Run, "it serves nobody");
    pair.set_hotplug(0);
    let blind = Lane { tasks: None, ..pair.lane() };
    assert_eq!(blind.step(Hand::Check, 3 * US, 3 * US).verdict(), Nap);
}

#[test]
fn settings_count_from_the_next_look_and_a_change_without_an_end_is_borrow_idle() {
    let pair = Pair::new();
    let control = pair.control.slot(0).unwrap();
    assert_eq!(pair.lane().settings().policy, PolicyKind::BorrowIdle);
    let fixed = Settings { policy: PolicyKind::FixedBudget, budget_ns: 5, ..Settings::BORROW_IDLE };
    control.publish(&fixed);
    assert_eq!(pair.lane().settings(), fixed);
    control.generation_begun.fetch_add(1, Relaxed);
    assert_eq!(pair.lane().settings(), Settings::BORROW_IDLE);
}

/// A service under a name of the test's own.
struct Served {
    service: Service,
    reader: ServiceReader,
}

impl Served {
    fn new(what: &str, lanes: u32) -> Self {
        let name = format!("{what}-{}", std::process::id());
        let service = Service::open(&name, lanes).unwrap();
        let reader = ServiceReader::open(&name).unwrap();
        service.page().memory().remove_name().unwrap();
        Self { service, reader }
    }

    fn claim(&self, slot: u32, cpu: u32) -> Worker<'_> {
        self.service.claim(slot, cpu).unwrap()
    }
}

/// Goal: the slot that stands for a lane is found whenever a service claims it, and
/// wherever. Method: a service that warms up after the first look, and then comes again with
/// its lanes in another order.
#[test]
fn a_services_slot_is_found_at_each_look() {
    let pair = Pair::new();
    let served = Served::new("late", 2);
    let lane = pair.with_service(Some(&served.reader));
    pair.control.slot(0).unwrap().publish(&Settings {
        policy: PolicyKind::FixedBudget,
        budget_ns: 1_000_000_000,
        ..Settings::BORROW_IDLE
    });
    let mut now_ns = 0;
    let mut step = || {
        now_ns += 100 * US;
        lane.step(Hand::Guard, now_ns, now_ns).verdict()
    };
    pair.switch(0, 1);
    assert_eq!(
        lane.service(now()).map(|slot| slot.cpu.load(Relaxed)),
        None,
        "CPU 0 is nobody's yet"
    );
    let (first, mut other) = (served.claim(0, REQUEST), served.claim(1, 9));
    assert_eq!(step(), Run);
    drop(first);
    other.begin(3);
    assert_eq!(step(), Run, "another lane's request is not this one's");
    drop(other);
    let (mut ours, _other) = (served.claim(1, REQUEST), served.claim(0, 9));
    assert_eq!(step(), Run);
    ours.begin(4);
    pair.switch(7, 350 * US);
    assert_eq!(step(), Run, "its request has a budget");
    assert_eq!(pair.slot().inputs.policy_state[3].load(Relaxed), 4);
}

fn now() -> u64 {
    elfen_rt::clock::monotonic_ns()
}

/// Without a task map, a service that has no slot for this lane does not serve on it.
#[test]
fn a_lane_that_the_service_does_not_serve_is_lent() {
    let pair = Pair::new();
    let served = Served::new("one-lane", 1);
    let alone = Lane { tasks: None, ..pair.with_service(Some(&served.reader)) };
    let step = || alone.step(Hand::Guard, now(), now()).verdict();
    assert_eq!(step(), Run);
    let mut worker = served.claim(0, REQUEST);
    assert_eq!(step(), Run);
    worker.begin(1);
    assert_eq!(step(), Nap);
    assert_eq!(pair.counted()[..2], [0, 0], "nobody measures, and nothing is guessed");
}
