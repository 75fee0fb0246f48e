//! Detects from one lane whether its sibling sleeps: the same few instructions take longer while
//! the sibling works.
//!
//! The thesis counted the core's micro-operations every 150 cycles. This method needs no counter.
//! It times short stretches of arithmetic, one after the other. Several fast stretches in a row
//! show that the sibling sleeps. The core was released at the start of the first one.

use super::sleeper::{ticks, work};

/// The number of stretches from which a pace is measured.
const STRETCHES: usize = 4096;

/// A stretch must be faster by this factor while the sibling sleeps. Otherwise the lanes do not
/// share a core.
const GAIN: f64 = 1.15;

/// The number of consecutive fast stretches that is required. A single fast stretch may be chance.
const ROW: u32 = 16;

/// If the core was not released after this many stretches (some milliseconds), it will not be.
const LIMIT: u32 = 50_000;

/// Measures consecutive stretches of arithmetic, in ticks.
pub(super) fn paces() -> Vec<u64> {
    (0..STRETCHES).map(|_| stretch().1).collect()
}

/// Runs one stretch of one or two hundred cycles. Returns its start and its length.
fn stretch() -> (u64, u64) {
    let began = ticks();
    for _ in 0..4 {
        work();
    }
    (began, ticks() - began)
}

/// Distinguishes a sleeping sibling from a working one by the length of a stretch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Probe {
    /// If a stretch takes fewer ticks than this, the sibling sleeps.
    below: u64,
}

impl Probe {
    /// Returns `None` if the sibling makes no difference, because the lanes belong to different
    /// cores.
    pub(super) fn between(working: Vec<u64>, asleep: Vec<u64>) -> Option<Self> {
        let (working, asleep) = (median(working)?, median(asleep)?);
        let [with, alone] = [working, asleep].map(elfen_console::duration::number);
        (alone * GAIN < with).then_some(Self { below: working.midpoint(asleep) })
    }

    /// Waits until the sibling releases the core. Returns the time, or `None` if it does not.
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

/// Consecutive fast stretches.
#[derive(Default)]
struct Row {
    began: u64,
    length: u32,
}

impl Row {
    /// Adds a stretch. Returns the start of the row once the row is long enough.
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

    /// Goal: lanes of different cores are distinguished from siblings. Method: paces that are
    /// similar, different, and the wrong way round.
    #[test]
    fn a_probe_needs_two_paces() {
        let of = |working: u64, asleep: u64| Probe::between(vec![working; 9], vec![asleep; 9]);
        assert_eq!(of(200, 100), Some(Probe { below: 150 }));
        assert_eq!(of(110, 100), None);
        assert_eq!(of(100, 200), None);
        assert_eq!(Probe::between(Vec::new(), vec![1]), None);
    }

    /// Goal: the core is released at the start of a row, and a slow stretch starts a new row.
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

    /// Goal: a pace can be measured. Method: the clock advances during each stretch.
    #[test]
    fn stretches_take_time() {
        assert!(paces().iter().all(|&length| length > 0));
    }
}
