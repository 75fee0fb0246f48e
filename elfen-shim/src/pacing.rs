//! `--period auto`: adapts the period to the cost of samples, while sampling.
//!
//! A sample costs the observed program time only if the program has written the word since the
//! previous sample. Then the word's cache line moves to the observer, and the next store must fetch
//! it back. In a virtual machine, this transfer can take several times as long from one second to
//! the next, because the host moves virtual CPUs. The observer measures both: how many samples find
//! a changed value, and how long such a sample waits for its line. Words that seldom change are
//! sampled often. Words that always change are sampled at the period that costs the program 2 %.

/// The number of measured waits per estimate of the transfer time. The estimate is their median,
/// because interrupts lengthen some waits.
const WAITS: usize = 15;
/// The period is computed again after this number of blocks, even if fewer waits were measured.
const BLOCKS: u32 = 32;
/// The period of words that always change, as a multiple of the round trip of their line. A sample
/// delays a program with locked instructions, whose stores must complete at once, by one to two
/// round trips. Other programs lose less (`elfen lab bench shim --only costs`).
pub const PERIOD_FACTOR: u64 = 90;

/// The shortest period that `--period auto` uses.
pub const AUTO_NS: u64 = 1_000;

/// The results of one block of samples.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BlockStats {
    pub samples: u32,
    /// The number of samples whose values differ from those of the previous sample.
    pub changed: u32,
    /// How long the first sample of the block took, if its values changed.
    pub waited: Option<u64>,
}

/// Computes the period from the blocks sampled so far.
#[derive(Debug)]
pub struct Pacing {
    min_ticks: u64,
    /// The estimated round trip of the line between the writing CPU and the observer.
    round_trip_ticks: u64,
    /// How long the two clock readings of a measured sample take.
    clock_ticks: u64,
    waits: [u64; WAITS],
    timed: usize,
    blocks: u32,
    samples: u64,
    changed: u64,
}

impl Pacing {
    /// Creates a pacing with periods of at least `min_ticks`. `round_trip` is the current round
    /// trip between the two CPUs.
    pub fn new(min_ticks: u64, round_trip: u64) -> Self {
        Self {
            min_ticks,
            round_trip_ticks: round_trip,
            clock_ticks: 0,
            waits: [0; WAITS],
            timed: 0,
            blocks: 0,
            samples: 0,
            changed: 0,
        }
    }

    /// The initial period, as if the words changed all the time.
    pub fn initial_period(&self) -> u64 {
        self.round_trip_ticks.saturating_mul(PERIOD_FACTOR).max(self.min_ticks)
    }

    /// Measures how long two consecutive clock readings take on this CPU.
    pub fn measure_clock_cost(&mut self) {
        let twice = |_| {
            let start = crate::clock::before();
            crate::clock::after() - start
        };
        self.clock_ticks = (0..64).map(twice).min().unwrap_or(0);
    }

    /// Adds a block. Returns a new period when enough blocks were added.
    pub fn add_block(&mut self, block: &BlockStats) -> Option<u64> {
        self.blocks += 1;
        self.samples += u64::from(block.samples);
        self.changed += u64::from(block.changed);
        if let Some(waited) = block.waited {
            self.waits[self.timed] = waited.saturating_sub(self.clock_ticks);
            self.timed += 1;
        }
        if self.timed < WAITS && self.blocks < BLOCKS {
            return None;
        }
        if self.timed == WAITS {
            self.waits.sort_unstable();
            // A wait is a transfer in one direction. The line must also return to the writing CPU.
            self.round_trip_ticks = 2 * self.waits[WAITS / 2];
            self.timed = 0;
        }
        let away = u128::from(self.round_trip_ticks * PERIOD_FACTOR) * u128::from(self.changed);
        let period = u64::try_from(away / u128::from(self.samples.max(1))).unwrap_or(u64::MAX);
        self.blocks = 0;
        self.samples = 0;
        self.changed = 0;
        Some(period.max(self.min_ticks))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(changed: u32, waited: u64) -> BlockStats {
        BlockStats { samples: 64, changed, waited: Some(waited).filter(|_| changed > 0) }
    }

    fn last(pacing: &mut Pacing, all: &[BlockStats]) -> Option<u64> {
        all.iter().filter_map(|one| pacing.add_block(one)).last()
    }

    #[test]
    fn the_period_follows_the_median_wait() {
        let mut pacing = Pacing::new(2_600, 200);
        assert_eq!(pacing.initial_period(), 200 * PERIOD_FACTOR);
        assert_eq!(last(&mut pacing, &[block(64, 100); 14]), None);
        assert_eq!(last(&mut pacing, &[block(64, 100)]), Some(100 * 2 * PERIOD_FACTOR));
        // Seven long waits of fifteen count as interrupts. Eight change the median.
        let of = |far, count| [vec![block(64, far); count], vec![block(64, 100); 15 - count]];
        assert_eq!(last(&mut pacing, &of(40_000, 7).concat()), Some(100 * 2 * PERIOD_FACTOR));
        assert_eq!(last(&mut pacing, &of(500, 8).concat()), Some(500 * 2 * PERIOD_FACTOR));
        pacing.clock_ticks = 60;
        assert_eq!(last(&mut pacing, &[block(64, 160); 15]), Some(100 * 2 * PERIOD_FACTOR));
        pacing.clock_ticks = 200;
        assert_eq!(last(&mut pacing, &[block(64, 160); 15]), Some(2_600), "no shorter");
    }

    #[test]
    fn words_that_seldom_change_are_sampled_often() {
        let mut pacing = Pacing::new(2_600, 1_000);
        let quiet = [block(0, 0); BLOCKS as usize];
        assert_eq!(last(&mut pacing, &quiet), Some(2_600));
        // One sample in four changes. Too few waits are measured, so the initial round trip is
        // used.
        let some: Vec<BlockStats> = (0..BLOCKS)
            .map(|n| BlockStats { waited: (n % 4 == 0).then_some(9), ..block(16, 9) })
            .collect();
        assert_eq!(last(&mut pacing, &some), Some(1_000 * PERIOD_FACTOR / 4));
        // The waits that were measured before count together with these.
        assert_eq!(last(&mut pacing, &some), Some(2_600), "near");
    }
}
