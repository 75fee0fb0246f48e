//! Finds what ran on the other lanes of a core while a service worked for a request, and estimates
//! how much that slowed the work.
//!
//! On a core with several lanes, work takes longer while a neighbour runs. No event says by how
//! much. Requests of one class do the same work. So this module compares their times by the share
//! of the work that had the neighbour. The loss is the part of the time next to the neighbour that
//! must be subtracted so that the rest shows no trend. If all requests had an equal share of a
//! neighbour, its cost is unknown.

use std::collections::BTreeMap;
use std::sync::Arc;

use elfen_console::duration::{number, show};
use elfen_console::table as lines;
use serde::Serialize;

use crate::segment::{ExplainedRequest, NeighbourSpan, Segment, SegmentKind, saturating_sum};
use crate::timeline::Timeline;
use crate::trace::Trace;

/// The most neighbours that are compared, those with the most time.
const NEIGHBOURS_MAX: usize = 16;
/// With fewer requests, the mean of a class is not meaningful. With fewer requests in total
/// (`REQUESTS_MIN`), a trend is not meaningful.
const CLASS_MIN: usize = 10;
const REQUESTS_MIN: usize = 50;
/// More requests would not make the trend more certain, because the machine has other noise.
const SAMPLES_MAX: usize = 20_000;
/// Losses in thousandths of the time next to a neighbour. A loss below the minimum counts as 0, and
/// a core cannot lose more than the maximum.
const LOSS_MIN: u16 = 20;
const LOSS_MAX: u16 = 900;
/// A trend with a larger standard error counts as unknown.
const ERROR_MAX: f64 = 0.05;
/// A trend counts if it is at least this many standard errors.
const ERRORS_MIN: f64 = 3.0;

/// The spans of a request's work during which a thread ran on another lane of the core.
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

/// A request in the form in which it is compared.
struct Sample {
    class: u64,
    work_ns: f64,
    /// The share of the request's work next to each neighbour.
    shares: Vec<f64>,
}

/// How much each neighbour slows the work next to it.
#[derive(Debug, Default)]
pub(crate) struct NeighbourCosts {
    /// Sorted by time, the most first.
    pub(crate) names: Vec<Arc<str>>,
    /// In thousandths of the time next to the neighbour; `None` if unknown.
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

    /// How much time each neighbour with a known cost added to a request within a span.
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

    /// The factor by which work next to a neighbour takes longer.
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
    // The second round corrects the estimate of neighbours that often ran together with a neighbour
    // that was estimated later.
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

/// Finds, by bisection, the loss at which the remaining work shows no trend.
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

/// The trend of the logarithm of the remaining work over the share of the work next to a neighbour,
/// within classes.
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

/// The mean time that a neighbour ran next to the work of a slow request, and of a request in the
/// middle.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct NeighbourRow {
    pub name: String,
    pub tail_ns: u64,
    pub middle_ns: u64,
    /// The factor by which work next to the neighbour takes longer; `None` if unknown.
    pub slowdown: Option<f64>,
}

/// A limit on rows, so that the table fits on a screen.
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
