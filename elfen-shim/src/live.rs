//! Totals of each signal so far, for `--live`.
//!
//! The observer is the only writer. It adds each run when the run ends. Any number of threads may
//! read. All memory is allocated before the first sample. These totals are only for display: a
//! reader may count the same run twice, in the total and as the current run.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use crate::recording::State;

/// The maximum number of tags per signal that have separate totals. A power of two.
const SLOTS: usize = 1024;
/// Slots of the states without a value. They precede the slots of tags.
const GAP: usize = 0;
const NOT_RUNNING: usize = 1;
const OTHER: usize = 2;
const FIRST: usize = 3;
/// The number of slots that are tried for a tag before it is counted under `OTHER`.
const TRIES: usize = 16;

/// The totals of one signal, as its observer writes them.
#[derive(Debug)]
struct SignalTable {
    /// A tag and its total time in ticks. A slot with tag 0 and no ticks is free.
    slots: Vec<(AtomicU64, AtomicU64)>,
    new_values: AtomicU64,
    /// The current state: its begin, its slot and its value.
    since: AtomicU64,
    slot: AtomicU64,
    value: AtomicU64,
    /// Whether the signal has ever had a value.
    has_value: AtomicBool,
}

/// The totals of all signals of an observer.
#[derive(Debug)]
pub struct LiveTotals {
    signals: Vec<SignalTable>,
    /// The time up to which the totals are complete.
    pub until: AtomicU64,
    pub samples: AtomicU64,
}

/// How long one signal was in each state, in ticks.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SignalTotals {
    pub gap: u64,
    pub not_running: u64,
    pub other: u64,
    pub tags: Vec<(u64, u64)>,
    pub new_values: u64,
    /// The current value, if the signal has one.
    pub now: Option<u64>,
}

impl SignalTotals {
    /// The difference from an earlier reading.
    pub fn since(&self, before: &Self) -> Self {
        let old = |tag: u64| before.tags.iter().find(|(known, _)| *known == tag).map_or(0, |o| o.1);
        let tag = |&(tag, ticks): &(u64, u64)| (tag, ticks.saturating_sub(old(tag)));
        Self {
            gap: self.gap.saturating_sub(before.gap),
            not_running: self.not_running.saturating_sub(before.not_running),
            other: self.other.saturating_sub(before.other),
            tags: self.tags.iter().map(tag).collect(),
            new_values: self.new_values.saturating_sub(before.new_values),
            now: self.now,
        }
    }
}

impl LiveTotals {
    pub fn of(signals: usize) -> Self {
        let slot = || (AtomicU64::new(0), AtomicU64::new(0));
        let totals = || SignalTable {
            slots: (0..FIRST + SLOTS).map(|_| slot()).collect(),
            new_values: AtomicU64::new(0),
            since: AtomicU64::new(0),
            slot: AtomicU64::new(GAP as u64),
            value: AtomicU64::new(0),
            has_value: AtomicBool::new(false),
        };
        let signals = (0..signals).map(|_| totals()).collect();
        Self { signals, until: AtomicU64::new(0), samples: AtomicU64::new(0) }
    }

    /// Adds the time of a signal's previous state, which ends at `at`, and begins the next state.
    pub(crate) fn set_state(&self, signal: usize, at: u64, state: State) {
        let Some(totals) = self.signals.get(signal) else { return };
        // Relaxed, here and below: there is one writer, and readers need no order between words.
        let since = totals.since.load(Relaxed);
        let slot = usize::try_from(totals.slot.load(Relaxed)).unwrap_or(GAP);
        if let Some((_, ticks)) = totals.slots.get(slot).filter(|_| since != 0) {
            ticks.store(ticks.load(Relaxed) + at.saturating_sub(since), Relaxed);
        }
        let slot = match state {
            State::Gap => GAP,
            State::NotRunning => NOT_RUNNING,
            State::Other => OTHER,
            State::Value(value) => {
                let is_new = totals.has_value.load(Relaxed) && totals.value.load(Relaxed) != value;
                let count = totals.new_values.load(Relaxed) + u64::from(is_new);
                totals.new_values.store(count, Relaxed);
                totals.value.store(value, Relaxed);
                totals.has_value.store(true, Relaxed);
                totals.find_slot(value)
            }
        };
        totals.slot.store(slot as u64, Relaxed);
        totals.since.store(at, Relaxed);
    }

    /// Reads the totals of all signals.
    pub fn totals(&self) -> impl Iterator<Item = SignalTotals> {
        (0..self.signals.len()).map(|signal| self.totals_of(signal))
    }

    /// Reads the totals of one signal, including its current state.
    pub fn totals_of(&self, signal: usize) -> SignalTotals {
        let Some(totals) = self.signals.get(signal) else { return SignalTotals::default() };
        let ticks = |slot: usize| totals.slots[slot].1.load(Relaxed);
        let mut all: Vec<u64> = (0..totals.slots.len()).map(ticks).collect();
        let (since, until) = (totals.since.load(Relaxed), self.until.load(Relaxed));
        let slot = usize::try_from(totals.slot.load(Relaxed)).unwrap_or(GAP);
        if since != 0
            && let Some(ticks) = all.get_mut(slot)
        {
            *ticks += until.saturating_sub(since);
        }
        let tag = |(slot, ticks): (usize, &u64)| (totals.slots[slot].0.load(Relaxed), *ticks);
        let tags = all.iter().enumerate().skip(FIRST).filter(|(_, ticks)| **ticks > 0);
        SignalTotals {
            gap: all[GAP],
            not_running: all[NOT_RUNNING],
            other: all[OTHER],
            tags: tags.map(tag).collect(),
            new_values: totals.new_values.load(Relaxed),
            now: (slot >= FIRST || slot == OTHER).then(|| totals.value.load(Relaxed)),
        }
    }
}

impl SignalTable {
    /// Finds the slot of a tag, or takes a free slot.
    fn find_slot(&self, value: u64) -> usize {
        let hash = value.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let first = usize::try_from(hash).unwrap_or(0);
        for at in (first..first + TRIES).map(|at| FIRST + at % SLOTS) {
            let (tag, ticks) = &self.slots[at];
            if tag.load(Relaxed) == value {
                return at;
            }
            if ticks.load(Relaxed) == 0 && tag.load(Relaxed) == 0 {
                tag.store(value, Relaxed);
                return at;
            }
        }
        OTHER
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: totals include all runs and the current one, and tags beyond the table are counted as
    /// others. Method: some runs of two signals, and more tags than slots.
    #[test]
    fn totals_add_up_all_runs() {
        let live = LiveTotals::of(2);
        for (at, state) in [
            (100, State::Value(7)),
            (110, State::Value(0)),
            (130, State::Value(7)),
            (135, State::NotRunning),
            (140, State::Gap),
            (150, State::Value(7)),
        ] {
            live.set_state(0, at, state);
        }
        live.until.store(157, Relaxed);
        let mut seen = live.totals_of(0);
        seen.tags.sort_unstable();
        let tags = vec![(0, 20), (7, 22)];
        let expected =
            SignalTotals { gap: 10, not_running: 5, other: 0, tags, new_values: 2, now: Some(7) };
        assert_eq!(seen, expected);
        assert_eq!(live.totals_of(1), SignalTotals::default());
        (1..=10_000).for_each(|tag| live.set_state(1, tag, State::Value(tag)));
        live.until.store(10_001, Relaxed);
        let seen = live.totals_of(1);
        let all = seen.other + seen.tags.iter().map(|(_, ticks)| ticks).sum::<u64>();
        assert_eq!((all, seen.tags.len() <= SLOTS, seen.other > 0), (10_000, true, true));
    }
}
