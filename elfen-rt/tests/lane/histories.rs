//! Goal: a guard and a thread with checks decide alike, and a guard's decisions do not depend on
//! anything that a batch writes. Method: random histories of a request lane.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use elfen_rt::lane::{Actor, Lane, Step};
use elfen_rt::service::Worker;
use elfen_rt::signal::control::{PolicyKind, Settings};
use elfen_rt::signal::lane::{LaneSlot, REQUEST_OFFLINE};
use proptest::prelude::*;

use super::{CLAIM, Pair, REQUEST, Served, US, now};

/// An event between two steps of a history.
#[derive(Clone, Copy, Debug)]
enum Event {
    Busy,
    Idle,
    Begin(u64),
    End,
    Queue(u64),
    Offline(bool),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => Just(Event::Busy),
        4 => Just(Event::Idle),
        4 => (1u64..4).prop_map(Event::Begin),
        4 => Just(Event::End),
        2 => (0u64..3).prop_map(Event::Queue),
        1 => any::<bool>().prop_map(Event::Offline),
    ]
}

fn events() -> impl Strategy<Value = Vec<(u64, Event)>> {
    prop::collection::vec((1u64..50, event()), 1..60)
}

fn settings() -> impl Strategy<Value = Settings> {
    let kinds = prop::sample::select(&PolicyKind::ALL[..]);
    (kinds, 0u64..200).prop_map(|(policy, budget_us)| Settings {
        policy,
        budget_ns: budget_us * US,
        budget_until_ns: u64::MAX,
        ref_ipc_milli: 1000,
        ..Settings::BORROW_IDLE
    })
}

fn apply_event(
    event: Event,
    pairs: &[Pair],
    now_ns: u64,
    served: &Served,
    worker: &mut Worker<'_>,
) {
    match event {
        Event::Busy => pairs.iter().for_each(|pair| pair.switch(7, now_ns)),
        Event::Idle => pairs.iter().for_each(|pair| pair.switch(0, now_ns)),
        Event::Begin(id) => worker.begin(id),
        Event::End => worker.end(),
        Event::Queue(len) => served.service.set_queue_len(0, len),
        Event::Offline(gone) => {
            let bits = if gone { REQUEST_OFFLINE } else { 0 };
            pairs.iter().for_each(|pair| pair.set_hotplug(bits));
        }
    }
}

/// Words that a batch may write into its lane's slot, often extreme ones.
fn junk() -> impl Strategy<Value = Vec<(usize, u64)>> {
    let words = size_of::<LaneSlot>() / size_of::<u64>();
    let index = prop_oneof![3 => 0..32usize, 1 => 0..words];
    let word = prop_oneof![0u64..4, Just(u64::MAX), Just(CLAIM), any::<u64>()];
    prop::collection::vec((index, word), 0..40)
}

fn overwrite(slot: &LaneSlot, junk: &[(usize, u64)]) {
    let words = std::ptr::from_ref(slot).cast::<AtomicU64>();
    for &(index, word) in junk {
        // SAFETY: every index in `junk` is below the slot's number of words.
        let stored = unsafe { words.add(index) };
        // SAFETY: the slot consists of aligned atomics.
        unsafe { &*stored }.store(word, Relaxed);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Goal: nothing that a batch writes into its lane's slot changes a verdict of the guard.
    /// Method: two guards see the same history, and one guard's slot is overwritten before each
    /// step. All verdicts and deadlines are the same.
    #[test]
    fn a_guards_decisions_do_not_depend_on_the_batchs_writes(
        history in prop::collection::vec((1u64..50, event(), junk()), 1..60),
        settings in settings(), tasks: bool, publishes: bool,
    ) {
        let pairs = [Pair::new(), Pair::new()];
        let served = Served::new("junk", 1);
        let mut worker = served.claim(0, REQUEST);
        let lanes = pairs.each_ref().map(|pair| {
            pair.control.slot(0).unwrap().publish(&settings);
            let lane = pair.seen_by(Actor::Guard, publishes.then_some(&served.reader));
            if tasks { lane } else { Lane { tasks: None, ..lane } }
        });
        let mut now_ns = now() + 1_000_000_000;
        for (after_us, event, junk) in history {
            now_ns += after_us * US;
            apply_event(event, &pairs, now_ns, &served, &mut worker);
            overwrite(pairs[0].slot(), &junk);
            let [disturbed, honest] = lanes.each_ref().map(|lane| {
                match lane.step(Actor::Guard, now_ns, now_ns) {
                    Step::Run { busy, until_ns } => Some((busy, until_ns)),
                    Step::Nap(_) => None,
                }
            });
            prop_assert_eq!(disturbed, honest, "{:?}", event);
        }
    }

    /// Goal: a guard and a thread with checks decide alike. Method: both see the same history at
    /// the same moments. Every verdict and every deadline must be the same, and no verdict to nap
    /// ends on a busy lane.
    #[test]
    fn guard_and_check_decide_alike(
        history in events(), settings in settings(), tasks: bool, publishes: bool,
    ) {
        let pairs = [Pair::new(), Pair::new()];
        let served = Served::new("alike", 1);
        let mut worker = served.claim(0, REQUEST);
        let actors = [Actor::Guard, Actor::Check];
        for pair in &pairs {
            pair.control.slot(0).unwrap().publish(&settings);
        }
        let lanes: [_; 2] = std::array::from_fn(|at| {
            let lane = pairs[at].seen_by(actors[at], publishes.then_some(&served.reader));
            if tasks { lane } else { Lane { tasks: None, ..lane } }
        });
        // The service uses the real clock, and the steps come after it.
        let mut now_ns = now() + 1_000_000_000;
        let mut napping = false;
        for (after_us, event) in history {
            now_ns += after_us * US;
            apply_event(event, &pairs, now_ns, &served, &mut worker);
            let steps: Vec<_> = lanes
                .iter()
                .zip(actors)
                .map(|(lane, actor)| match lane.step(actor, now_ns, now_ns) {
                    Step::Run { busy, until_ns } => Some((busy, until_ns)),
                    Step::Nap(_) => None,
                })
                .collect();
            prop_assert_eq!(steps[0], steps[1], "{:?}", event);
            let busy = steps[0].is_none_or(|(busy, _)| busy);
            prop_assert!(!(napping && busy) || steps[0].is_none(), "a nap ended on a busy lane");
            napping = steps[0].is_none();
        }
        let states = lanes.each_ref().map(|lane| lane.inputs.state());
        prop_assert_eq!(states[0], states[1]);
    }
}
