//! `--keep histogram`: observes for any length of time in little memory.
//!
//! Whenever the pool is nearly full, the observer adds up its runs and clears the pool. The
//! observer's own thread does this, because there may be no third CPU. Meanwhile it takes no
//! samples, which the recording shows as a gap.

use crate::recording::{Head, Pool, Recording};
use crate::symbols::{Layout, Names};
use crate::tally::Tally;

/// The sum of all runs so far, and the names that are needed to add more.
#[derive(Debug)]
pub struct Fold {
    head: Head,
    names: Names,
    pub tally: Tally,
}

impl Fold {
    /// Names and joins runs according to this head.
    pub fn of(head: Head) -> Self {
        let layout = Layout { process: head.process, ..Layout::default() };
        Self { names: Names::of(layout, &head.program), head, tally: Tally::default() }
    }

    /// Adds the runs of a pool. All runs in it must have ended.
    pub fn add(&mut self, pool: &Pool) {
        self.names.update();
        // Parsing what was just written does not fail.
        if let Ok(mut part) = Recording::of(self.head.clone(), pool) {
            self.names.name_values(&mut part);
            self.tally.add(&part);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;
    use crate::recording::{Kind, Series, Signal, Source, State};
    use proptest::prelude::*;

    const SIGNALS: [(&str, Kind); 2] = [("what", Kind::Tags), ("how many", Kind::Values)];

    /// Records samples with these lengths and values, as the observer does. A pause follows some of
    /// them. With `fold`, the runs are added up at each pause.
    fn summed(samples: &[(u64, u64, bool)], fold: bool) -> Tally {
        let signal = |(name, kind)| Signal {
            names: (0..9).map(|value| (value, format!("name {}", value / 2))).collect(),
            ..Signal::new(name, Source::Proc, kind)
        };
        let clock = Clock { ticks_per_second: 1_000_000_000, step_ticks: 1, unit_ticks: 0 };
        let signals = SIGNALS.map(signal).to_vec();
        let mut folded = Fold::of(Head { clock, signals, ..Head::default() });
        let mut pool = Pool::new(1 << 20, SIGNALS.len(), false);
        let mut series = [(0, Kind::Tags), (1, Kind::Values)]
            .map(|(index, kind)| Series::new(index, kind, 1, 1_000));
        let mut at = 1_000;
        for &(length, value, pause) in samples {
            for one in &mut series {
                one.see(at, State::Value(value), &mut pool).unwrap();
            }
            at += length;
            if pause {
                series.iter_mut().for_each(|one| one.gap(at, false, &mut pool).unwrap());
                if fold {
                    series.iter_mut().for_each(|one| one.end(at, &mut pool).unwrap());
                    folded.add(&pool);
                    pool.clear();
                    series.iter_mut().for_each(Series::restart_chunk);
                }
                at += 70;
            }
        }
        series.iter_mut().for_each(|one| one.end(at, &mut pool).unwrap());
        folded.add(&pool);
        folded.tally
    }

    /// Goal: the sum of the pieces equals the sum of the whole. Method: random samples with pauses,
    /// recorded twice. In one recording, each pause ends a piece. In the other, each pause is only
    /// a gap.
    fn check(samples: &[(u64, u64, bool)]) -> Result<(), TestCaseError> {
        let [pieces, whole] = [true, false].map(|fold| summed(samples, fold));
        prop_assert_eq!(&pieces.coverage, &whole.coverage);
        let [tags, numbers] = pieces.signals.as_slice() else { panic!("{pieces:?}") };
        let [whole_tags, whole_numbers] = whole.signals.as_slice() else { panic!("{whole:?}") };
        prop_assert_eq!(tags.new_values, whole_tags.new_values);
        prop_assert_eq!(numbers.new_values, whole_numbers.new_values);
        prop_assert_eq!(tags.tags.ran_ticks, whole_tags.tags.ran_ticks);
        prop_assert!(tags.tags.by_name.keys().eq(whole_tags.tags.by_name.keys()));
        for (tag, whole) in tags.tags.by_name.values().zip(whole_tags.tags.by_name.values()) {
            prop_assert_eq!(tag.ticks, whole.ticks);
            prop_assert!(tag.lengths.columns().eq(whole.lengths.columns()));
        }
        let extremes = |numbers: &crate::tally::SignalTally| {
            numbers.values.map(|seen| (seen.first, seen.last, seen.least, seen.most))
        };
        prop_assert_eq!(extremes(numbers), extremes(whole_numbers));
        if let (Some(one), Some(whole)) = (numbers.values, whole_numbers.values) {
            prop_assert!((one.mean() - whole.mean()).abs() < 1e-6);
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn the_sum_of_pieces_equals_the_whole(
            samples in proptest::collection::vec((1_u64..500, 0_u64..12, any::<bool>()), 1..60)
        ) {
            check(&samples)?;
        }
    }
}
