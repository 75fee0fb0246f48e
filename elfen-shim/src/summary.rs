//! The summary of a recording in numbers, as `--json` prints it. It is computed from runs that were
//! just recorded or read from a file.

use elfen_console::duration::number;
use serde::Serialize;

use crate::histogram::Histogram;
use crate::recording::{
    Cost, Head, Kind, ObserverHead, Periods, RateFigure, Recording, RunFigures, Source,
};
use crate::tally::{Coverage, Tally, WeightedValues};

/// What `--json` prints.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Summary {
    pub program: String,
    /// 0 if no process was named.
    pub process: u32,
    /// Whether its forked children were observed too.
    pub children: bool,
    pub on: String,
    /// The CPU of the first observer. If there are several, `observers` lists all.
    pub from: u32,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub observers: Vec<ObserverFigure>,
    /// When the recording began, by CLOCK_MONOTONIC and by CLOCK_REALTIME (UTC).
    pub began_monotonic_ns: Option<u64>,
    pub began_realtime_ns: Option<u64>,
    pub period_ns: Periods,
    pub samples: u64,
    /// The sum over all observers. The gaps are sums too.
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
    pub rates: Vec<RateFigure>,
    /// The period that would cost about 2 %, if the measured cost was higher. This assumes that the
    /// cost of a sample does not depend on the period.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub two_percent_at_ns: Option<u64>,
    /// Whether functions report their returns. `None` if no function was observed.
    pub returns: Option<bool>,
    pub ended: String,
    #[serde(flatten)]
    pub figures: RunFigures,
}

/// The figures of one of several observers.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct ObserverFigure {
    pub from: u32,
    pub on: String,
    pub observed_ns: u64,
    pub gap_ns: u64,
    pub gaps: u64,
    pub longest_gap_ns: u64,
}

/// The figures of a whole signal.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct SignalFigure {
    pub name: String,
    pub source: Source,
    /// How often the value differed from the previous value: 0 for a constant.
    pub new_values: u64,
    /// Present only for numbers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub values: Option<Values>,
}

#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Values {
    pub first: i128,
    pub last: i128,
    pub least: i128,
    pub most: i128,
    /// Weighted by time.
    pub mean: f64,
}

/// The figures of one tag, function or task.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct TagFigure {
    pub signal: String,
    pub name: String,
    /// Share of the time in which the signal was observed and its thread ran.
    pub share_percent: f64,
    pub time_ns: u64,
    /// The number of runs whose length is known.
    pub runs: u64,
    pub run_ns: Lengths,
    /// The number of runs that were not observed from end to end.
    pub cut_runs: u64,
    /// The lengths of all runs. A run that was cut counts with its longest part.
    pub run_ns_at_least: Lengths,
    /// Lower bound and upper bound in nanoseconds, and the number of runs. Only with `--keep
    /// histogram`.
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

    /// Creates a summary from a tally of one recording or of several consecutive ones. With
    /// `histograms`, tags have the histograms of their lengths.
    pub fn from(head: &Head, tally: Tally, histograms: bool) -> Self {
        let clock = head.clock;
        let mut summary = Self::without_signals(head, &tally);
        let mut not_running = (0, 0);
        for (signal, seen) in head.signals.iter().zip(tally.signals) {
            let figure = SignalFigure {
                name: signal.name.clone(),
                source: signal.source,
                new_values: seen.new_values,
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
                        histogram: if histograms {
                            tag.lengths.columns().collect()
                        } else {
                            Vec::new()
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
        let all = tally.total_coverage();
        let figure = |(observer, coverage): (&ObserverHead, &Coverage)| ObserverFigure {
            from: observer.from,
            on: observer.on.clone(),
            observed_ns: clock.ns(coverage.observed_ticks),
            gap_ns: clock.ns(coverage.gap_ticks),
            gaps: coverage.gaps,
            longest_gap_ns: clock.ns(coverage.longest_gap_ticks),
        };
        let half = head.line_round_trip_ns.map_or(0.0, |ns| number(ns) / 2.0);
        Self {
            program: head.program.clone(),
            process: head.process,
            children: head.children,
            on: head.on.clone(),
            from: head.from,
            observers: head.observers.iter().zip(&tally.coverage).map(figure).collect(),
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
            rates: head.rates.clone(),
            two_percent_at_ns: head
                .figures
                .cost_percent
                .and_then(|cost| two_percent_at(&cost, &head.period_ns)),
            returns: None,
            ended: head.ended.clone(),
            figures: head.figures.clone(),
        }
    }
}

impl Summary {
    /// The CPUs of all observers, and the average time that each observed.
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

impl From<WeightedValues> for Values {
    fn from(seen: WeightedValues) -> Self {
        let WeightedValues { first, last, least, most, .. } = seen;
        Self { first, last, least, most, mean: seen.mean() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_period_that_costs_two_percent_is_suggested() {
        let period = Periods { asked: Some(100), median: 1_000, p99: 2_000 };
        let of = |median| two_percent_at(&Cost { median, low: 0.0, high: 0.0 }, &period);
        assert_eq!(
            [of(-1.0), of(0.0), of(2.0), of(3.0), of(31.0)],
            [None, None, None, Some(1_500), Some(15_500)]
        );
    }
}
