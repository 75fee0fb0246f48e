//! Sums over runs: how long each tag lasted, the lengths of its runs, and which time was not
//! observed.
//!
//! The size of a tally does not depend on the number of runs. Consecutive recordings of the same
//! signals can be added to one tally.

use elfen_console::duration::number;

use crate::recording::{Kind, Recording, State};
use crate::tags::Tags;

/// Sums over all runs of a recording, or of several consecutive ones.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    pub signals: Vec<SignalTally>,
    /// One element for each observer.
    pub coverage: Vec<Coverage>,
}

/// How long an observer took samples, and how long it did not.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Coverage {
    pub observed_ticks: u64,
    pub gap_ticks: u64,
    pub gaps: u64,
    pub longest_gap_ticks: u64,
    /// Whether a sample was taken. The time before the first sample does not count as a gap.
    began: bool,
}

/// Sums over the runs of one signal.
#[derive(Clone, Debug, Default)]
pub struct SignalTally {
    /// How often a value differed from the previous value. Gaps and times without the thread do not
    /// count as changes.
    pub new_values: u64,
    last: Option<State>,
    pub values: Option<WeightedValues>,
    pub tags: Tags,
}

/// Extremes and mean of a number, weighted by time.
#[derive(Clone, Copy, Debug)]
pub struct WeightedValues {
    pub first: i128,
    pub last: i128,
    pub least: i128,
    pub most: i128,
    sum: f64,
    ticks: f64,
}

impl Tally {
    pub fn of(recording: &Recording) -> Self {
        let mut tally = Self::default();
        tally.add(recording);
        tally
    }

    /// Adds a recording of the same signals that continues the previous one.
    pub fn add(&mut self, recording: &Recording) {
        // All signals of an observer have the same gaps, so the first signal is enough.
        let firsts = recording.head.firsts();
        self.coverage.resize_with(firsts.len(), Default::default);
        for (coverage, first) in self.coverage.iter_mut().zip(firsts) {
            for (run, end) in recording.runs_with_ends(first) {
                coverage.add_run(run.state, end.saturating_sub(run.start_ticks));
            }
        }
        self.signals.resize_with(recording.head.signals.len(), Default::default);
        for (index, signal) in self.signals.iter_mut().enumerate() {
            signal.add(recording, index);
        }
    }

    /// Adds the signals of another observer, which observed at the same time.
    pub fn with_observer(mut self, other: Self) -> Self {
        self.signals.extend(other.signals);
        self.coverage.extend(other.coverage);
        self
    }

    /// The sum over all observers.
    pub fn total_coverage(&self) -> Coverage {
        let mut all = Coverage::default();
        for one in &self.coverage {
            all.observed_ticks += one.observed_ticks;
            all.gap_ticks += one.gap_ticks;
            all.gaps += one.gaps;
            all.longest_gap_ticks = all.longest_gap_ticks.max(one.longest_gap_ticks);
        }
        all
    }
}

impl Coverage {
    fn add_run(&mut self, state: State, ticks: u64) {
        if state != State::Gap {
            self.began = true;
            self.observed_ticks += ticks;
        } else if self.began {
            self.gap_ticks += ticks;
            self.gaps += 1;
            self.longest_gap_ticks = self.longest_gap_ticks.max(ticks);
        }
    }
}

impl SignalTally {
    fn add(&mut self, recording: &Recording, index: usize) {
        for run in &recording.runs[index] {
            if matches!(run.state, State::Value(_) | State::Other) {
                let is_new = self.last.is_some_and(|last| last != run.state);
                self.new_values += u64::from(is_new);
                self.last = Some(run.state);
            }
        }
        let signal = &recording.head.signals[index];
        if signal.kind == Kind::Tags {
            return self.tags.add(recording, index);
        }
        for (run, end) in recording.runs_with_ends(index) {
            let State::Value(value) = run.state else { continue };
            let ticks = number(end.saturating_sub(run.start_ticks));
            let value = signal.number(value);
            let values = self.values.get_or_insert(WeightedValues::of_first(value));
            values.last = value;
            values.least = values.least.min(value);
            values.most = values.most.max(value);
            values.sum += value as f64 * ticks;
            values.ticks += ticks;
        }
    }
}

impl WeightedValues {
    fn of_first(value: i128) -> Self {
        Self { first: value, last: value, least: value, most: value, sum: 0.0, ticks: 0.0 }
    }

    pub fn mean(&self) -> f64 {
        if self.ticks > 0.0 { self.sum / self.ticks } else { self.last as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;
    use crate::recording::{Head, Run, Signal, Source};

    /// Goal: a constant has no changes, and only changes of a number count, whatever gaps and
    /// switches lie between. Method: a constant and an increasing number, in several pieces.
    #[test]
    fn gaps_are_not_changes() {
        let clock = Clock { ticks_per_second: 1_000_000_000, step_ticks: 1, unit_ticks: 0 };
        let signal = |name| Signal::new(name, Source::Mapped, Kind::Values);
        let head = Head { clock, signals: vec![signal("7"), signal("n")], ..Head::default() };
        let run = |(start_ticks, state)| Run { start_ticks, state, samples: 1 };
        let part = |from: u64, grows: [u64; 2]| {
            let runs = |values: [u64; 2]| {
                let states = [
                    State::Value(values[0]),
                    State::Gap,
                    State::Value(values[0]),
                    State::NotRunning,
                    State::Value(values[1]),
                    State::Gap,
                ];
                (from..).zip(states).map(run).collect()
            };
            let runs = vec![runs([7, 7]), runs(grows)];
            Recording { head: head.clone(), runs, cut: false }
        };
        let mut tally = Tally::default();
        for (from, grows) in [(0, [1, 2]), (10, [2, 3]), (20, [4, 4])] {
            tally.add(&part(from, grows));
        }
        let counts: Vec<u64> = tally.signals.iter().map(|signal| signal.new_values).collect();
        assert_eq!(counts, [0, 3]);
    }
}
