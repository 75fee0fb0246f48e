//! Sums over runs: how long each tag lasted, the lengths of its runs, and what was not observed.
//!
//! A tally stays small however many runs are added. The tallies of consecutive recordings of the
//! same signals can be added up.

use elfen_console::duration::number;

use crate::recording::{Kind, Recording, State};
use crate::tags::Tags;

/// Sums over all runs of a recording.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    pub signals: Vec<SignalTally>,
    /// One for each observer.
    pub coverage: Vec<Coverage>,
}

/// How long an observer took samples, and how long it did not.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Coverage {
    pub observed_ticks: u64,
    pub gap_ticks: u64,
    pub gaps: u64,
    pub longest_gap_ticks: u64,
    /// Time before the first sample. It counts as a gap if another recording precedes this one.
    leading_ticks: u64,
}

/// Sums over the runs of one signal.
#[derive(Clone, Debug, Default)]
pub struct SignalTally {
    changes: Changes,
    pub values: Option<WeightedValues>,
    pub tags: Tags,
}

/// Counts changes from one value to another. Gaps and times without the thread are not changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Changes {
    count: u64,
    /// The first value and the last.
    ends: Option<(State, State)>,
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
        let of = |signal| SignalTally::of(recording, signal);
        let signals = (0..recording.head.signals.len()).map(of).collect();
        // All signals of an observer have the same gaps, so the first signal is enough.
        let firsts = recording.head.firsts().into_iter();
        Self { signals, coverage: firsts.map(|signal| Coverage::of(recording, signal)).collect() }
    }

    /// The tally of an observer with `signals` signals and no runs yet.
    pub fn empty(signals: usize) -> Self {
        Self { signals: vec![SignalTally::default(); signals], coverage: vec![Coverage::default()] }
    }

    /// Adds the signals of another observer of the same time.
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

    /// Adds the tally of the same signals over the time that follows.
    pub fn add(&mut self, next: Self) {
        if self.signals.is_empty() {
            *self = next;
            return;
        }
        self.coverage.iter_mut().zip(next.coverage).for_each(|(one, next)| one.add(next));
        self.signals.iter_mut().zip(next.signals).for_each(|(one, next)| one.add(next));
    }
}

impl Coverage {
    /// Computes it from one of the observer's signals.
    fn of(recording: &Recording, signal: usize) -> Self {
        let mut coverage = Self::default();
        let first = recording.runs.get(signal).and_then(|runs| runs.first());
        let first = first.map(|run| run.start_ticks);
        for (run, end) in recording.runs_with_ends(signal) {
            let ticks = end.saturating_sub(run.start_ticks);
            if run.state != State::Gap {
                coverage.observed_ticks += ticks;
            } else if first.is_some_and(|first| run.start_ticks > first) {
                coverage.add_gap(ticks);
            } else {
                coverage.leading_ticks += ticks;
            }
        }
        coverage
    }

    fn add_gap(&mut self, ticks: u64) {
        self.gap_ticks += ticks;
        self.gaps += 1;
        self.longest_gap_ticks = self.longest_gap_ticks.max(ticks);
    }

    /// Adds the time that follows.
    fn add(&mut self, next: Self) {
        match (self.observed_ticks, next.leading_ticks) {
            (_, 0) => {}
            (0, leading) => self.leading_ticks += leading,
            (_, leading) => self.add_gap(leading),
        }
        self.observed_ticks += next.observed_ticks;
        self.gap_ticks += next.gap_ticks;
        self.gaps += next.gaps;
        self.longest_gap_ticks = self.longest_gap_ticks.max(next.longest_gap_ticks);
    }
}

impl SignalTally {
    fn of(recording: &Recording, signal: usize) -> Self {
        let states = recording.runs[signal].iter().map(|run| run.state);
        let values = states.filter(|state| matches!(state, State::Value(_) | State::Other));
        let changes = values.fold(Changes::default(), |sum, state| {
            sum.and(Changes { count: 0, ends: Some((state, state)) })
        });
        match recording.head.signals[signal].kind {
            Kind::Values => {
                Self { changes, values: weighed(recording, signal), tags: Tags::default() }
            }
            Kind::Tags => Self { changes, values: None, tags: Tags::of(recording, signal) },
        }
    }

    /// How often a value differed from the value before it. The first value is not counted.
    pub fn new_values(&self) -> u64 {
        self.changes.count
    }

    fn add(&mut self, next: Self) {
        self.changes = self.changes.and(next.changes);
        self.values = match (self.values, next.values) {
            (Some(one), Some(next)) => Some(one.and(next)),
            (one, next) => one.or(next),
        };
        self.tags.add(next.tags);
    }
}

impl Changes {
    fn and(self, next: Self) -> Self {
        match (self.ends, next.ends) {
            (Some((first, before)), Some((after, last))) => Self {
                count: self.count + next.count + u64::from(before != after),
                ends: Some((first, last)),
            },
            (Some(_), None) => self,
            (None, _) => next,
        }
    }
}

fn weighed(recording: &Recording, signal: usize) -> Option<WeightedValues> {
    let of = &recording.head.signals[signal];
    let each = recording.runs_with_ends(signal).filter_map(|(run, end)| match run.state {
        State::Value(value) => {
            let value = of.number(value);
            let ticks = number(end.saturating_sub(run.start_ticks));
            let sum = value as f64 * ticks;
            Some(WeightedValues {
                first: value,
                last: value,
                least: value,
                most: value,
                sum,
                ticks,
            })
        }
        State::Gap | State::NotRunning | State::Other => None,
    });
    each.reduce(WeightedValues::and)
}

impl WeightedValues {
    fn and(self, next: Self) -> Self {
        Self {
            first: self.first,
            last: next.last,
            least: self.least.min(next.least),
            most: self.most.max(next.most),
            sum: self.sum + next.sum,
            ticks: self.ticks + next.ticks,
        }
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

    /// Goal: a constant has no changes, and a number has its own, whatever gaps and switches lie
    /// between. Method: a constant and a number that grows, in several pieces.
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
            Tally::of(&Recording { head: head.clone(), runs, cut: false })
        };
        let mut tally = Tally::empty(2);
        for (from, grows) in [(0, [1, 2]), (10, [2, 3]), (20, [4, 4])] {
            tally.add(part(from, grows));
        }
        let counts: Vec<u64> = tally.signals.iter().map(SignalTally::new_values).collect();
        assert_eq!(counts, [0, 3]);
    }
}
