//! Computes the rows of a results file: medians over runs, with 95 % intervals.
//!
//! All runs of one load got the same requests at the same times. The tail of one run is decided by
//! a few bursts and by chance: other machines, interrupts. So a percentile is over the requests'
//! medians. The latency of a request is its median over all runs of a scenario.
//!
//! On an emulated core, what the core added to each request is known. There a run is also compared
//! with itself, by a replay of its queue. Noise of the machine affects both sides of this ratio.
//!
//! Intervals are computed by bootstrap over invocations. The requests of one run are not
//! independent samples, because they wait for each other.

use std::collections::BTreeMap;

use elfen_console::duration::number;
use elfen_machine::pair;
use elfen_run::latency::Latency;
use elfen_run::report::RunReport;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use serde::Serialize;

use super::replay;
use crate::record::{Alone, Line, Run, Scenario, Setup, runs, setup};

const RESAMPLES: usize = 10_000;
/// How many latencies all resamples together read, about.
const RESAMPLED_VALUES: usize = 50_000_000;
const SEED: u64 = 1;

/// A median, and its 95 % interval if it is computed from at least three values.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Figure {
    pub median: f64,
    pub ci95: Option<[f64; 2]>,
}

/// The results of one load, scenario and batch program.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub load: f64,
    pub rps: f64,
    pub scenario: Scenario,
    /// The scenario as the plan writes it.
    pub asked: String,
    pub batch: Option<String>,
    pub runs: usize,
    pub requests: u64,
    pub errors: u64,
    pub p50_ms: Figure,
    pub p95_ms: Figure,
    pub p99_ms: Figure,
    /// The p99 divided by the p99 of the same requests without a batch.
    pub p99_ratio: Option<Figure>,
    /// The p99 of a run's requests, divided by the p99 that they would have without what the
    /// emulated core added to them. Each run is compared with itself, by a replay of its queue.
    pub p99_cost: Option<Figure>,
    pub mean_ms: Figure,
    pub request_lane_utilisation: Figure,
    pub batch_lane_utilisation: Figure,
    /// The part of the time in which Elfen lent the batch lanes, whichever tasks ran there.
    pub lent: Option<Figure>,
    /// The utilisation of both lanes; 1 is one lane that is always busy.
    pub utilisation: Figure,
    /// `utilisation` plus coordinator and generator, for machines on which they share the batch
    /// lane.
    pub utilisation_with_helpers: Figure,
    pub helper_utilisation: Figure,
    pub batch_per_second: Option<Figure>,
    pub batch_unit: Option<String>,
    /// The work of the batch, divided by its work alone.
    pub batch_relative: Option<Figure>,
    /// Whether all results of the batch are correct, and have the checksum of the batch alone.
    pub batch_verified: Option<bool>,
    /// The part of the request lane's busy time in which the batch ran.
    pub overlapped: Option<Figure>,
    pub reaction_us: Option<Figure>,
    pub reaction_p99_us: Option<Figure>,
    pub mechanisms: Option<String>,
    /// The model's predictions for the same requests, on an emulated core.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected: Option<Foreseen>,
}

/// The model's predictions for the requests of a row's runs. The fields `.._off` are the deviations
/// of the runs from their predictions: 0.1 means 10 % more.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Foreseen {
    pub p99_ratio: Figure,
    pub p99_ratio_off: Figure,
    pub utilisation: Figure,
    pub utilisation_off: Figure,
}

impl Row {
    /// Replaces the percentiles by those of each request's median, if all runs had the same
    /// requests.
    fn compare_requests(&mut self, runs: &[&Run], without: &[&Run]) {
        let Some(repeats) = Repeats::of(runs) else { return };
        let tail = |per_thousand| repeats.figure(|drawn| repeats.tail_ms(drawn, per_thousand));
        (self.p50_ms, self.p95_ms, self.p99_ms) = (tail(500), tail(950), tail(990));
        if let (Some(ratio), Some(alone)) = (&mut self.p99_ratio, repeats.partners(without)) {
            let p99 = |repeats: &Repeats<'_>, drawn: &[usize]| repeats.tail_ms(drawn, 990);
            *ratio = repeats.figure(|drawn| p99(&repeats, drawn) / p99(&alone, drawn));
        }
    }

    /// Whether this row includes the run.
    pub fn is_of(&self, run: &Run) -> bool {
        (self.scenario, &self.asked, &self.batch) == (run.scenario, &run.asked, &run.batch)
            && (self.rps - run.rps).abs() <= run.rps * 1e-9
    }
}

/// Returns the rows of a results file, ordered by load, batch and scenario.
pub fn rows(lines: &[Line]) -> Vec<Row> {
    let mut alone: &[Alone] = &[];
    let mut groups: BTreeMap<Key, Vec<&Run>> = BTreeMap::new();
    for line in lines {
        match line {
            Line::Setup(Setup { alone: known, .. }) => alone = known,
            Line::Run(run) => groups.entry(Key::of(run)).or_default().push(run),
        }
    }
    let without: Vec<&Run> = runs(lines).filter(|run| run.scenario == Scenario::None).collect();
    let workers = setup(lines).map_or(1, |setup| pair::parse(&setup.lanes).map_or(1, |p| p.len()));
    let row = |runs: &Vec<&Run>| {
        let mut row = row(runs, &without, alone);
        let cost = |run: &&Run| replay::p99_ratio(&run.served, workers);
        let costs: Option<Vec<f64>> = runs.iter().map(cost).collect();
        row.p99_cost = costs.filter(|_| row.batch.is_some()).map(|costs| figure(&costs));
        row.compare_requests(runs, &without);
        row
    };
    groups.values().map(row).collect()
}

/// The sort key of a row. Rates are in millionths of a request per second, because floating-point
/// numbers have no total order.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    micro_rps: u128,
    batch: Option<String>,
    scenario: Scenario,
    asked: String,
}

impl Key {
    fn of(run: &Run) -> Self {
        Self {
            micro_rps: std::time::Duration::from_secs_f64(run.rps.clamp(0.0, 1e9)).as_micros(),
            batch: run.batch.clone(),
            scenario: run.scenario,
            asked: run.asked.clone(),
        }
    }
}

fn row(runs: &[&Run], without: &[&Run], alone: &[Alone]) -> Row {
    let first = runs[0];
    let over = |of: fn(&Run) -> f64| figure(&runs.iter().map(|run| of(run)).collect::<Vec<_>>());
    let some = |of: &dyn Fn(&Run) -> Option<f64>| {
        let values: Vec<f64> = runs.iter().filter_map(|run| of(run)).collect();
        (!values.is_empty()).then(|| figure(&values))
    };
    let partner = |run: &Run| {
        let alone = without.iter().find(|other| run.met_the_same_requests(other))?;
        Some(run.p99_ms / alone.p99_ms)
    };
    let known = alone.iter().find(|alone| Some(&alone.batch) == first.batch.as_ref());
    let relative = |run: &Run| Some(run.batch_per_second? / known?.per_second);
    let verified: Vec<bool> = runs.iter().filter_map(|run| run.batch_verified).collect();
    let reports =
        |of: fn(&RunReport) -> Option<f64>| some(&move |run| run.report.as_deref().and_then(of));
    let reaction = |which: fn(&Latency) -> Option<u64>| {
        let us = move |report: &RunReport| Some(number(which(&report.figures.reaction_ns)?) / 1e3);
        some(&move |run| run.report.as_deref().and_then(us))
    };
    Row {
        load: first.load,
        rps: first.rps,
        scenario: first.scenario,
        asked: first.asked.clone(),
        batch: first.batch.clone(),
        runs: runs.len(),
        requests: runs.iter().map(|run| run.requests).sum(),
        errors: runs.iter().map(|run| run.errors).sum(),
        p50_ms: over(|run| run.p50_ms),
        p95_ms: over(|run| run.p95_ms),
        p99_ms: over(|run| run.p99_ms),
        p99_ratio: (first.scenario != Scenario::None).then(|| some(&partner)).flatten(),
        p99_cost: None,
        mean_ms: over(|run| run.mean_ms),
        request_lane_utilisation: over(|run| run.request_lane_utilisation),
        batch_lane_utilisation: over(|run| run.batch_lane_utilisation),
        lent: reports(lent),
        utilisation: over(|run| run.request_lane_utilisation + run.batch_lane_utilisation),
        utilisation_with_helpers: over(|run| {
            run.request_lane_utilisation + run.batch_lane_utilisation + run.helper_utilisation
        }),
        helper_utilisation: over(|run| run.helper_utilisation),
        batch_per_second: some(&|run| run.batch_per_second),
        batch_unit: first.batch_unit.clone(),
        batch_relative: some(&relative),
        batch_verified: (!verified.is_empty()).then(|| verified.iter().all(|right| *right)),
        overlapped: reports(overlapped),
        reaction_us: reaction(|latency| latency.median),
        reaction_p99_us: reaction(|latency| latency.p99),
        mechanisms: first.report.as_deref().map(mechanisms),
        expected: None,
    }
}

/// Returns the overlap as a part of the request lane's busy time. Returns `None` without a task
/// map, which counts this time.
fn overlapped(report: &RunReport) -> Option<f64> {
    let busy_ns = report.request_busy_ns.filter(|busy_ns| *busy_ns > 0)?;
    Some(number(report.figures.overlapped_ns?) / number(busy_ns))
}

/// Returns the part of a run's time in which the batch lanes were lent.
fn lent(report: &RunReport) -> Option<f64> {
    let ran_ns = report.figures.ran_ns()?;
    (report.wall_ns > 0).then(|| number(ran_ns) / number(report.wall_ns))
}

fn mechanisms(report: &RunReport) -> String {
    format!("source {}, nap {}, checks {}", report.source, report.nap, report.checks)
}

/// Returns the median of `values` and its interval. `values` must not be empty.
pub fn figure(values: &[f64]) -> Figure {
    let of = |drawn: &[usize]| median(&drawn.iter().map(|at| values[*at]).collect::<Vec<_>>());
    Figure { median: median(values), ci95: bootstrap(values.len(), RESAMPLES, of) }
}

fn median(values: &[f64]) -> f64 {
    median_of(&mut values.to_vec())
}

fn median_of(sorted: &mut [f64]) -> f64 {
    sorted.sort_unstable_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { sorted[middle - 1].midpoint(sorted[middle]) }
}

/// Returns the 95 % interval of a statistic over `count` invocations, by percentile bootstrap. `of`
/// computes the statistic from the indices of the sample.
fn bootstrap(count: usize, resamples: usize, of: impl Fn(&[usize]) -> f64) -> Option<[f64; 2]> {
    if count < 3 {
        return None;
    }
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(SEED);
    let mut drawn = vec![0; count];
    let mut found: Vec<f64> = (0..resamples)
        .map(|_| {
            drawn.iter_mut().for_each(|slot| *slot = rng.random_range(0..count));
            of(&drawn)
        })
        .collect();
    found.sort_unstable_by(f64::total_cmp);
    Some([found[resamples / 40], found[resamples - 1 - resamples / 40]])
}

/// Runs of the same requests at the same times, in which each request can be compared with itself.
struct Repeats<'r>(Vec<&'r Run>);

impl<'r> Repeats<'r> {
    /// Returns `None` if the runs had different requests.
    fn of(runs: &[&'r Run]) -> Option<Self> {
        let first = runs.first()?;
        let is_same = |run: &&Run| {
            run.seed == first.seed && run.latencies_us.len() == first.latencies_us.len()
        };
        let has_all = !first.latencies_us.is_empty() && runs.iter().all(is_same);
        has_all.then(|| Self(runs.to_vec()))
    }

    /// Returns the runs without a batch of the same invocations, in the same order.
    fn partners(&self, without: &[&'r Run]) -> Option<Self> {
        let partner =
            |run: &&Run| without.iter().find(|other| run.met_the_same_requests(other)).copied();
        let partners: Option<Vec<&Run>> = self.0.iter().map(partner).collect();
        partners.and_then(|runs| Self::of(&runs))
    }

    /// Returns the latency in milliseconds that `per_thousand` of 1000 requests do not exceed. The
    /// latency of a request is its median over the runs in `drawn`.
    fn tail_ms(&self, drawn: &[usize], per_thousand: usize) -> f64 {
        let mut same = vec![0.0; drawn.len()];
        let count = self.0[0].latencies_us.len();
        let mut medians: Vec<f64> = (0..count)
            .map(|request| {
                let of_run = |run: &usize| self.0[*run].latencies_us[request];
                same.iter_mut().zip(drawn).for_each(|(slot, run)| *slot = of_run(run));
                median_of(&mut same)
            })
            .collect();
        let rank = (count * per_thousand).div_ceil(1000).max(1);
        *medians.select_nth_unstable_by(rank - 1, f64::total_cmp).1 / 1e3
    }

    /// Computes a statistic over all runs, and its interval over the runs.
    fn figure(&self, of: impl Fn(&[usize]) -> f64) -> Figure {
        let each: Vec<usize> = (0..self.0.len()).collect();
        let values = each.len() * self.0[0].latencies_us.len();
        let resamples = (RESAMPLED_VALUES / values).clamp(200, 1_000);
        Figure { median: of(&each), ci95: bootstrap(each.len(), resamples, of) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use elfen_run::figures::Figures;
    use proptest::prelude::*;

    fn report() -> Box<RunReport> {
        let reaction_ns = Latency { median: Some(2000), p99: Some(4000), ..Latency::default() };
        let figures = Figures {
            borrowed_ns: Some(95),
            overlapped_ns: Some(5),
            reaction_ns,
            ..Figures::default()
        };
        let request_busy_ns = Some(100);
        Box::new(RunReport { figures, wall_ns: 200, request_busy_ns, ..RunReport::default() })
    }

    fn run(scenario: Scenario, invocation: u32, p99_ms: f64) -> Line {
        Line::Run(Run {
            scenario,
            batch: (scenario != Scenario::None).then(|| "loop".to_owned()),
            rps: 50.0,
            load: 0.5,
            invocation,
            seed: invocation.into(),
            p99_ms,
            request_lane_utilisation: 0.5,
            batch_lane_utilisation: 0.4,
            helper_utilisation: 0.1,
            batch_per_second: (scenario != Scenario::None).then_some(40.0),
            batch_verified: (scenario != Scenario::None).then_some(invocation != 3),
            report: (scenario == Scenario::BorrowIdle).then(report),
            ..Run::default()
        })
    }

    /// Goal: scenarios are compared within an invocation. Method: invocations that differ by more
    /// than the scenarios do. Computed by hand, the ratios are 1.1, 1.2 and 1.3.
    #[test]
    fn drift_cancels_out() {
        let alone = Alone { batch: "loop".to_owned(), per_second: 100.0, ..Alone::default() };
        let mut lines = vec![Line::Setup(Setup { alone: vec![alone], ..Setup::default() })];
        for (invocation, (base, factor)) in (1..).zip([(1.0, 1.2), (10.0, 1.1), (100.0, 1.3)]) {
            lines.push(run(Scenario::BorrowIdle, invocation, base * factor));
            lines.push(run(Scenario::None, invocation, base));
        }
        let rows = rows(&lines);
        let [none, idle] = rows.as_slice() else { panic!("{rows:?}") };
        assert_eq!(
            (none.scenario, none.p99_ratio, none.p99_ms.median),
            (Scenario::None, None, 10.0)
        );
        let ratio = idle.p99_ratio.unwrap();
        assert!((ratio.median - 1.2).abs() < 1e-12, "{ratio:?}");
        let [low, high] = ratio.ci95.unwrap();
        assert!((low - 1.1).abs() < 1e-9 && (high - 1.3).abs() < 1e-9, "{ratio:?}");
        assert!((idle.utilisation.median - 0.9).abs() < 1e-12);
        assert!((idle.utilisation_with_helpers.median - 1.0).abs() < 1e-12);
        assert_eq!(idle.batch_relative.unwrap().median, 0.4);
        assert_eq!((idle.overlapped.unwrap().median, idle.lent.unwrap().median), (0.05, 0.5));
        assert_eq!((idle.reaction_us.unwrap().median, idle.batch_verified), (2.0, Some(false)));
    }

    /// Goal: a disturbance that affects a request in one run changes nothing, and one that affects
    /// it in most runs counts. Method: three invocations of a hundred requests, of which the last
    /// three are slow. In each run other requests are disturbed, and a batch doubles the slow ones.
    #[test]
    fn a_percentile_is_over_medians_of_requests() {
        let with = |scenario, invocation: u32, slow_us: f64| {
            let Line::Run(run) = run(scenario, invocation, 0.0) else { unreachable!() };
            let disturbed = |at: u32| at / 10 == invocation;
            let latency = |at| match at {
                97.. => slow_us,
                at if disturbed(at) => 1e6,
                _ => 1000.0,
            };
            let latencies_us = (0..100).map(latency).collect();
            Line::Run(Run { latencies_us, seed: 1, ..run })
        };
        let mut lines = Vec::new();
        for invocation in 1..=3 {
            lines.push(with(Scenario::BorrowIdle, invocation, 8000.0));
            lines.push(with(Scenario::None, invocation, 4000.0));
        }
        let rows = rows(&lines);
        let [none, idle] = rows.as_slice() else { panic!("{rows:?}") };
        let median = |figure: Figure| figure.median;
        assert_eq!((median(none.p50_ms), median(none.p99_ms), median(idle.p99_ms)), (1., 4., 8.));
        assert_eq!(none.p99_ratio, None);
        let ratio = idle.p99_ratio.unwrap();
        assert_eq!(ratio.median, 2.0);
        let [low, high] = ratio.ci95.unwrap();
        assert!(low <= 2.0 && 2.0 <= high, "{ratio:?}");
    }

    /// Goal: runs of different requests are not compared request by request. Method: two seeds.
    #[test]
    fn other_requests_are_not_compared() {
        let mut all: Vec<Run> = (1..=2)
            .map(|seed| Run { seed, latencies_us: vec![1.0; 4], ..Run::default() })
            .collect();
        assert!(Repeats::of(&all.iter().collect::<Vec<_>>()).is_none());
        all[1].seed = 1;
        assert!(Repeats::of(&all.iter().collect::<Vec<_>>()).is_some());
        all[1].latencies_us.pop();
        assert!(Repeats::of(&all.iter().collect::<Vec<_>>()).is_none());
    }

    #[test]
    fn two_values_have_no_interval() {
        assert_eq!(figure(&[1.0, 3.0]), Figure { median: 2.0, ci95: None });
    }

    proptest! {
        /// Goal: an interval is ordered, lies within the values, and is reproducible. Method: any
        /// values.
        #[test]
        fn intervals_are_ordered(values in proptest::collection::vec(-1e9f64..1e9, 3..12)) {
            let Figure { median, ci95 } = figure(&values);
            let [low, high] = ci95.expect("three values or more");
            prop_assert!(low <= median && median <= high);
            prop_assert!(values.iter().any(|v| *v <= low) && values.iter().any(|v| *v >= high));
            prop_assert_eq!(figure(&values).ci95, ci95);
        }
    }
}
