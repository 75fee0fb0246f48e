//! Goal: a guard and a thread with checks decide alike, and a guard by nothing that a batch writes.
//! Method: histories of a request lane by chance.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use elfen_rt::lane::{Hand, Lane, Step};
use elfen_rt::service::Worker;
use elfen_rt::signal::control::{PolicyKind, Settings};
use elfen_rt::signal::lane::{LaneSlot, REQUEST_OFFLINE};
use proptest::prelude::*;

use super::{CLAIM, Pair, REQUEST, Served, US, now};

/// What happens between two looks of a history.
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

fn happen(event: Event, pairs: &[Pair], now_ns: u64, served: &Served, worker: &mut Worker<'_>) {
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

/// What a batch may write into its lane's slot: a few words, often extreme ones.
fn junk() -> impl Strategy<Value = Vec<(usize, u64)>> {
    let words = size_of::<LaneSlot>() / size_of::<u64>();
    let place = prop_oneof![3 => 0..32usize, 1 => 0..words];
    let word = prop_oneof![0u64..4, Just(u64::MAX), Just(CLAIM), any::<u64>()];
    prop::collection::vec((place, word), 0..40)
}

fn scribble(slot: &LaneSlot, junk: &[(usize, u64)]) {
    let words = std::ptr::from_ref(slot).cast::<AtomicU64>();
    for &(place, word) in junk {
        // SAFETY: `junk` names words of the slot.
        let place = unsafe { words.add(place) };
        // SAFETY: the slot is nothing but aligned atomics.
        unsafe { &*place }.store(word, Relaxed);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Goal: nothing that a batch writes into its lane's slot changes a verdict of the guard.
    /// Method: two guards see the same history; the slot of one is overwritten before each step.
    /// All verdicts and deadlines are the same.
    #[test]
    fn a_guard_decides_by_nothing_that_the_batch_writes(
        history in prop::collection::vec((1u64..50, event(), junk()), 1..60),
        settings in settings(), tasks: bool, publishes: bool,
    ) {
        let pairs = [Pair::new(), Pair::new()];
        let served = Served::new("junk", 1);
        let mut worker = served.claim(0, REQUEST);
        let lanes = pairs.each_ref().map(|pair| {
            pair.control.slot(0).unwrap().publish(&settings);
            let lane = pair.in_hand(Hand::Guard, publishes.then_some(&served.reader));
            if tasks { lane } else { Lane { tasks: None, ..lane } }
        });
        let mut now_ns = now() + 1_000_000_000;
        for (after_us, event, junk) in history {
            now_ns += after_us * US;
            happen(event, &pairs, now_ns, &served, &mut worker);
            scribble(pairs[0].slot(), &junk);
            let [disturbed, honest] = lanes.each_ref().map(|lane| {
                match lane.step(Hand::Guard, now_ns, now_ns) {
                    Step::Run { busy, until_ns } => Some((busy, until_ns)),
                    Step::Nap(_) => None,
                }
            });
            prop_assert_eq!(disturbed, honest, "{:?}", event);
        }
    }

    /// Goal: a guard and a thread that checks are two hands of one thing. Method: the same history,
    /// told to both at the same moments; every verdict and every deadline has to be the same, and
    /// no verdict to nap ends on a busy lane.
    #[test]
    fn guard_and_check_decide_alike(
        history in events(), settings in settings(), tasks: bool, publishes: bool,
    ) {
        let pairs = [Pair::new(), Pair::new()];
        let served = Served::new("alike", 1);
        let mut worker = served.claim(0, REQUEST);
        let hands = [Hand::Guard, Hand::Check];
        for pair in &pairs {
            pair.control.slot(0).unwrap().publish(&settings);
        }
        let lanes: [_; 2] = std::array::from_fn(|at| {
            let lane = pairs[at].in_hand(hands[at], publishes.then_some(&served.reader));
            if tasks { lane } else { Lane { tasks: None, ..lane } }
        });
        // The service's own clock is the real one; looks come after it.
        let mut now_ns = now() + 1_000_000_000;
        let mut napping = false;
        for (after_us, event) in history {
            now_ns += after_us * US;
            happen(event, &pairs, now_ns, &served, &mut worker);
            let steps: Vec<_> = lanes
                .iter()
                .zip(hands)
                .map(|(lane, hand)| match lane.step(hand, now_ns, now_ns) {
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
