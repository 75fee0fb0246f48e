//! Feeling from one lane whether the other sleeps: the same few instructions take longer while the
//! sibling works.
//!
//! The thesis counted the core's micro-operations every 150 cycles; this needs no counter. A
//! stretch of arithmetic is timed again and again, and when a row of them ran at the pace of a
//! sibling that sleeps, the core was given away at the first of the row.

use super::sleeper::{ticks, work};

/// How many stretches make a pace.
const STRETCHES: usize = 4096;

/// A sleeping sibling makes a stretch at least this much shorter, or the two share no core.
const GAIN: f64 = 1.15;

/// Stretches in a row at the faster pace. One alone may be chance.
const ROW: u32 = 16;

/// A lane that has not given the core away after as many stretches, some milliseconds, does not.
const LIMIT: u32 = 50_000;

/// Stretches of arithmetic one after the other, in ticks.
pub(super) fn paces() -> Vec<u64> {
    (0..STRETCHES).map(|_| stretch().1).collect()
}

/// Begin and length of one stretch, of one or two hundred cycles.
fn stretch() -> (u64, u64) {
    let began = ticks();
    for _ in 0..4 {
        work();
    }
    (began, ticks() - began)
}

/// Tells the pace next to a sleeping sibling from that next to a working one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Probe {
    /// A stretch of fewer ticks ran alone.
    below: u64,
}

impl Probe {
    /// `None` if the sibling makes no difference: then these are lanes of different cores.
    pub(super) fn between(working: Vec<u64>, asleep: Vec<u64>) -> Option<Self> {
        let (working, asleep) = (median(working)?, median(asleep)?);
        let [with, alone] = [working, asleep].map(elfen_console::duration::number);
        (alone * GAIN < with).then_some(Self { below: working.midpoint(asleep) })
    }

    /// When the sibling gave the core away; `None` if it did not.
    pub(super) fn released_at(&self) -> Option<u64> {
        let mut row = Row::default();
        (0..LIMIT).find_map(|_| {
            let (began, length) = stretch();
            row.add(began, length < self.below)
        })
    }
}

fn median(mut lengths: Vec<u64>) -> Option<u64> {
    lengths.sort_unstable();
    lengths.get(lengths.len() / 2).copied()
}

/// Fast stretches one after the other.
#[derive(Default)]
struct Row {
    began: u64,
    length: u32,
}

impl Row {
    /// When the row began, once it is long enough.
    fn add(&mut self, began: u64, fast: bool) -> Option<u64> {
        if !fast {
            self.length = 0;
            return None;
        }
        if self.length == 0 {
            self.began = began;
        }
        self.length += 1;
        (self.length == ROW).then_some(self.began)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: lanes of different cores are told from siblings. Method: paces that are alike, apart,
    /// and the wrong way round.
    #[test]
    fn a_probe_needs_two_paces() {
        let of = |working: u64, asleep: u64| Probe::between(vec![working; 9], vec![asleep; 9]);
        assert_eq!(of(200, 100), Some(Probe { below: 150 }));
        assert_eq!(of(110, 100), None);
        assert_eq!(of(100, 200), None);
        assert_eq!(Probe::between(Vec::new(), vec![1]), None);
    }

    /// Goal: the core is given away at the first of a row, and interruptions begin a new one.
    /// Method: fast and slow stretches, ten ticks apart.
    #[test]
    fn a_row_begins_with_its_first() {
        let seen = |fast: &dyn Fn(u64) -> bool| {
            let mut row = Row::default();
            (0..100).find_map(|at| row.add(at * 10, fast(at)))
        };
        assert_eq!(seen(&|_| true), Some(0));
        assert_eq!(seen(&|at| at >= 7), Some(70));
        assert_eq!(seen(&|at| at != 15), Some(160), "one short of a row does not count");
        assert_eq!(seen(&|at| at % 16 != 0), None);
    }

    /// Goal: a pace can be measured at all. Method: no stretch is empty, or the clock stands still.
    #[test]
    fn stretches_take_time() {
        assert!(paces().iter().all(|&length| length > 0));
    }
}
