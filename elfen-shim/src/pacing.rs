//! A period that follows what looking costs, while it looks.
//!
//! A look costs the observed something only if it has written the word since the last one: then its
//! line goes to the observer and has to be had back for the next store. In a virtual machine that
//! takes several times as long from one second to the next, as the host moves its CPUs. The
//! observer can tell both by itself: how many samples find another value than the one before, and
//! how long such a sample waits for its line. Words that are seldom written are looked at often,
//! and those that change all the time as often as costs 2 %.

/// Timed waits that a distance is made of, by their median: some have met an interrupt.
const WAITS: usize = 15;
/// Stretches after which the period is made anew, however few waits were timed.
const STRETCHES: u32 = 32;
/// So many times as long as a line is away in all, nobody looks. That is what a look costs a
/// program whose stores have to be done at once, as locked instructions have it, or up to twice as
/// much; others pay less (`elfen lab bench shim --only costs`).
pub const TIMES: u64 = 90;

/// The shortest period that is made of a distance.
pub const AUTO_NS: u64 = 1_000;

/// What samples in a row found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stretch {
    pub samples: u32,
    /// Those that found another value than the one before.
    pub changed: u32,
    /// How long the first of the stretch took, if it is one of these.
    pub waited: Option<u64>,
}

/// See the head of this file.
#[derive(Debug)]
pub struct Pacing {
    least_ticks: u64,
    /// For how long a line is gone from who writes it.
    away_ticks: u64,
    /// What a sample takes by itself, without waiting.
    own_ticks: u64,
    waits: [u64; WAITS],
    timed: usize,
    stretches: u32,
    samples: u64,
    changed: u64,
}

impl Pacing {
    /// Of periods no shorter than `least_ticks`, between lanes that are `round_trip` apart now.
    pub fn new(least_ticks: u64, round_trip: u64) -> Self {
        Self {
            least_ticks,
            away_ticks: round_trip,
            own_ticks: 0,
            waits: [0; WAITS],
            timed: 0,
            stretches: 0,
            samples: 0,
            changed: 0,
        }
    }

    /// The period to begin with, as if the words changed all the time.
    pub fn first(&self) -> u64 {
        self.away_ticks.saturating_mul(TIMES).max(self.least_ticks)
    }

    /// What reading the clock twice takes here, with nothing in between.
    pub fn measure_own(&mut self) {
        let twice = |_| {
            let start = crate::clock::before();
            crate::clock::after() - start
        };
        self.own_ticks = (0..64).map(twice).min().unwrap_or(0);
    }

    /// After a stretch; gives the period from now on, once enough was seen.
    pub fn add(&mut self, stretch: &Stretch) -> Option<u64> {
        self.stretches += 1;
        self.samples += u64::from(stretch.samples);
        self.changed += u64::from(stretch.changed);
        if let Some(waited) = stretch.waited {
            self.waits[self.timed] = waited.saturating_sub(self.own_ticks);
            self.timed += 1;
        }
        if self.timed < WAITS && self.stretches < STRETCHES {
            return None;
        }
        if self.timed == WAITS {
            self.waits.sort_unstable();
            // To the observer, and back.
            self.away_ticks = 2 * self.waits[WAITS / 2];
            self.timed = 0;
        }
        let away = u128::from(self.away_ticks * TIMES) * u128::from(self.changed);
        let period = u64::try_from(away / u128::from(self.samples.max(1))).unwrap_or(u64::MAX);
        (self.stretches, self.samples, self.changed) = (0, 0, 0);
        Some(period.max(self.least_ticks))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stretch(changed: u32, waited: u64) -> Stretch {
        Stretch { samples: 64, changed, waited: Some(waited).filter(|_| changed > 0) }
    }

    fn last(pacing: &mut Pacing, all: &[Stretch]) -> Option<u64> {
        all.iter().filter_map(|one| pacing.add(one)).last()
    }

    #[test]
    fn a_period_follows_most_waits() {
        let mut pacing = Pacing::new(2_600, 200);
        assert_eq!(pacing.first(), 200 * TIMES);
        assert_eq!(last(&mut pacing, &[stretch(64, 100); 14]), None);
        assert_eq!(last(&mut pacing, &[stretch(64, 100)]), Some(100 * 2 * TIMES));
        // Seven that were interrupted change nothing, and eight that are far do.
        let of = |far, count| [vec![stretch(64, far); count], vec![stretch(64, 100); 15 - count]];
        assert_eq!(last(&mut pacing, &of(40_000, 7).concat()), Some(100 * 2 * TIMES));
        assert_eq!(last(&mut pacing, &of(500, 8).concat()), Some(500 * 2 * TIMES));
        pacing.own_ticks = 60;
        assert_eq!(last(&mut pacing, &[stretch(64, 160); 15]), Some(100 * 2 * TIMES));
        pacing.own_ticks = 200;
        assert_eq!(last(&mut pacing, &[stretch(64, 160); 15]), Some(2_600), "no shorter");
    }

    #[test]
    fn what_seldom_changes_is_looked_at_often() {
        let mut pacing = Pacing::new(2_600, 1_000);
        let quiet = [stretch(0, 0); STRETCHES as usize];
        assert_eq!(last(&mut pacing, &quiet), Some(2_600));
        // One sample of four, which is timed as often; the distance is that of the beginning.
        let some: Vec<Stretch> = (0..STRETCHES)
            .map(|n| Stretch { waited: (n % 4 == 0).then_some(9), ..stretch(16, 9) })
            .collect();
        assert_eq!(last(&mut pacing, &some), Some(1_000 * TIMES / 4));
        // Those timed before count with those that follow.
        assert_eq!(last(&mut pacing, &some), Some(2_600), "near");
    }
}
