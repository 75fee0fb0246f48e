//! What a recording says, in numbers: made from its runs, whether they were seen just now or read
//! back from a file.

use std::collections::{BTreeMap, HashMap};

use elfen_console::duration::number;
use serde::Serialize;

use crate::recording::{Cost, Dte, Kind, Periods, RateFigure, Recording, Run, Source, State};
use crate::symbols::NO_NAME;

/// What `--json` prints.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Summary {
    pub program: String,
    pub on: String,
    pub from: u32,
    pub period_ns: Periods,
    pub samples: u64,
    pub observed_ns: u64,
    pub gap_ns: u64,
    pub gaps: u64,
    pub longest_gap_ns: u64,
    pub steal_ns: u64,
    pub line_round_trip_ns: Option<u64>,
    pub clock_step_ns: f64,
    /// The largest of period, half a round trip and clock step.
    pub resolution_ns: f64,
    pub signals: Vec<SignalFigure>,
    pub tags: Vec<TagFigure>,
    pub not_running_percent: Option<f64>,
    pub missed_switches: Option<u64>,
    pub rates: Vec<RateFigure>,
    pub dte: Option<Dte>,
    pub cost_percent: Option<Cost>,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cost_unknown: String,
    pub stopped_ns: u64,
    /// Whether a function that was called is seen to return; `None` if no function was seen.
    pub returns: Option<bool>,
    pub refused_threads: u64,
    pub ended: String,
    pub exit_status: Option<i32>,
}

/// A signal as a whole.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct SignalFigure {
    pub name: String,
    pub source: Source,
    pub new_values: u64,
    /// Of numbers: the first, the last, and the extremes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub values: Option<Values>,
}

#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Values {
    pub first: u64,
    pub last: u64,
    pub least: u64,
    pub most: u64,
    /// By the time that each was there.
    pub mean: f64,
}

/// One thing that was done.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct TagFigure {
    pub signal: String,
    pub name: String,
    /// Of the time in which the signal was observed and its thread ran.
    pub share_percent: f64,
    pub time_ns: u64,
    pub runs: u64,
    pub run_ns: Lengths,
}

#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct Lengths {
    pub median: u64,
    pub p99: u64,
    pub max: u64,
}

/// Lengths of runs in buckets, 32 to a power of two: exact enough, and small whatever comes.
#[derive(Clone, Debug, Default)]
pub struct Histogram {
    buckets: BTreeMap<u32, u64>,
    count: u64,
    max: u64,
}

impl Histogram {
    pub fn add(&mut self, value: u64) {
        *self.buckets.entry(bucket(value)).or_default() += 1;
        self.count += 1;
        self.max = self.max.max(value);
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

impl Tags {
    pub fn of(recording: &Recording, signal: usize) -> Self {
        let mut tags = Self::default();
        let names: HashMap<u64, &str> = recording.head.signals[signal]
            .names
            .iter()
            .map(|(value, name)| (*value, name.as_str()))
            .collect();
        let clock = recording.head.clock;
        for (name, ticks, ends) in whole(recording, signal, &names) {
            match name {
                Seen::Gap => {}
                Seen::NotRunning => tags.not_running_ticks += ticks,
                Seen::Tag(name) => {
                    tags.ran_ticks += ticks;
                    let tag = tags.by_name.entry(name).or_default();
                    tag.ticks += ticks;
                    // One that a gap or a switch cut has no length that anybody saw.
                    if ends {
                        tag.lengths.add(clock.ns(ticks));
                    }
                }
            }
        }
        tags
    }

    /// Whether it said anything.
    pub fn has_names(&self) -> bool {
        self.by_name.keys().any(|name| name != NO_NAME)
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Seen {
    Gap,
    NotRunning,
    Tag(String),
}

/// Runs, joined where values that follow each other have one name: so does a function that was
/// entered and returned to in several places. With them whether both ends were seen.
fn whole(
    recording: &Recording,
    signal: usize,
    names: &HashMap<u64, &str>,
) -> Vec<(Seen, u64, bool)> {
    let name_of = |run: &Run| match run.state {
        State::Gap => Seen::Gap,
        State::NotRunning => Seen::NotRunning,
        State::Other => Seen::Tag("(others)".to_owned()),
        State::Value(value) => Seen::Tag(match names.get(&value) {
            Some(name) => (*name).to_owned(),
            None if value == 0 => NO_NAME.to_owned(),
            None => format!("{value:#x}"),
        }),
    };
    let mut joined: Vec<(Seen, u64, bool)> = Vec::new();
    let mut last: Option<(State, usize)> = None;
    for (run, end) in recording.stretches(signal) {
        let ticks = end.saturating_sub(run.start_ticks);
        // Names are made only where the value is another than the last one.
        if let Some((state, index)) = last
            && state == run.state
        {
            joined[index].1 += ticks;
            continue;
        }
        let name = name_of(&run);
        match joined.last_mut() {
            Some(previous) if previous.0 == name => previous.1 += ticks,
            _ => joined.push((name, ticks, true)),
        }
        last = Some((run.state, joined.len() - 1));
    }
    let tag = |at: Option<&(Seen, u64, bool)>| at.is_some_and(|one| matches!(one.0, Seen::Tag(_)));
    let ends: Vec<bool> = (0..joined.len())
        .map(|at| at > 0 && tag(joined.get(at - 1)) && tag(joined.get(at + 1)))
        .collect();
    joined.iter_mut().zip(ends).for_each(|(one, both)| one.2 = both);
    joined
}

impl Summary {
    pub fn of(recording: &Recording) -> Self {
        let (head, clock) = (&recording.head, recording.head.clock);
        let mut summary = Self::without_signals(recording);
        let mut not_running = (0, 0);
        for (index, signal) in head.signals.iter().enumerate() {
            let mut last = None;
            let new_values = recording.runs[index].iter().filter(|run| {
                let is_new = last.replace(run.state) != Some(run.state);
                is_new && matches!(run.state, State::Value(_) | State::Other)
            });
            let new_values = new_values.count();
            let mut figure = SignalFigure {
                name: signal.name.clone(),
                source: signal.source,
                new_values: new_values as u64,
                values: None,
            };
            match signal.kind {
                Kind::Values => figure.values = values(recording, index),
                Kind::Tags => {
                    let tags = Tags::of(recording, index);
                    not_running.0 += tags.not_running_ticks;
                    not_running.1 += tags.not_running_ticks + tags.ran_ticks;
                    if tags.has_names() {
                        let figures = tags.by_name.into_iter().map(|(name, tag)| TagFigure {
                            signal: signal.name.clone(),
                            name,
                            share_percent: percent(tag.ticks, tags.ran_ticks),
                            time_ns: clock.ns(tag.ticks),
                            runs: tag.lengths.count,
                            run_ns: Lengths {
                                median: tag.lengths.quantile(50),
                                p99: tag.lengths.quantile(99),
                                max: tag.lengths.max,
                            },
                        });
                        let mut figures: Vec<TagFigure> = figures.collect();
                        figures.sort_by_key(|tag| std::cmp::Reverse(tag.time_ns));
                        summary.tags.extend(figures);
                    }
                    if figure.new_values > 1 && signal.source == Source::EntriesAndReturns {
                        summary.returns = Some(true);
                    }
                }
            }
            summary.signals.push(figure);
        }
        if not_running.0 > 0 {
            summary.not_running_percent = Some(percent(not_running.0, not_running.1));
        }
        summary
    }

    fn without_signals(recording: &Recording) -> Self {
        let (head, clock) = (&recording.head, recording.head.clock);
        let (mut gap_ticks, mut gaps, mut longest) = (0, 0, 0);
        let mut observed = 0;
        // Gaps are in all signals at once.
        for (run, end) in recording.stretches(0) {
            let ticks = end.saturating_sub(run.start_ticks);
            if run.state != State::Gap {
                observed += ticks;
            } else if run.start_ticks > recording.runs[0][0].start_ticks {
                gap_ticks += ticks;
                gaps += 1;
                longest = longest.max(ticks);
            }
        }
        let half = head.line_round_trip_ns.map_or(0.0, |ns| number(ns) / 2.0);
        Self {
            program: head.program.clone(),
            on: head.on.clone(),
            from: head.from,
            period_ns: head.period_ns,
            samples: head.samples,
            observed_ns: clock.ns(observed),
            gap_ns: clock.ns(gap_ticks),
            gaps,
            longest_gap_ns: clock.ns(longest),
            steal_ns: head.steal_ns,
            line_round_trip_ns: head.line_round_trip_ns,
            clock_step_ns: clock.step_ns(),
            resolution_ns: number(head.period_ns.median).max(half).max(clock.step_ns()),
            signals: Vec::new(),
            tags: Vec::new(),
            not_running_percent: None,
            missed_switches: head.missed_switches,
            rates: head.rates.clone(),
            dte: head.dte,
            cost_percent: head.cost,
            cost_unknown: head.cost_unknown.clone(),
            stopped_ns: head.stopped_ns,
            returns: None,
            refused_threads: head.refused_threads,
            ended: head.ended.clone(),
            exit_status: head.exit_status,
        }
    }
}

fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { 100.0 * number(part) / number(whole) }
}

fn values(recording: &Recording, signal: usize) -> Option<Values> {
    let mut found: Option<Values> = None;
    let (mut weighed, mut ticks) = (0.0, 0.0);
    for (run, end) in recording.stretches(signal) {
        let State::Value(value) = run.state else { continue };
        let length = number(end.saturating_sub(run.start_ticks));
        weighed += number(value) * length;
        ticks += length;
        let all = found.get_or_insert(Values {
            first: value,
            last: value,
            least: value,
            most: value,
            mean: 0.0,
        });
        all.last = value;
        all.least = all.least.min(value);
        all.most = all.most.max(value);
    }
    let all = found.as_mut()?;
    all.mean = if ticks > 0.0 { weighed / ticks } else { number(all.last) };
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_within_three_percent() {
        let mut histogram = Histogram::default();
        (1..=1000).for_each(|value| histogram.add(value * 1000));
        for (percent, expected) in [(50, 500_000.0), (99, 990_000.0)] {
            let found = number(histogram.quantile(percent));
            assert!((found / expected - 1.0).abs() < 0.035, "{percent}: {found}");
        }
        assert_eq!((histogram.max, Histogram::default().quantile(50)), (1_000_000, 0));
        for value in [0, 1, 31, 32, 33, 1 << 20, u64::MAX] {
            let at = bucket(value);
            assert!(
                lowest(at) <= value && (value < lowest(at + 1) || value == u64::MAX),
                "{value}"
            );
        }
    }
}
