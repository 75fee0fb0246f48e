//! What is told of a process's checks, and of what the planner counts.

use elfen_rewrite::Tactic;

use super::patched::{OnePlace, Patched, State, Used};
use super::places::Places;

impl Patched {
    /// How often a place's check runs in a millisecond of the lane.
    pub fn runs(&mut self, place: u64, per_ms: u64) {
        if let Some(known) = self.places.get_mut(&place) {
            known.per_ms = per_ms;
        }
    }

    /// Whether a place is on though it runs too often.
    pub fn is_put_back(&self, place: u64) -> bool {
        self.places.get(&place).is_some_and(|known| known.state == State::PutBack)
    }

    /// How often the checks of each place ran so far, where that can be read.
    pub fn counts(&self) -> Vec<(u64, u64)> {
        let of = |used: &Used| {
            let counts = used.arena.counts(&self.memory, used.checks.len());
            used.checks.iter().copied().zip(counts).collect::<Vec<_>>()
        };
        self.arenas.iter().flat_map(of).collect()
    }

    /// The places of the checks that are on.
    pub fn on(&self) -> impl Iterator<Item = u64> {
        self.places.iter().filter(|(_, known)| known.is_on()).map(|(&at, _)| at)
    }

    pub fn is_on(&self, place: u64) -> bool {
        self.places.get(&place).is_some_and(OnePlace::is_on)
    }

    pub fn places(&self) -> Places {
        let arenas = self.arenas.len() as u64;
        let processes = u64::from(arenas > 0);
        let mut places = Places { processes, arenas, ..Places::default() };
        for known in self.places.values() {
            match known.state {
                State::On | State::PutBack => {
                    places.on += 1;
                    places.dense += u64::from(known.state != State::On);
                    places.compiled += u64::from(known.compiled.is_some());
                    places.rounds += u64::from(known.has_rounds);
                    places.by_tactic[match known.tactic {
                        _ if known.is_several => 1,
                        Tactic::One | Tactic::Several => 0,
                        Tactic::Memory => 2,
                        Tactic::Flags => 3,
                    }] += 1;
                }
                State::TooDense => places.too_dense += 1,
                State::Refused => places.refused += 1,
            }
        }
        places
    }
}
