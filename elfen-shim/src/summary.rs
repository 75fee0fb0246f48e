//! What a recording says, in numbers: made from its runs, whether they were seen just now or read
//! back from a file.

use elfen_console::duration::number;
use serde::Serialize;

use crate::histogram::Histogram;
use crate::recording::{Cost, Dte, Head, Kind, Observing, Periods, RateFigure, Recording, Source};
use crate::tally::{Looked, Tally, Weighed};

/// What `--json` prints.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Summary {
    pub program: String,
    /// 0 if no process was named.
    pub process: u32,
    /// Whether forked children of it were observed as well.
    pub children: bool,
    pub on: String,
    /// The first observer's; the others are beside it, in `observers`.
    pub from: u32,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub observers: Vec<ObserverFigure>,
    /// When the recording began, by CLOCK_MONOTONIC and by CLOCK_REALTIME (UTC).
    pub began_monotonic_ns: Option<u64>,
    pub began_realtime_ns: Option<u64>,
    pub period_ns: Periods,
    pub samples: u64,
    /// Of all observers together, as all times are in which somebody looked or did not.
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
    /// The time between two samples that would cost two of a hundred, where it costs more: each
    /// costs about as much however far apart they are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub two_percent_at_ns: Option<u64>,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cost_unknown: String,
    /// In all, and of that at the end.
    pub stopped_ns: u64,
    pub stopped_at_end_ns: u64,
    /// Whether a function that was called is seen to return; `None` if no function was seen.
    pub returns: Option<bool>,
    pub refused_threads: u64,
    /// Functions that say by code at their entries that they run, and those that cannot be told
    /// from another.
    pub entries: u64,
    pub ambiguous_entries: u64,
    pub ended: String,
    pub exit_status: Option<i32>,
}

/// One of several observers.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct ObserverFigure {
    pub from: u32,
    pub on: String,
    pub observed_ns: u64,
    pub gap_ns: u64,
    pub gaps: u64,
    pub longest_gap_ns: u64,
}

/// A signal as a whole.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct SignalFigure {
    pub name: String,
    pub source: Source,
    /// How often a value differed from the one before it: 0 for a constant.
    pub new_values: u64,
    /// Of numbers: the first, the last, and the extremes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub values: Option<Values>,
}

#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Values {
    pub first: i128,
    pub last: i128,
    pub least: i128,
    pub most: i128,
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
    /// Runs whose length is known, and their lengths.
    pub runs: u64,
    pub run_ns: Lengths,
    /// Runs that were not seen from end to end.
    pub cut_runs: u64,
    /// Of all runs; a run that was cut counts with its longest part.
    pub run_ns_at_least: Lengths,
    /// From how many nanoseconds up to how many, and how many runs; only if it was asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub histogram: Vec<(u64, u64, u64)>,
}

#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct Lengths {
    pub median: u64,
    pub p99: u64,
    pub max: u64,
}

impl Lengths {
    fn of(lengths: &Histogram) -> Self {
        let (median, p99, max) = (lengths.quantile(50), lengths.quantile(99), lengths.max());
        Self { median, p99, max }
    }
}

impl Summary {
    pub fn of(recording: &Recording) -> Self {
        Self::from(&recording.head, Tally::of(recording), false)
    }

    /// Of what was added up, from one recording or from several that follow each other; with all
    /// lengths of runs if `histograms`.
    pub fn from(head: &Head, tally: Tally, histograms: bool) -> Self {
        let clock = head.clock;
        let mut summary = Self::without_signals(head, &tally);
        let mut not_running = (0, 0);
        for (signal, seen) in head.signals.iter().zip(tally.signals) {
            let figure = SignalFigure {
                name: signal.name.clone(),
                source: signal.source,
                new_values: seen.new_values(),
                values: seen.values.map(Values::from),
            };
            if signal.kind == Kind::Tags {
                let tags = seen.tags;
                not_running.0 += tags.not_running_ticks;
                not_running.1 += tags.not_running_ticks + tags.ran_ticks;
                if tags.has_names() {
                    let ran_ticks = tags.ran_ticks;
                    let figures = tags.by_name.into_iter().map(|(name, tag)| TagFigure {
                        signal: signal.name.clone(),
                        name,
                        share_percent: percent(tag.ticks, ran_ticks),
                        time_ns: clock.ns(tag.ticks),
                        runs: tag.lengths.count(),
                        run_ns: Lengths::of(&tag.lengths),
                        cut_runs: tag.at_least.count(),
                        run_ns_at_least: Lengths::of(&tag.all_lengths()),
                        histogram: match histograms {
                            true => tag.lengths.columns().collect(),
                            false => Vec::new(),
                        },
                    });
                    let mut figures: Vec<TagFigure> = figures.collect();
                    figures.sort_by_key(|tag| std::cmp::Reverse(tag.time_ns));
                    summary.tags.extend(figures);
                }
                if figure.new_values > 0 && signal.source == Source::EntriesAndReturns {
                    summary.returns = Some(true);
                } else if signal.source == Source::Entries {
                    summary.returns = Some(false);
                }
            }
            summary.signals.push(figure);
        }
        if not_running.0 > 0 {
            summary.not_running_percent = Some(percent(not_running.0, not_running.1));
        }
        summary
    }

    fn without_signals(head: &Head, tally: &Tally) -> Self {
        let clock = head.clock;
        let all = tally.all();
        let figure = |(observer, looked): (&Observing, &Looked)| ObserverFigure {
            from: observer.from,
            on: observer.on.clone(),
            observed_ns: clock.ns(looked.observed_ticks),
            gap_ns: clock.ns(looked.gap_ticks),
            gaps: looked.gaps,
            longest_gap_ns: clock.ns(looked.longest_gap_ticks),
        };
        let half = head.line_round_trip_ns.map_or(0.0, |ns| number(ns) / 2.0);
        Self {
            program: head.program.clone(),
            process: head.process,
            children: head.children,
            on: head.on.clone(),
            from: head.from,
            observers: head.observers.iter().zip(&tally.looked).map(figure).collect(),
            began_monotonic_ns: head.began.map(|began| began.monotonic_ns),
            began_realtime_ns: head.began.map(|began| began.realtime_ns),
            period_ns: head.period_ns,
            samples: head.samples,
            observed_ns: clock.ns(all.observed_ticks),
            gap_ns: clock.ns(all.gap_ticks),
            gaps: all.gaps,
            longest_gap_ns: clock.ns(all.longest_gap_ticks),
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
            two_percent_at_ns: head.cost.and_then(|cost| two_percent_at(&cost, &head.period_ns)),
            cost_unknown: head.cost_unknown.clone(),
            stopped_ns: head.stopped_ns,
            stopped_at_end_ns: head.stopped_at_end_ns,
            returns: None,
            refused_threads: head.refused_threads,
            entries: head.entries,
            ambiguous_entries: head.ambiguous,
            ended: head.ended.clone(),
            exit_status: head.exit_status,
        }
    }
}

impl Summary {
    /// The lanes of all observers, and for how long each of them looked in the mean.
    pub fn from_lanes(&self) -> (String, u64) {
        let lanes: Vec<String> = self.observers.iter().map(|one| one.from.to_string()).collect();
        match lanes.len() as u64 {
            0 => (self.from.to_string(), self.observed_ns),
            observers => (lanes.join(","), self.observed_ns / observers),
        }
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a time above 0")]
fn two_percent_at(cost: &Cost, period: &Periods) -> Option<u64> {
    const CHEAP_PERCENT: f64 = 2.0;
    let times = cost.median / CHEAP_PERCENT;
    (times > 1.0).then(|| (number(period.median) * times).ceil() as u64)
}

fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { 100.0 * number(part) / number(whole) }
}

impl From<Weighed> for Values {
    fn from(seen: Weighed) -> Self {
        let Weighed { first, last, least, most, .. } = seen;
        Self { first, last, least, most, mean: seen.mean() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_period_is_named_at_which_little_is_paid() {
        let period = Periods { asked: Some(100), median: 1_000, p99: 2_000 };
        let of = |median| two_percent_at(&Cost { median, low: 0.0, high: 0.0 }, &period);
        assert_eq!(
            [of(-1.0), of(0.0), of(2.0), of(3.0), of(31.0)],
            [None, None, None, Some(1_500), Some(15_500)]
        );
    }
}
