//! Goal: what a lane's slot says it borrowed, overlapped and how fast it reacted is what happened. Method: the test is the
//! kernel: it writes a task slot with a simulated clock, and looks at chosen times.

use std::sync::atomic::Ordering::Relaxed;

use elfen_rt::borrow::{Borrow, Look, Sources};
use elfen_rt::memory::Memory;
use elfen_rt::policy::Verdict::{Nap, Run};
use elfen_rt::signal::control::{ControlSlot, PolicyKind, Settings};
use elfen_rt::signal::lane::{LaneSlot, LaneState};
use elfen_rt::signal::page::{Page, Slot};
use elfen_rt::signal::task::{TaskSlot, UNKNOWN};

const US: u64 = 1_000;

fn page<S: Slot>() -> Page<S> {
    let memory = Memory::create_segment(libc::IPC_PRIVATE, Page::<S>::bytes(1), 0o600).unwrap();
    memory.remove_name().unwrap();
    Page::format(memory, 1, 0, &[0; 32]).unwrap()
}

/// One pair with the kernel's half played by the test.
struct Pair {
    tasks: Page<TaskSlot>,
    control: Page<ControlSlot>,
    lane: Page<LaneSlot>,
}

impl Pair {
    fn new() -> Self {
        Self { tasks: page(), control: page(), lane: page() }
    }

    fn borrow(&self) -> Borrow<'_> {
        let sources = Sources { tasks: self.tasks.slot(0), service: None };
        Borrow::new(sources, self.control.slot(0).unwrap(), self.lane())
    }

    fn lane(&self) -> &LaneSlot {
        self.lane.slot(0).unwrap()
    }

    /// The request lane switches, as `kernel/bpf` writes it for a watched CPU.
    fn switch(&self, task: u64, now_ns: u64) {
        let slot = self.tasks.slot(0).unwrap();
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

    fn counted(&self) -> [u64; 3] {
        let lane = self.lane();
        [&lane.borrowed_ns, &lane.overlapped_ns, &lane.napped_ns].map(|word| word.load(Relaxed))
    }
}

#[test]
fn a_busy_stretch_is_overlapped_until_it_is_seen_and_napped_after() {
    let pair = Pair::new();
    let mut borrow = pair.borrow();
    pair.switch(0, 10 * US);
    assert_eq!(borrow.look(100 * US), Look { verdict: Run, busy: false, until_ns: None });
    pair.switch(7, 150 * US);
    assert_eq!(borrow.look(180 * US).verdict, Nap);
    pair.switch(0, 400 * US);
    assert_eq!(borrow.look(403 * US).verdict, Run);
    borrow.leave(500 * US);
    assert_eq!(pair.counted(), [(50 + 97) * US, 30 * US, 223 * US]);
    assert_eq!(pair.lane().reaction.max_ns(), 30 * US);
    assert_eq!(pair.lane().wake.max_ns(), 3 * US);
    assert_eq!(pair.lane().naps.load(Relaxed), 1);
    assert_eq!(pair.lane().state(), Some((LaneState::Off, 500 * US)));
}

#[test]
fn who_took_the_lane_to_look_counts_until_then() {
    let pair = Pair::new();
    let mut borrow = pair.borrow();
    pair.switch(0, 10 * US);
    borrow.look(100 * US);
    pair.switch(7, 150 * US);
    assert_eq!(borrow.look_after(180 * US, 195 * US).verdict, Nap);
    assert_eq!(pair.counted(), [50 * US, 30 * US, 0]);
    assert_eq!(pair.lane().reaction.max_ns(), 30 * US);
    pair.switch(0, 400 * US);
    borrow.look(403 * US);
    pair.switch(7, 450 * US);
    // It was on its way to the lane when the request began.
    assert_eq!(borrow.look_after(440 * US, 460 * US).verdict, Nap);
    assert_eq!(pair.counted()[..2], [(50 + 37) * US, 30 * US]);
    assert_eq!(pair.lane().reaction.count(), 2);
}

#[test]
fn a_request_that_no_look_met_is_overlapped_all_the_same() {
    let pair = Pair::new();
    let mut borrow = pair.borrow();
    pair.switch(0, 10 * US);
    borrow.look(100 * US);
    pair.switch(7, 120 * US);
    pair.switch(0, 127 * US);
    assert_eq!(borrow.look(200 * US).verdict, Run);
    assert_eq!(pair.counted(), [93 * US, 7 * US, 0]);
    assert_eq!(pair.lane().reaction.count(), 0);
}

#[test]
fn reaction_counts_from_idle_to_busy_and_not_from_a_switch_among_tasks() {
    let pair = Pair::new();
    let mut borrow = pair.borrow();
    pair.switch(0, 10 * US);
    borrow.look(20 * US);
    pair.switch(7, 30 * US);
    pair.switch(8, 40 * US);
    borrow.look(50 * US);
    assert_eq!(pair.lane().reaction.max_ns(), 20 * US);
}

#[test]
fn looking_again_during_a_nap_is_the_same_nap() {
    let pair = Pair::new();
    let mut borrow = pair.borrow();
    pair.switch(7, 10 * US);
    for now in [20, 30, 40] {
        assert_eq!(borrow.look(now * US).verdict, Nap);
    }
    borrow.leave(60 * US);
    assert_eq!(pair.lane().naps.load(Relaxed), 1);
    assert_eq!(pair.counted(), [0, 0, 40 * US]);
    assert_eq!(pair.lane().reaction.count(), 0, "it never ran next to this request");
}

#[test]
fn who_takes_the_lane_over_goes_on_where_the_last_one_stopped() {
    let pair = Pair::new();
    pair.switch(0, 10 * US);
    pair.borrow().look(100 * US);
    assert_eq!(pair.borrow().look(200 * US).verdict, Run);
    assert_eq!(pair.counted(), [100 * US, 0, 0]);
}

#[test]
fn an_unknown_task_and_no_source_at_all_count_as_busy() {
    let pair = Pair::new();
    pair.tasks.slot(0).unwrap().task.store(UNKNOWN, Relaxed);
    assert_eq!(pair.borrow().look(US).verdict, Nap);
    let blind = Sources { tasks: None, service: None };
    let mut borrow = Borrow::new(blind, pair.control.slot(0).unwrap(), pair.lane());
    assert_eq!(borrow.look(2 * US).verdict, Nap);
}

#[test]
fn a_change_of_settings_counts_from_the_next_look() {
    let pair = Pair::new();
    let control = pair.control.slot(0).unwrap();
    let mut borrow = pair.borrow();
    assert_eq!(borrow.settings().policy, PolicyKind::BorrowIdle);
    let fixed = Settings { policy: PolicyKind::FixedBudget, budget_ns: 5, ..Settings::BORROW_IDLE };
    control.publish(&fixed);
    borrow.look(US);
    assert_eq!(borrow.settings(), &fixed);
    // A parent that dies in the middle of a change leaves what was.
    control.generation_begun.fetch_add(1, Relaxed);
    control.generation.fetch_add(7, Relaxed);
    control.policy.store(PolicyKind::BorrowIdle as u64, Relaxed);
    borrow.look(2 * US);
    assert_eq!(borrow.settings(), &fixed);
}
