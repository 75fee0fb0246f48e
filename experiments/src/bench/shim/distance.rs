//! What is measured in pairs, by how far apart the lanes were meanwhile.
//!
//! The host may move a virtual CPU at any moment, and a line then takes six times as long as
//! before. So the distance is measured between any two pairs: a pair is one of near lanes or of far
//! ones if they were that before it and behind it, and is left out if they were not.

use elfen_shim::round_trip;

use super::stage::{Error, Lanes, on_lane};

/// Lanes further apart than this are far.
pub(super) const NEAR_TICKS: u64 = 400;
/// Pairs are begun, at most, for each that is wanted.
pub(super) const TRIES: usize = 2;
/// Fewer pairs say nothing.
const PAIRS_LEAST: usize = 5;
/// Between the distances before and behind a pair, at most.
const SAME: u64 = 2;

/// What was found while lanes were near, and while they were far; each with their distance.
#[derive(Debug)]
pub(super) struct Distances<T> {
    lanes: Lanes,
    now: u64,
    found: [Vec<(u64, T)>; 2],
    pub(super) left_out: usize,
}

impl<T> Distances<T> {
    pub(super) fn begin(lanes: Lanes) -> Result<Self, Error> {
        let found = [const { Vec::new() }; 2];
        Ok(Self { lanes, now: measured(lanes)?, found, left_out: 0 })
    }

    /// Ticks for a line there and back, as it was last.
    pub(super) fn now(&self) -> u64 {
        self.now
    }

    /// How many there are of the kind of which there are most.
    pub(super) fn most(&self) -> usize {
        self.found.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// What was measured since the last time.
    pub(super) fn add(&mut self, one: T) -> Result<(), Error> {
        let after = measured(self.lanes)?;
        self.place(after, one);
        Ok(())
    }

    fn place(&mut self, after: u64, one: T) {
        let before = std::mem::replace(&mut self.now, after);
        let is_far = after > NEAR_TICKS;
        if is_far == (before > NEAR_TICKS) && before.max(after) <= SAME * before.min(after) {
            self.found[usize::from(is_far)].push((before.max(after), one));
        } else {
            self.left_out += 1;
        }
    }

    /// Those of each kind, if there are enough, and their distance in the median.
    pub(super) fn found(self) -> impl Iterator<Item = (u64, Vec<T>)> {
        let enough = self.found.into_iter().filter(|all| all.len() >= PAIRS_LEAST);
        enough.map(|mut all| {
            all.sort_by_key(|(ticks, _)| *ticks);
            (all[all.len() / 2].0, all.into_iter().map(|(_, one)| one).collect())
        })
    }
}

fn measured(lanes: Lanes) -> Result<u64, Error> {
    let ticks = on_lane(lanes.from, || Ok(round_trip::measure_ticks(lanes.on)))?;
    ticks.ok_or(Error::NoRoundTrip)
}

#[cfg(test)]
mod tests {
    use super::*;
    use elfen_shim::clock::Clock;

    #[test]
    fn only_what_kept_its_distance_counts() {
        let lanes = Lanes { on: 0, from: 1, clock: Clock::default() };
        let found = [const { Vec::new() }; 2];
        let mut distances = Distances { lanes, now: 150, found, left_out: 0 };
        // Near; as it goes far; far; as it comes back; and as siblings become cores.
        let all = [170, 160, 180, 175, 165, 1_000, 900, 1_100, 160, 60, 170];
        all.iter().zip(0..).for_each(|(&after, pair)| distances.place(after, pair));
        assert_eq!((distances.most(), distances.left_out, distances.now()), (5, 4, 170));
        let found: Vec<(u64, Vec<u32>)> = distances.found().collect();
        assert_eq!(found.len(), 1, "two far ones are too few: {found:?}");
        let (ticks, mut pairs) = found[0].clone();
        pairs.sort_unstable();
        assert_eq!((ticks, pairs), (175, vec![0, 1, 2, 3, 4]));
    }
}
