//! Runs added up: how long each thing was done, in which lengths, and what was not seen.
//!
//! A tally stays small however long it is added to, and joins with one of the time that follows.

use elfen_console::duration::number;

use crate::recording::{Kind, Recording, State};
use crate::tags::Tags;

/// What the runs of a recording add up to.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    pub signals: Vec<SignalTally>,
    /// Of each observer.
    pub looked: Vec<Looked>,
}

/// How long an observer looked, and how long it did not.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Looked {
    pub observed_ticks: u64,
    pub gap_ticks: u64,
    pub gaps: u64,
    pub longest_gap_ticks: u64,
    /// Before the first sample: a gap only if something was seen before it.
    leading_ticks: u64,
}

/// One signal's part.
#[derive(Clone, Debug, Default)]
pub struct SignalTally {
    changes: Changes,
    pub values: Option<Weighed>,
    pub tags: Tags,
}

/// Changes from one value to another. Gaps and times without the thread lie between values and
/// change none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Changes {
    count: u64,
    /// The first value and the last.
    ends: Option<(State, State)>,
}

/// Numbers, by the time that each was there.
#[derive(Clone, Copy, Debug)]
pub struct Weighed {
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
        // Gaps are in all signals of an observer at once.
        let firsts = recording.head.firsts().into_iter();
        Self { signals, looked: firsts.map(|signal| Looked::of(recording, signal)).collect() }
    }

    /// Of an observer of so many signals that has seen nothing yet.
    pub fn empty(signals: usize) -> Self {
        Self { signals: vec![SignalTally::default(); signals], looked: vec![Looked::default()] }
    }

    /// Adds what another observer saw at the same time, of other signals.
    pub fn beside(mut self, other: Self) -> Self {
        self.signals.extend(other.signals);
        self.looked.extend(other.looked);
        self
    }

    /// Of all observers together.
    pub fn all(&self) -> Looked {
        let mut all = Looked::default();
        for one in &self.looked {
            all.observed_ticks += one.observed_ticks;
            all.gap_ticks += one.gap_ticks;
            all.gaps += one.gaps;
            all.longest_gap_ticks = all.longest_gap_ticks.max(one.longest_gap_ticks);
        }
        all
    }

    /// Adds what followed, of the same signals.
    pub fn add(&mut self, next: Self) {
        if self.signals.is_empty() {
            *self = next;
            return;
        }
        self.looked.iter_mut().zip(next.looked).for_each(|(one, next)| one.add(next));
        self.signals.iter_mut().zip(next.signals).for_each(|(one, next)| one.add(next));
    }
}

impl Looked {
    /// By one of the observer's signals.
    fn of(recording: &Recording, signal: usize) -> Self {
        let mut looked = Self::default();
        let first = recording.runs.get(signal).and_then(|runs| runs.first());
        let first = first.map(|run| run.start_ticks);
        for (run, end) in recording.stretches(signal) {
            let ticks = end.saturating_sub(run.start_ticks);
            if run.state != State::Gap {
                looked.observed_ticks += ticks;
            } else if first.is_some_and(|first| run.start_ticks > first) {
                looked.add_gap(ticks);
            } else {
                looked.leading_ticks += ticks;
            }
        }
        looked
    }

    fn add_gap(&mut self, ticks: u64) {
        self.gap_ticks += ticks;
        self.gaps += 1;
        self.longest_gap_ticks = self.longest_gap_ticks.max(ticks);
    }

    /// Adds what followed.
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

    /// How often a value differed from the one before it. The first is not counted.
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

fn weighed(recording: &Recording, signal: usize) -> Option<Weighed> {
    let of = &recording.head.signals[signal];
    let each = recording.stretches(signal).filter_map(|(run, end)| match run.state {
        State::Value(value) => {
            let value = of.number(value);
            let ticks = number(end.saturating_sub(run.start_ticks));
            let sum = value as f64 * ticks;
            Some(Weighed { first: value, last: value, least: value, most: value, sum, ticks })
        }
        State::Gap | State::NotRunning | State::Other => None,
    });
    each.reduce(Weighed::and)
}

impl Weighed {
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

    /// Goal: a constant has no change, and a number has as many as it made, however many gaps and
    /// switches lie between. Method: a constant and a number that grows, in pieces and whole.
    #[test]
    fn gaps_are_no_changes() {
        let clock = Clock { ticks_per_second: 1_000_000_000, step_ticks: 1, unit_ticks: 0 };
        let signal = |name: &str| Signal {
            name: name.to_owned(),
            source: Source::Mapped,
            kind: Kind::Values,
            signed: false,
            names: Vec::new(),
        };
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
