//! What ran on the other lanes of a core while a service worked for a request, and what that cost.
//!
//! On a core of several lanes, work takes longer while a neighbour runs. No event says by how much.
//! Requests of one class are the same work, so they are compared by the share of their work that
//! had the neighbour. The result is the loss per time next to the neighbour at which the remaining
//! work shows no trend. If all requests had an equal share of a neighbour, there is nothing to
//! compare and its cost is unknown.

use std::collections::BTreeMap;
use std::sync::Arc;

use elfen_console::duration::{number, show};
use elfen_console::table as lines;
use serde::Serialize;

use crate::segment::{ExplainedRequest, NeighbourSpan, Segment, SegmentKind, saturating_sum};
use crate::timeline::Timeline;
use crate::trace::Trace;

/// Limit of neighbours that are compared, those with the most time first.
const NEIGHBOURS_MAX: usize = 16;
/// With fewer requests, a class has no meaningful mean. With fewer requests in total
/// (`REQUESTS_MIN`), no trend shows.
const CLASS_MIN: usize = 10;
const REQUESTS_MIN: usize = 50;
/// More requests do not make the trend more certain, because of other noise on the machine.
const SAMPLES_MAX: usize = 20_000;
/// Losses in thousandths of the time next to a neighbour: a smaller one does not count, and no core
/// loses more.
const LOSS_MIN: u16 = 20;
const LOSS_MAX: u16 = 900;
/// A trend with a larger standard error is unknown.
const ERROR_MAX: f64 = 0.05;
/// A trend counts if it is this many of its standard errors.
const ERRORS_MIN: f64 = 3.0;

/// What ran next to a request's work.
pub(crate) fn neighbour_spans(
    segments: &[Segment],
    trace: &Trace,
    timeline: &Timeline,
) -> Vec<NeighbourSpan> {
    let mut found: Vec<NeighbourSpan> = Vec::new();
    for segment in segments.iter().filter(|segment| segment.kind == SegmentKind::Work) {
        let Some(cpu) = segment.cpu else { continue };
        for sibling in trace.siblings(cpu) {
            let runs = timeline.runs(sibling, segment.from_ns, segment.to_ns);
            for (from_ns, to_ns, thread, _) in runs.filter(|(.., thread, _)| *thread != 0) {
                let name = trace.neighbour(thread, from_ns);
                match found.last_mut() {
                    Some(last) if *last.name == *name && last.to_ns == from_ns => {
                        last.to_ns = to_ns;
                    }
                    _ => found.push(NeighbourSpan { from_ns, to_ns, name: name.into() }),
                }
            }
        }
    }
    found
}

/// A request as it is compared.
struct Sample {
    class: u64,
    work_ns: f64,
    /// For each neighbour, the share of the work that had it.
    shares: Vec<f64>,
}

/// The cost of each neighbour for the work next to it.
#[derive(Debug, Default)]
pub(crate) struct NeighbourCosts {
    /// The neighbours with the most time first.
    pub(crate) names: Vec<Arc<str>>,
    /// In thousandths of the time next to it; `None` if unknown.
    losses: Vec<Option<u16>>,
}

impl NeighbourCosts {
    pub(crate) fn of(explained: &[ExplainedRequest]) -> Self {
        let mut sums: BTreeMap<Arc<str>, u64> = BTreeMap::new();
        for stretch in explained.iter().flat_map(|one| &one.neighbour_spans) {
            let sum = sums.entry(Arc::clone(&stretch.name)).or_default();
            *sum = sum.saturating_add(stretch.within(0, u64::MAX));
        }
        let mut names: Vec<(Arc<str>, u64)> = sums.into_iter().collect();
        names.sort_by_key(|(_, ns)| std::cmp::Reverse(*ns));
        let names: Vec<Arc<str>> =
            names.into_iter().map(|(name, _)| name).take(NEIGHBOURS_MAX).collect();
        let samples = if names.is_empty() { Vec::new() } else { samples(explained, &names) };
        Self { losses: estimate_losses(&samples, names.len()), names }
    }

    /// How much longer a request took in a span, for each neighbour with a cost.
    pub(crate) fn added_times<'a>(
        &'a self,
        one: &'a ExplainedRequest,
        span: (u64, u64),
    ) -> impl Iterator<Item = (usize, u64)> + 'a {
        one.neighbour_spans.iter().filter_map(move |stretch| {
            let at = self.names.iter().position(|name| *name == stretch.name)?;
            let loss = u64::from(self.losses[at].filter(|loss| *loss > 0)?);
            let ns = stretch.within(span.0, span.1);
            Some((at, ns / 1_000 * loss + ns % 1_000 * loss / 1_000))
        })
    }

    /// How many times as long work took next to a neighbour.
    fn slowdown(&self, at: usize) -> Option<f64> {
        self.losses[at].map(|loss| 1.0 / (1.0 - f64::from(loss) / 1e3))
    }
}

fn samples(explained: &[ExplainedRequest], names: &[Arc<str>]) -> Vec<Sample> {
    let mut of_class: BTreeMap<u64, usize> = BTreeMap::new();
    for one in explained {
        *of_class.entry(one.class).or_default() += 1;
    }
    let sample = |one: &ExplainedRequest| {
        let work_ns = one.work_ns();
        let shares = names.iter().map(|name| {
            let stretches = one.neighbour_spans.iter().filter(|stretch| stretch.name == *name);
            let ns = saturating_sum(stretches.map(|stretch| stretch.within(0, u64::MAX)));
            (number(ns) / number(work_ns)).min(1.0)
        });
        let class = if of_class[&one.class] < CLASS_MIN { 0 } else { one.class };
        (work_ns > 0).then(|| Sample { class, work_ns: number(work_ns), shares: shares.collect() })
    };
    let step = explained.len().div_ceil(SAMPLES_MAX).max(1);
    explained.iter().step_by(step).filter_map(sample).collect()
}

fn estimate_losses(samples: &[Sample], neighbours: usize) -> Vec<Option<u16>> {
    let mut losses = vec![0; neighbours];
    let mut known = vec![false; neighbours];
    // A second round corrects neighbours that often ran together with one that was estimated later.
    for _ in 0..2 {
        for at in 0..neighbours {
            losses[at] = 0;
            let trend = Trend::of(samples, &losses, at);
            known[at] = samples.len() >= REQUESTS_MIN && trend.error <= ERROR_MAX;
            if known[at] && trend.slope > trend.error * ERRORS_MIN {
                losses[at] = find_loss(samples, &mut losses, at);
            }
        }
    }
    let or_none = |(loss, known): (u16, bool)| match loss {
        loss if loss >= LOSS_MIN => Some(loss),
        _ => known.then_some(0),
    };
    losses.into_iter().zip(known).map(or_none).collect()
}

/// Finds the loss at which the remaining work has no trend, by bisection.
fn find_loss(samples: &[Sample], losses: &mut [u16], at: usize) -> u16 {
    let mut low = 0;
    let mut high = LOSS_MAX;
    while high - low > 1 {
        let middle = u16::midpoint(low, high);
        losses[at] = middle;
        if Trend::of(samples, losses, at).slope > 0.0 {
            low = middle;
        } else {
            high = middle;
        }
    }
    low
}

/// Trend of the logarithm of the remaining work over the share of it next to a neighbour, within
/// classes.
struct Trend {
    slope: f64,
    error: f64,
}

impl Trend {
    fn of(samples: &[Sample], losses: &[u16], at: usize) -> Self {
        let left = |sample: &Sample| {
            let lost = sample.shares.iter().zip(losses).map(|(part, loss)| part * f64::from(*loss));
            (sample.work_ns * (1.0 - lost.sum::<f64>() / 1e3).max(0.05)).ln()
        };
        let mut classes: BTreeMap<u64, (f64, f64, f64)> = BTreeMap::new();
        let points: Vec<(u64, f64, f64)> =
            samples.iter().map(|sample| (sample.class, sample.shares[at], left(sample))).collect();
        for (class, x, y) in &points {
            let (n, of_x, of_y) = classes.entry(*class).or_default();
            *n += 1.0;
            *of_x += x;
            *of_y += y;
        }
        let mut xx = 0.0;
        let mut xy = 0.0;
        let mut yy = 0.0;
        for (class, x, y) in &points {
            let (n, of_x, of_y) = classes[class];
            let x = x - of_x / n;
            let y = y - of_y / n;
            xx += x * x;
            xy += x * y;
            yy += y * y;
        }
        let slope = if xx > 0.0 { xy / xx } else { 0.0 };
        let free = number((points.len() as u64).saturating_sub(classes.len() as u64 + 1)).max(1.0);
        let error =
            if xx > 0.0 { ((yy - slope * xy).max(0.0) / free / xx).sqrt() } else { f64::INFINITY };
        Self { slope, error }
    }
}

/// The mean time that a neighbour ran next to the work of slow requests, and of those of the
/// middle.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct NeighbourRow {
    pub name: String,
    pub tail_ns: u64,
    pub middle_ns: u64,
    /// How many times as long work took next to it; `None` if all requests had an equal share of
    /// it.
    pub slowdown: Option<f64>,
}

/// Limit of rows, to fit on a screen.
const ROWS_MAX: usize = 4;

pub(crate) fn rows(
    explained: &[ExplainedRequest],
    costs: &NeighbourCosts,
    slow: &[usize],
    middle: &[usize],
) -> Vec<NeighbourRow> {
    let mean = |of: &[usize], name: &Arc<str>| {
        let stretches = of.iter().flat_map(|&at| &explained[at].neighbour_spans);
        let its = stretches.filter(|stretch| stretch.name == *name);
        saturating_sum(its.map(|stretch| stretch.within(0, u64::MAX))) / (of.len() as u64).max(1)
    };
    let row = |(at, name): (usize, &Arc<str>)| NeighbourRow {
        name: name.to_string(),
        tail_ns: mean(slow, name),
        middle_ns: mean(middle, name),
        slowdown: costs.slowdown(at),
    };
    costs.names.iter().enumerate().map(row).collect()
}

pub(crate) fn table(rows: &[NeighbourRow]) -> String {
    let row = |row: &NeighbourRow| {
        let slowdown = match row.slowdown {
            Some(factor) => format!("{factor:.2} times"),
            None => "not known".to_owned(),
        };
        vec![row.name.clone(), show(row.tail_ns), show(row.middle_ns), slowdown]
    };
    let rows: Vec<Vec<String>> = rows.iter().take(ROWS_MAX).map(row).collect();
    lines::lines(&["beside", "tail", "middle", "slowed"], &rows)
}
