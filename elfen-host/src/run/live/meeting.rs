//! All guards of a run at once on their lanes, so that nothing of the batch runs anywhere: what
//! it takes to write into a program whose threads may be on several lanes.
//!
//! ```text
//!  planner: call --> guards come, each at the highest rank --> the last one writes --> over
//!                        \-- one that has waited for too long gives up, for all
//! ```
//!
//! While it waits, a guard ranks above all that is ordinary, so nothing but the kernel's own work
//! comes onto its lane; and before the last one writes, it looks whether any lane has switched
//! since its guard came, by the task map.

use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};
use std::time::Duration;

use elfen_rt::clock::{monotonic_ns, nanos};
use elfen_rt::nap::block::ring_doorbell;

use crate::run::channels::Channels;
use crate::run::place::{rank_above_all, rank_first};

/// How long a guard keeps its lane for the others.
const PATIENCE: Duration = Duration::from_millis(5);

/// A meeting: which, how many are called, how many have come, and whether the last of them writes.
/// None is on while nobody is called.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct State {
    number: u32,
    called: u16,
    come: u16,
}

impl State {
    const fn of_word(word: u64) -> Self {
        let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
        Self {
            number: u32::from_le_bytes([a, b, c, d]),
            called: u16::from_le_bytes([e, f]),
            come: u16::from_le_bytes([g, h]),
        }
    }

    fn word(self) -> u64 {
        u64::from(self.number) | u64::from(self.called) << 32 | u64::from(self.come) << 48
    }

    /// The last one that has come writes, and nobody comes or goes until it has.
    fn is_writing(self) -> bool {
        self.called != 0 && self.come == self.called
    }

    fn call(self, lanes: u16) -> Option<Self> {
        let number = self.number.wrapping_add(1);
        (self.called == 0).then_some(Self { number, called: lanes, come: 0 })
    }

    fn is_on(self, number: u32) -> bool {
        self.number == number && self.called != 0
    }

    fn come(self, number: u32) -> Option<Self> {
        let may = self.is_on(number) && !self.is_writing();
        may.then(|| Self { come: self.come + 1, ..self })
    }

    fn give_up(self, number: u32) -> Option<Self> {
        let may = self.is_on(number) && !self.is_writing();
        may.then_some(Self { called: 0, come: 0, ..self })
    }

    fn end(self) -> Option<Self> {
        self.is_writing().then_some(Self { called: 0, come: 0, ..self })
    }
}

/// The meetings of a run.
#[derive(Debug)]
pub(super) struct Meetings {
    state: AtomicU64,
    seats: Vec<Seat>,
    patience: Duration,
}

/// What is known of one lane's guard.
#[derive(Default, Debug)]
struct Seat {
    /// The last meeting that it came to.
    came: AtomicU32,
    /// How often its lane had switched when it came.
    switches: AtomicU64,
}

impl Meetings {
    pub(super) fn of(lanes: usize) -> Self {
        let seats = std::iter::repeat_with(Seat::default).take(lanes).collect();
        Self { state: AtomicU64::new(0), seats, patience: PATIENCE }
    }

    fn state(&self) -> State {
        State::of_word(self.state.load(Acquire))
    }

    /// One step; `None` if it can't be made.
    fn step(&self, next: impl Fn(State) -> Option<State>) -> Option<State> {
        let step = |word| next(State::of_word(word)).map(State::word);
        let before = self.state.fetch_update(AcqRel, Acquire, step).ok()?;
        next(State::of_word(before))
    }

    /// Calls all guards, and returns when the meeting is over. Nobody is called while a lane is
    /// offline, as it may come back before its guard has.
    pub(super) fn hold(&self, channels: &Channels, wait: impl Fn()) {
        let Ok(lanes) = u16::try_from(self.seats.len()) else { return };
        if channels.batch_lanes_offline() > 0 {
            return;
        }
        let Some(State { number, .. }) = self.step(|state| state.call(lanes)) else { return };
        channels.lanes().slots().for_each(|slot| ring_doorbell(&slot.doorbell));
        let end_ns = monotonic_ns() + nanos(2 * self.patience);
        while self.state().is_on(number) {
            wait();
            if monotonic_ns() >= end_ns {
                // The last one may have come meanwhile.
                let _given_up = self.step(|state| state.give_up(number));
            }
        }
    }

    /// Whether the guard of a lane is to come.
    pub(super) fn is_called(&self, lane: usize) -> bool {
        let state = self.state();
        let is_awaited = |seat: &Seat| seat.came.load(Relaxed) != state.number;
        state.called != 0 && self.seats.get(lane).is_some_and(is_awaited)
    }

    /// The guard of a lane comes, if it is called, and stays until the meeting is over; the last
    /// one does what there is to do. An error: it has no right to the rank that this takes.
    pub(super) fn attend(
        &self,
        lane: usize,
        switches: impl Fn(usize) -> Option<u64>,
        write: impl FnOnce(),
    ) -> io::Result<()> {
        let state = self.state();
        let Some(seat) = self.seats.get(lane).filter(|_| self.is_called(lane)) else {
            return Ok(());
        };
        // Once, whatever becomes of it.
        seat.came.store(state.number, Relaxed);
        rank_above_all()?;
        self.stay(lane, seat, state.number, switches, write);
        rank_first()
    }

    fn stay(
        &self,
        lane: usize,
        seat: &Seat,
        number: u32,
        switches: impl Fn(usize) -> Option<u64>,
        write: impl FnOnce(),
    ) {
        let Some(count) = switches(lane) else { return };
        seat.switches.store(count, Relaxed);
        let Some(come) = self.step(|state| state.come(number)) else { return };
        if come.is_writing() {
            let has_stayed =
                |(lane, seat): (usize, &Seat)| switches(lane) == Some(seat.switches.load(Relaxed));
            if self.seats.iter().enumerate().all(has_stayed) {
                write();
            }
            self.step(State::end);
            return;
        }
        let end_ns = monotonic_ns() + nanos(self.patience);
        while self.state().is_on(number) {
            std::hint::spin_loop();
            if monotonic_ns() >= end_ns {
                let _given_up = self.step(|state| state.give_up(number));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// What a guard, or the planner, is about to do.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    enum At {
        Outside,
        /// Until the meeting of this number is over; it may give up.
        Waits(u32),
        /// Has come last.
        Writes(u32),
    }

    #[derive(Clone, PartialEq, Eq, Hash, Debug)]
    struct World {
        state: State,
        meetings: u8,
        planner: At,
        /// And the last meeting that each came to.
        guards: [(At, u32); 3],
    }

    type GiveUp = fn(State, u32) -> Option<State>;

    impl World {
        /// All that can happen next: each a step of one of the four, one access of the word.
        fn next(&self, give_up: GiveUp) -> Vec<Self> {
            let mut worlds = Vec::new();
            match self.planner {
                At::Outside if self.meetings < 3 => {
                    worlds.extend(self.state.call(3).map(|state| {
                        let (meetings, planner) = (self.meetings + 1, At::Waits(state.number));
                        Self { state, meetings, planner, ..self.clone() }
                    }))
                }
                At::Waits(number) => {
                    if !self.state.is_on(number) {
                        worlds.push(Self { planner: At::Outside, ..self.clone() });
                    }
                    let given_up = give_up(self.state, number);
                    worlds.extend(given_up.map(|state| Self { state, ..self.clone() }));
                }
                _ => {}
            }
            for (guard, (at, came)) in self.guards.into_iter().enumerate() {
                let mut after = |state: State, at: At, came: u32| {
                    let mut guards = self.guards;
                    guards[guard] = (at, came);
                    worlds.push(Self { state, guards, ..self.clone() });
                };
                let number = self.state.number;
                match at {
                    At::Outside if came != number => {
                        let come = self.state.come(number).into_iter();
                        come.for_each(|state| match state.is_writing() {
                            true => after(state, At::Writes(number), number),
                            false => after(state, At::Waits(number), number),
                        });
                    }
                    At::Outside => {}
                    At::Waits(own) => {
                        if !self.state.is_on(own) {
                            after(self.state, At::Outside, came);
                        }
                        let given_up = give_up(self.state, own).into_iter();
                        given_up.for_each(|state| after(state, at, came));
                    }
                    At::Writes(_) => {
                        after(self.state.end().unwrap_or(self.state), At::Outside, came);
                    }
                }
            }
            worlds
        }

        fn writer(&self) -> Option<u32> {
            self.guards.iter().find_map(|(at, _)| match at {
                At::Writes(number) => Some(*number),
                _ => None,
            })
        }

        /// While one writes, the others are there.
        fn is_safe(&self) -> bool {
            self.writer().is_none_or(|number| {
                let waits = self.guards.iter().filter(|(at, _)| *at == At::Waits(number));
                waits.count() == 2
            })
        }
    }

    /// Every order of steps; says whether all worlds are safe, and how many wrote.
    fn explore(give_up: GiveUp) -> (bool, usize) {
        let none = State { number: u32::MAX, called: 0, come: 0 };
        let guards = [(At::Outside, none.number); 3];
        let first = World { state: none, meetings: 0, planner: At::Outside, guards };
        let (mut met, mut open) = (HashSet::from([first.clone()]), vec![first]);
        while let Some(world) = open.pop() {
            for next in world.next(give_up) {
                if met.insert(next.clone()) {
                    open.push(next);
                }
            }
        }
        let writes = met.iter().filter(|world| world.writer().is_some()).count();
        (met.iter().all(World::is_safe), writes)
    }

    #[test]
    fn nobody_leaves_while_one_writes() {
        let (safe, writes) = explore(State::give_up);
        assert!(safe && writes > 0, "{writes}");
        // The same without the rule that holds them.
        let at_any_time: GiveUp =
            |state, number| state.is_on(number).then_some(State { called: 0, come: 0, ..state });
        assert!(!explore(at_any_time).0);
    }

    /// Goal: what is written is written once, by one, while all are there; and a meeting to which
    /// one does not come ends. Method: real threads, of which one stays away in every fourth round.
    #[test]
    fn the_last_one_writes_and_nobody_waits_for_ever() {
        let mut meetings = Meetings::of(3);
        for round in 0..200_usize {
            let absent = (round % 4 == 0).then_some(round % 3);
            meetings.patience = Duration::from_millis(absent.map_or(60_000, |_| 1));
            let number = meetings.step(|state| state.call(3)).unwrap().number;
            let (writes, inside) = (AtomicU64::new(0), AtomicU64::new(0));
            std::thread::scope(|scope| {
                for lane in (0..3).filter(|&lane| Some(lane) != absent) {
                    let (meetings, writes, inside) = (&meetings, &writes, &inside);
                    scope.spawn(move || {
                        inside.fetch_add(1, SeqCst);
                        meetings.stay(
                            lane,
                            &meetings.seats[lane],
                            number,
                            |_| Some(1),
                            || {
                                assert_eq!(inside.load(SeqCst), 3);
                                writes.fetch_add(1, SeqCst);
                            },
                        );
                        inside.fetch_sub(1, SeqCst);
                    });
                }
            });
            assert_eq!(writes.load(SeqCst), u64::from(absent.is_none()));
            assert_eq!(meetings.state().called, 0, "it is over");
        }
    }

    #[test]
    fn a_lane_that_has_switched_is_not_written_beside() {
        let meetings = Meetings::of(1);
        meetings.step(|state| state.call(1)).unwrap();
        let looks = AtomicU64::new(0);
        let switches = |_| Some(looks.fetch_add(1, Relaxed));
        meetings.stay(0, &meetings.seats[0], 1, switches, || panic!("it has switched"));
        assert_eq!((meetings.state().called, looks.load(Relaxed)), (0, 2));
    }
}
