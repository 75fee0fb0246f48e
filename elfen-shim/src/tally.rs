//! Runs added up: how long each thing was done, in which lengths, and what was not seen.
//!
//! A tally stays small however long it is added to, and joins with one of the time that follows.

use std::collections::{BTreeMap, HashMap};

use elfen_console::duration::number;

use crate::clock::Clock;
use crate::recording::{Kind, Recording, State};
use crate::symbols::NO_NAME;

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

/// Lengths of runs in buckets, 32 to a power of two: exact enough, and small whatever comes.
#[derive(Clone, Debug, Default)]
pub struct Histogram {
    buckets: BTreeMap<u32, u64>,
    count: u64,
    max: u64,
}

/// What is known of one tag.
#[derive(Clone, Debug, Default)]
pub struct Tag {
    pub ticks: u64,
    pub lengths: Histogram,
}

/// The tags of a signal by what they are called, and how long it was not seen.
#[derive(Clone, Debug, Default)]
pub struct Tags {
    pub by_name: BTreeMap<String, Tag>,
    pub ran_ticks: u64,
    pub not_running_ticks: u64,
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

impl Histogram {
    pub fn add(&mut self, value: u64) {
        *self.buckets.entry(bucket(value)).or_default() += 1;
        self.count += 1;
        self.max = self.max.max(value);
    }

    fn add_all(&mut self, other: &Self) {
        for (&bucket, count) in &other.buckets {
            *self.buckets.entry(bucket).or_default() += count;
        }
        self.count += other.count;
        self.max = self.max.max(other.max);
    }

    pub fn count(&self) -> u64 {
        self.count
    }

    pub fn max(&self) -> u64 {
        self.max
    }

    pub fn quantile(&self, percent: u64) -> u64 {
        let rank = (self.count * percent).div_ceil(100).max(1);
        let mut below = 0;
        let reached = self.buckets.iter().find(|(_, count)| {
            below += **count;
            below >= rank
        });
        reached.map_or(0, |(&bucket, _)| middle(bucket).min(self.max))
    }

    /// Lowest value, highest value and count of each bucket that has any.
    pub fn columns(&self) -> impl Iterator<Item = (u64, u64, u64)> {
        self.buckets.iter().map(|(&bucket, &count)| (lowest(bucket), lowest(bucket + 1), count))
    }
}

fn bucket(value: u64) -> u32 {
    let power = 63 - (value | 1).leading_zeros();
    if power < 5 {
        return u32::try_from(value).unwrap_or(0);
    }
    let below = u32::try_from(value >> (power - 5) & 31).unwrap_or(0);
    (power - 4) * 32 + below
}

fn lowest(bucket: u32) -> u64 {
    match bucket {
        0..32 => bucket.into(),
        bucket => (32 + u64::from(bucket % 32)).checked_shl(bucket / 32 - 1).unwrap_or(u64::MAX),
    }
}

fn middle(bucket: u32) -> u64 {
    let (low, high) = (lowest(bucket), lowest(bucket.saturating_add(1)));
    low + high.saturating_sub(low) / 2
}

impl Tags {
    pub fn of(recording: &Recording, signal: usize) -> Self {
        let head = &recording.head;
        let names = &head.signals[signal].names;
        let mut joining = Joining::of(names, head.clock);
        for (run, end) in recording.stretches(signal) {
            joining.see(run.state, end.saturating_sub(run.start_ticks));
        }
        joining.end()
    }

    /// Whether it said anything.
    pub fn has_names(&self) -> bool {
        self.by_name.keys().any(|name| name != NO_NAME)
    }

    fn add(&mut self, next: Self) {
        self.ran_ticks += next.ran_ticks;
        self.not_running_ticks += next.not_running_ticks;
        for (name, next) in next.by_name {
            let tag = self.by_name.entry(name).or_default();
            tag.ticks += next.ticks;
            tag.lengths.add_all(&next.lengths);
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Seen {
    Gap,
    NotRunning,
    /// Index of its name.
    Tag(usize),
}

/// Runs, joined where values that follow each other have one name: so does a function that was
/// entered and returned to in several places.
struct Joining<'a> {
    given: HashMap<u64, &'a str>,
    clock: Clock,
    /// What values are called, by index.
    indices: HashMap<State, usize>,
    by_name: HashMap<String, usize>,
    tags: Vec<Tag>,
    not_running_ticks: u64,
    /// What goes on, for how long, and whether another tag was seen before it.
    open: Option<(Seen, u64, bool)>,
}

impl<'a> Joining<'a> {
    fn of(names: &'a [(u64, String)], clock: Clock) -> Self {
        Self {
            given: names.iter().map(|(value, name)| (*value, name.as_str())).collect(),
            clock,
            indices: HashMap::new(),
            by_name: HashMap::new(),
            tags: Vec::new(),
            not_running_ticks: 0,
            open: None,
        }
    }

    fn index(&mut self, state: State) -> usize {
        if let Some(&index) = self.indices.get(&state) {
            return index;
        }
        let name = match state {
            State::Value(value) => match self.given.get(&value) {
                Some(name) => (*name).to_owned(),
                None if value == 0 => NO_NAME.to_owned(),
                None => format!("{value:#x}"),
            },
            State::Gap | State::NotRunning | State::Other => "(others)".to_owned(),
        };
        let index = *self.by_name.entry(name).or_insert(self.tags.len());
        if index == self.tags.len() {
            self.tags.push(Tag::default());
        }
        self.indices.insert(state, index);
        index
    }

    fn see(&mut self, state: State, ticks: u64) {
        let seen = match state {
            State::Gap => Seen::Gap,
            State::NotRunning => Seen::NotRunning,
            State::Value(_) | State::Other => Seen::Tag(self.index(state)),
        };
        match &mut self.open {
            Some((open, so_far, _)) if *open == seen => *so_far += ticks,
            open => {
                let ended = open.take();
                let after_tag = matches!(ended, Some((Seen::Tag(_), ..)));
                self.close(ended, matches!(seen, Seen::Tag(_)));
                self.open = Some((seen, ticks, after_tag));
            }
        }
    }

    /// `before_tag`: another tag follows it. One that a gap or a switch cut has no length that
    /// anybody saw.
    fn close(&mut self, ended: Option<(Seen, u64, bool)>, before_tag: bool) {
        match ended {
            None | Some((Seen::Gap, ..)) => {}
            Some((Seen::NotRunning, ticks, _)) => self.not_running_ticks += ticks,
            Some((Seen::Tag(index), ticks, after_tag)) => {
                self.tags[index].ticks += ticks;
                if after_tag && before_tag {
                    self.tags[index].lengths.add(self.clock.ns(ticks));
                }
            }
        }
    }

    fn end(mut self) -> Tags {
        let last = self.open.take();
        self.close(last, false);
        let ran_ticks = self.tags.iter().map(|tag| tag.ticks).sum();
        let tags = &mut self.tags;
        let by_name =
            self.by_name.into_iter().map(|(name, index)| (name, std::mem::take(&mut tags[index])));
        Tags { by_name: by_name.collect(), ran_ticks, not_running_ticks: self.not_running_ticks }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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

    #[test]
    fn lengths_are_within_three_percent() {
        let mut histogram = Histogram::default();
        (1..=1000).for_each(|value| histogram.add(value * 1000));
        for (percent, expected) in [(50, 500_000.0), (99, 990_000.0)] {
            let found = number(histogram.quantile(percent));
            assert!((found / expected - 1.0).abs() < 0.035, "{percent}: {found}");
        }
        assert_eq!((histogram.max(), Histogram::default().quantile(50)), (1_000_000, 0));
        for value in [0, 1, 31, 32, 33, 1 << 20, u64::MAX] {
            let at = bucket(value);
            assert!(
                lowest(at) <= value && (value < lowest(at + 1) || value == u64::MAX),
                "{value}"
            );
        }
    }
}
