//! Statistics of the tags of a signal: the total time of each tag, and the lengths of its runs.
//!
//! The length of a run is known if both ends were observed, or if they lie in gaps that are short
//! compared with the run. Of other runs, only parts were observed. Such a run took at least as long
//! as its longest part.

use std::collections::{BTreeMap, HashMap};

use crate::clock::Clock;
use crate::histogram::Histogram;
use crate::recording::{NO_NAME, Recording, Signal, State, StateNames};

/// Statistics of one tag.
#[derive(Clone, Debug, Default)]
pub struct Tag {
    pub ticks: u64,
    /// Lengths of runs whose length is known.
    pub lengths: Histogram,
    /// The lengths of the longest uninterrupted parts of the other runs.
    pub at_least: Histogram,
}

/// The tags of a signal by their names, and how long its thread ran and did not run.
#[derive(Clone, Debug, Default)]
pub struct Tags {
    pub by_name: BTreeMap<String, Tag>,
    pub ran_ticks: u64,
    pub not_running_ticks: u64,
}

impl Tag {
    /// The lengths of all runs: known lengths and lower bounds.
    pub fn all_lengths(&self) -> Histogram {
        let mut all = self.lengths.clone();
        all.add_all(&self.at_least);
        all
    }
}

impl Tags {
    pub fn of(recording: &Recording, signal: usize) -> Self {
        let mut tags = Self::default();
        tags.add(recording, signal);
        tags
    }

    /// Adds the runs of a recording that continues the previous one.
    pub(crate) fn add(&mut self, recording: &Recording, signal: usize) {
        let head = &recording.head;
        let mut joiner = RunJoiner::of(&head.signals[signal], head.clock);
        for (run, end) in recording.joined(signal) {
            joiner.add_run(run.state, end.saturating_sub(run.start_ticks));
        }
        joiner.finish(self);
    }

    /// Returns whether any tag was set.
    pub fn has_names(&self) -> bool {
        self.by_name.keys().any(|name| name != NO_NAME)
    }
}

/// The state between two tags, before the first tag, or after the last one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Between {
    Nothing,
    /// Gaps with this total number of ticks, in which one tag ended and the next began.
    Gap(u64),
    /// The thread did not run, or this is the start or the end of the recording.
    Unseen,
}

impl Between {
    fn and(self, next: Self) -> Self {
        match (self, next) {
            (Self::Gap(one), Self::Gap(next)) => Self::Gap(one + next),
            (Self::Nothing, next) => next,
            _ => Self::Unseen,
        }
    }

    /// The error of a run's end in ticks. `None` if it is unknown.
    fn ticks(self) -> Option<u64> {
        match self {
            Self::Nothing => Some(0),
            Self::Gap(ticks) => Some(ticks),
            Self::Unseen => None,
        }
    }
}

/// The current run, which has not ended yet.
#[derive(Clone, Copy, Debug)]
struct OpenRun {
    /// The index of its name.
    tag: usize,
    before: Between,
    /// The length of its current uninterrupted part.
    part_ticks: u64,
    longest_ticks: u64,
    is_whole: bool,
}

/// Joins consecutive runs whose values have the same name. A function has several values if it is
/// entered, or returned to, at several addresses.
struct RunJoiner<'a> {
    names: StateNames<'a>,
    clock: Clock,
    /// The index of each value's name in `tags`.
    indices: HashMap<State, usize>,
    by_name: HashMap<String, usize>,
    tags: Vec<Tag>,
    not_running_ticks: u64,
    open: Option<OpenRun>,
    /// The state since the last tag.
    between: Between,
}

/// A length counts as known if its error is at most 1/100.
const EXACT_PARTS: u64 = 100;

impl<'a> RunJoiner<'a> {
    fn of(signal: &'a Signal, clock: Clock) -> Self {
        Self {
            names: signal.state_names(),
            clock,
            indices: HashMap::new(),
            by_name: HashMap::new(),
            tags: Vec::new(),
            not_running_ticks: 0,
            open: None,
            between: Between::Unseen,
        }
    }

    fn index(&mut self, state: State) -> usize {
        if let Some(&index) = self.indices.get(&state) {
            return index;
        }
        let index = *self.by_name.entry(self.names.of(state)).or_insert(self.tags.len());
        if index == self.tags.len() {
            self.tags.push(Tag::default());
        }
        self.indices.insert(state, index);
        index
    }

    fn add_run(&mut self, state: State, ticks: u64) {
        let tag = match state {
            State::Gap => {
                self.between = self.between.and(Between::Gap(ticks));
                return;
            }
            State::NotRunning => {
                self.not_running_ticks += ticks;
                self.between = Between::Unseen;
                return;
            }
            State::Value(_) | State::Other => self.index(state),
        };
        self.tags[tag].ticks += ticks;
        match &mut self.open {
            Some(open) if open.tag == tag => {
                if self.between == Between::Nothing {
                    open.part_ticks += ticks;
                } else {
                    open.part_ticks = ticks;
                    open.is_whole = false;
                }
                open.longest_ticks = open.longest_ticks.max(open.part_ticks);
            }
            _ => {
                self.close_run();
                self.open = Some(OpenRun {
                    tag,
                    before: self.between,
                    part_ticks: ticks,
                    longest_ticks: ticks,
                    is_whole: true,
                });
            }
        }
        self.between = Between::Nothing;
    }

    /// Ends the open run, because another tag follows or the recording is over.
    fn close_run(&mut self) {
        let Some(open) = self.open.take() else { return };
        let tag = &mut self.tags[open.tag];
        let unseen = open.before.ticks().zip(self.between.ticks()).map(|(one, other)| one + other);
        // On average, half of a gap belongs to the run.
        match unseen.map(|ticks| ticks / 2) {
            Some(off) if open.is_whole && off <= open.part_ticks / EXACT_PARTS => {
                tag.lengths.add(self.clock.ns(open.part_ticks + off));
            }
            _ => tag.at_least.add(self.clock.ns(open.longest_ticks)),
        }
    }

    fn finish(mut self, sum: &mut Tags) {
        self.between = Between::Unseen;
        self.close_run();
        sum.not_running_ticks += self.not_running_ticks;
        for (name, index) in self.by_name {
            let (tag, all) = (&self.tags[index], sum.by_name.entry(name).or_default());
            sum.ran_ticks += tag.ticks;
            all.ticks += tag.ticks;
            all.lengths.add_all(&tag.lengths);
            all.at_least.add_all(&tag.at_least);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recording::{Kind, Source};

    /// Returns for each tag its time, its known lengths, and its lower bounds.
    fn seen(states: &[(State, u64)]) -> Vec<(u64, Vec<u64>, Vec<u64>)> {
        let names = (1..4).map(|value| (value, value.to_string())).collect();
        let signal = Signal { names, ..Signal::new("tag", Source::SourceTags, Kind::Tags) };
        let clock = Clock { ticks_per_second: 1_000_000_000, step_ticks: 1, unit_ticks: 0 };
        let mut joiner = RunJoiner::of(&signal, clock);
        let mut tags = Tags::default();
        states.iter().for_each(|(state, ticks)| joiner.add_run(*state, *ticks));
        let column = |histogram: &Histogram| {
            let columns = histogram.columns();
            columns.flat_map(|(low, _, count)| (0..count).map(move |_| low)).collect()
        };
        joiner.finish(&mut tags);
        tags.by_name
            .into_values()
            .map(|tag| (tag.ticks, column(&tag.lengths), column(&tag.at_least)))
            .collect()
    }

    /// Goal: the error of a known length is at most 1/100, and all other lengths are lower bounds.
    /// Method: runs with every kind of end. Histogram buckets are exact below 32.
    #[test]
    fn runs_have_lengths_or_bounds() {
        use State::{Gap, NotRunning, Value};
        let [one, two, three] = [1, 2, 3].map(Value);
        // The start and the end of the recording cut the first run and the last.
        let plain = [(one, 8), (two, 10), (three, 20), (two, 12), (one, 5)];
        let expected =
            [(13, vec![], vec![5, 8]), (22, vec![10, 12], vec![]), (20, vec![20], vec![])];
        assert_eq!(seen(&plain), expected);
        // A run may end in a gap. Its length is known if the gap is short compared with the run.
        let ends = [(one, 8), (Gap, 4), (two, 4096), (Gap, 4), (three, 16), (Gap, 4), (one, 2)];
        let expected =
            [(10, vec![], vec![2, 8]), (4096, vec![4096], vec![]), (16, vec![], vec![16])];
        assert_eq!(seen(&ends), expected);
        // The same tag is on both sides of a gap, and on both sides of a time without the thread.
        let cut = [(one, 1), (two, 8), (Gap, 1), (two, 9), (NotRunning, 7), (two, 3), (one, 1)];
        assert_eq!(seen(&cut)[1], (20, vec![], vec![9]));
        let left = [(one, 1), (two, 8), (NotRunning, 1), (three, 9), (one, 1)];
        assert_eq!(seen(&left)[1..], [(8, vec![], vec![8]), (9, vec![], vec![9])]);
    }
}
