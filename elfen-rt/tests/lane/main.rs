//! Goal: a lane's steps follow the state of its request lane, and its slot counts borrowed and
//! overlapped time. Method: the test plays the kernel and the service. It writes a task map of its
//! own with a simulated clock, and steps at chosen times, as a guard and as a thread with checks.

mod histories;

use std::sync::atomic::Ordering::Relaxed;

use elfen_rt::lane::{Actor, Lane, ServiceCache};
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

/// One pair of lanes. The test writes the kernel's part.
struct Pair {
    tasks: TaskMap,
    control: Page<ControlSlot>,
    lane: Page<LaneSlot>,
    /// The inputs in the guard's own memory.
    inputs: LaneInputs,
    service_cache: ServiceCache,
}

impl Pair {
    fn new() -> Self {
        let (control, lane) = (page::<ControlSlot>(), page::<LaneSlot>());
        lane.slot(0).unwrap().account_claim.store(CLAIM, Relaxed);
        let (tasks, inputs, service_cache) =
            (TaskMap::for_tests(2), LaneInputs::default(), ServiceCache::default());
        let pair = Self { tasks, control, lane, inputs, service_cache };
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
            service_cache: &self.service_cache,
        }
    }

    /// The lane as this actor sees it.
    fn seen_by<'a>(&'a self, actor: Actor, service: Option<&'a ServiceReader>) -> Lane<'a> {
        let lane = self.with_service(service);
        match actor {
            Actor::Guard => Lane { inputs: &self.inputs, ..lane },
            Actor::Check => lane,
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

    /// A poll of the guard: it takes the lane from the batch, steps, and gives the lane back if the
    /// batch may run.
    fn guard(&self, stopped_ns: u64, now_ns: u64) -> Verdict {
        self.batch_runs(false, stopped_ns);
        let verdict =
            self.seen_by(Actor::Guard, None).step(Actor::Guard, stopped_ns, now_ns).verdict();
        if verdict == Run {
            self.batch_runs(true, now_ns);
        }
        verdict
    }

    fn check(&self, now_ns: u64) -> Verdict {
        self.lane().step(Actor::Check, now_ns, now_ns).verdict()
    }

    /// Borrowed, overlapped, napped.
    fn counted(&self) -> [u64; 3] {
        let slot = self.slot();
        [&slot.borrowed_ns, &slot.overlapped_ns, &slot.napped_ns].map(|word| word.load(Relaxed))
    }
}

#[test]
fn a_batch_with_checks_overlaps_until_its_next_check() {
    let pair = Pair::new();
    pair.switch(0, 10 * US);
    pair.batch_runs(true, 100 * US);
    assert_eq!(pair.check(100 * US), Run);
    pair.switch(7, 150 * US);
    assert_eq!(pair.check(180 * US), Nap);
    // The thread naps on its CPU, which the kernel counts as running.
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
fn a_guard_counts_overlap_until_it_has_the_lane() {
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
    // The guard had already stopped the batch when the request began.
    assert_eq!(pair.guard(440 * US, 460 * US), Nap);
    assert_eq!(pair.counted()[..2], [(50 + 37) * US, 30 * US]);
    assert_eq!(pair.slot().reaction.count(), 2);
}

/// The scheduler gives a SCHED_IDLE task a small part of the lane that the guard occupies. An
/// unrelated task may take the lane from both.
#[test]
fn batch_time_next_to_a_guard_is_overlap_and_unrelated_tasks_are_not_counted() {
    let pair = Pair::new();
    pair.switch(0, 10 * US);
    pair.guard(20 * US, 20 * US);
    pair.switch(7, 100 * US);
    pair.guard(110 * US, 110 * US);
    pair.batch_runs(true, 300 * US);
    pair.batch_runs(false, 304 * US);
    // From 304 to 900 an unrelated task runs: the kernel counts nothing for the batch.
    pair.switch(0, 900 * US);
    pair.guard(900 * US, 900 * US);
    assert_eq!(pair.counted()[..2], [80 * US, 14 * US]);
}

/// A thread that naps in a check is on its CPU, and the guard does not count this time.
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

/// Between two requests only the guard samples: the thread is still in its nap when the second
/// request begins.
#[test]
fn a_nap_that_continues_into_the_next_request_counts_no_overlap() {
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

/// A thread that died in its nap does not hide the time of other threads for ever.
#[test]
fn a_nap_that_outlasts_its_bound_counts_as_over() {
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
fn a_request_between_two_polls_is_counted_as_overlap() {
    let pair = Pair::new();
    pair.switch(0, 10 * US);
    pair.guard(100 * US, 100 * US);
    pair.switch(7, 120 * US);
    pair.switch(0, 127 * US);
    assert_eq!(pair.guard(200 * US, 200 * US), Run);
    assert_eq!(pair.counted(), [93 * US, 7 * US, 0]);
    assert_eq!(pair.slot().reaction.count(), 0);
}

/// A hypervisor can stop a CPU while it writes its slot. Nothing is counted then, and nothing is
/// lost.
#[test]
fn an_unreadable_slot_is_counted_at_the_next_step() {
    let pair = Pair::new();
    pair.switch(0, 10 * US);
    pair.guard(20 * US, 20 * US);
    pair.switch(7, 100 * US);
    pair.switch(0, 110 * US);
    pair.batch_runs(false, 200 * US);
    pair.request().switches_begun.fetch_add(1, Relaxed);
    let step = |now_ns| pair.lane().step(Actor::Guard, now_ns, now_ns).verdict();
    assert_eq!(step(200 * US), Nap, "a lane that switches all the time is busy");
    assert_eq!(pair.counted()[..2], [0, 0]);
    pair.request().switches.fetch_add(1, Relaxed);
    assert_eq!(step(300 * US), Run);
    assert_eq!(pair.counted()[..2], [170 * US, 10 * US]);
}

#[test]
fn a_reaction_counts_from_idle_to_busy_and_not_from_a_switch_between_tasks() {
    let pair = Pair::new();
    pair.switch(0, 10 * US);
    pair.check(20 * US);
    pair.switch(7, 30 * US);
    pair.switch(8, 40 * US);
    pair.check(50 * US);
    assert_eq!(pair.slot().reaction.max_ns(), 20 * US);
}

#[test]
fn several_checks_during_a_nap_count_one_nap() {
    let pair = Pair::new();
    pair.switch(7, 10 * US);
    for now in [20, 30, 40] {
        assert_eq!(pair.check(now * US), Nap);
    }
    pair.lane().leave(60 * US);
    assert_eq!(pair.slot().naps.load(Relaxed), 1);
    assert_eq!(pair.counted(), [0, 0, 40 * US]);
    assert_eq!(pair.slot().reaction.count(), 0, "the batch never ran next to this request");
}

#[test]
fn an_unknown_task_and_a_missing_task_map_count_as_busy_and_an_offline_lane_does_not() {
    let pair = Pair::new();
    pair.request().task.store(UNKNOWN, Relaxed);
    assert_eq!(pair.check(US), Nap);
    pair.set_hotplug(REQUEST_OFFLINE);
    assert_eq!(pair.check(2 * US), Run, "an offline lane serves no requests");
    pair.set_hotplug(0);
    let blind = Lane { tasks: None, ..pair.lane() };
    assert_eq!(blind.step(Actor::Check, 3 * US, 3 * US).verdict(), Nap);
}

#[test]
fn settings_apply_from_the_next_step_and_an_unfinished_change_is_borrow_idle() {
    let pair = Pair::new();
    let control = pair.control.slot(0).unwrap();
    assert_eq!(pair.lane().settings().policy, PolicyKind::BorrowIdle);
    let fixed = Settings { policy: PolicyKind::FixedBudget, budget_ns: 5, ..Settings::BORROW_IDLE };
    control.publish(&fixed);
    assert_eq!(pair.lane().settings(), fixed);
    control.generation_begun.fetch_add(1, Relaxed);
    assert_eq!(pair.lane().settings(), Settings::BORROW_IDLE);
}

/// A service with a name that no other test uses.
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

/// Goal: a lane's slot is found whenever a service claims it, and at any index. Method: a service
/// that claims its lanes after the first step, and later claims them again in another order.
#[test]
fn a_services_slot_is_looked_up_at_each_step() {
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
        lane.step(Actor::Guard, now_ns, now_ns).verdict()
    };
    pair.switch(0, 1);
    assert_eq!(
        lane.service(now()).map(|slot| slot.cpu.load(Relaxed)),
        None,
        "no slot is claimed for CPU 0 yet"
    );
    let (first, mut other) = (served.claim(0, REQUEST), served.claim(1, 9));
    assert_eq!(step(), Run);
    drop(first);
    other.begin(3);
    assert_eq!(step(), Run, "the request belongs to another lane");
    drop(other);
    let (mut ours, _other) = (served.claim(1, REQUEST), served.claim(0, 9));
    assert_eq!(step(), Run);
    ours.begin(4);
    pair.switch(7, 350 * US);
    assert_eq!(step(), Run, "the lane's request has a budget");
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
    let step = || alone.step(Actor::Guard, now(), now()).verdict();
    assert_eq!(step(), Run);
    let mut worker = served.claim(0, REQUEST);
    assert_eq!(step(), Run);
    worker.begin(1);
    assert_eq!(step(), Nap);
    assert_eq!(pair.counted()[..2], [0, 0], "without a task map nothing is counted");
}
