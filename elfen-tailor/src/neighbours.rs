//! Who ran on the other lanes of a core while a request was worked for, and what that cost it.
//!
//! On a core of several lanes work takes longer while a neighbour runs. By how much, no event
//! tells: requests of one class are compared, which are the same work, by how much of it they had
//! beside a neighbour. What is found is the part of such a stretch that was lost, at which the
//! rest of the work shows no trend any more. Where all requests had equally much of a neighbour
//! there is nothing to compare, and what it cost is not known.

use std::collections::BTreeMap;
use std::sync::Arc;

use elfen_console::duration::{number, show};
use elfen_console::table as lines;
use serde::Serialize;

use crate::explained::{Beside, Explained};
use crate::segment::{Kind, Segment, total};
use crate::timeline::Timeline;
use crate::trace::Tale;

/// Neighbours that are compared, those with the most time.
const MOST: usize = 16;
/// With fewer requests of a class they have no mean to speak of, and with fewer in all no trend.
const FEWEST_OF_CLASS: usize = 10;
const FEWEST: usize = 50;
/// More requests make the trend no surer than others on the machine let it be.
const ENOUGH: usize = 20_000;
/// Of a stretch beside a neighbour, in thousandths: less is no loss, and no core loses more.
const LEAST_LOSS: u16 = 20;
const LARGEST_LOSS: u16 = 900;
/// A trend that is known no better than this is not known.
const LARGEST_ERROR: f64 = 0.05;
/// How many of its standard errors a trend must be.
const SURE: f64 = 3.0;

/// Who ran beside a request's work.
pub(crate) fn of(segments: &[Segment], tale: &Tale, timeline: &Timeline) -> Vec<Beside> {
    let mut found: Vec<Beside> = Vec::new();
    for segment in segments.iter().filter(|segment| segment.kind == Kind::Work) {
        let Some(cpu) = segment.cpu else { continue };
        for sibling in tale.siblings(cpu) {
            let runs = timeline.runs(sibling, segment.from_ns, segment.to_ns);
            for (from_ns, to_ns, thread, _) in runs.filter(|(.., thread, _)| *thread != 0) {
                let name = tale.neighbour(thread, from_ns);
                match found.last_mut() {
                    Some(last) if *last.name == *name && last.to_ns == from_ns => {
                        last.to_ns = to_ns;
                    }
                    _ => found.push(Beside { from_ns, to_ns, name: name.into() }),
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
    /// By neighbour, the part of the work that had it.
    beside: Vec<f64>,
}

/// What each neighbour takes of the work beside it.
#[derive(Debug, Default)]
pub(crate) struct Slowing {
    /// The one that was there longest first.
    pub(crate) names: Vec<Arc<str>>,
    /// In thousandths of the time beside it; `None` where nothing tells.
    losses: Vec<Option<u16>>,
}

impl Slowing {
    pub(crate) fn of(explained: &[Explained]) -> Self {
        let mut sums: BTreeMap<Arc<str>, u64> = BTreeMap::new();
        for stretch in explained.iter().flat_map(|one| &one.beside) {
            let sum = sums.entry(Arc::clone(&stretch.name)).or_default();
            *sum = sum.saturating_add(stretch.within(0, u64::MAX));
        }
        let mut names: Vec<(Arc<str>, u64)> = sums.into_iter().collect();
        names.sort_by_key(|(_, ns)| std::cmp::Reverse(*ns));
        let names: Vec<Arc<str>> = names.into_iter().map(|(name, _)| name).take(MOST).collect();
        let samples = if names.is_empty() { Vec::new() } else { samples(explained, &names) };
        Self { losses: losses(&samples, names.len()), names }
    }

    /// By how much a request was longer in a span, for each neighbour that it was longer for.
    pub(crate) fn added<'a>(
        &'a self,
        one: &'a Explained,
        span: (u64, u64),
    ) -> impl Iterator<Item = (usize, u64)> + 'a {
        one.beside.iter().filter_map(move |stretch| {
            let at = self.names.iter().position(|name| *name == stretch.name)?;
            let loss = u64::from(self.losses[at].filter(|loss| *loss > 0)?);
            let ns = stretch.within(span.0, span.1);
            Some((at, ns / 1_000 * loss + ns % 1_000 * loss / 1_000))
        })
    }

    /// How many times as long work took beside a neighbour.
    fn slowdown(&self, at: usize) -> Option<f64> {
        self.losses[at].map(|loss| 1.0 / (1.0 - f64::from(loss) / 1e3))
    }
}

fn samples(explained: &[Explained], names: &[Arc<str>]) -> Vec<Sample> {
    let mut of_class: BTreeMap<u64, usize> = BTreeMap::new();
    for one in explained {
        *of_class.entry(one.class).or_default() += 1;
    }
    let sample = |one: &Explained| {
        let work_ns = one.work_ns();
        let beside = names.iter().map(|name| {
            let stretches = one.beside.iter().filter(|stretch| stretch.name == *name);
            let ns = total(stretches.map(|stretch| stretch.within(0, u64::MAX)));
            (number(ns) / number(work_ns)).min(1.0)
        });
        let class = if of_class[&one.class] < FEWEST_OF_CLASS { 0 } else { one.class };
        (work_ns > 0).then(|| Sample { class, work_ns: number(work_ns), beside: beside.collect() })
    };
    let step = explained.len().div_ceil(ENOUGH).max(1);
    explained.iter().step_by(step).filter_map(sample).collect()
}

fn losses(samples: &[Sample], neighbours: usize) -> Vec<Option<u16>> {
    let mut losses = vec![0; neighbours];
    let mut known = vec![false; neighbours];
    // One that often ran in turns with another is looked at again once that one's part is known.
    for _ in 0..2 {
        for at in 0..neighbours {
            losses[at] = 0;
            let trend = Trend::of(samples, &losses, at);
            known[at] = samples.len() >= FEWEST && trend.error <= LARGEST_ERROR;
            if known[at] && trend.slope > trend.error * SURE {
                losses[at] = loss(samples, &mut losses, at);
            }
        }
    }
    let or_none = |(loss, known): (u16, bool)| match loss {
        loss if loss >= LEAST_LOSS => Some(loss),
        _ => known.then_some(0),
    };
    losses.into_iter().zip(known).map(or_none).collect()
}

/// The loss at which what is left of the work has no trend.
fn loss(samples: &[Sample], losses: &mut [u16], at: usize) -> u16 {
    let (mut low, mut high) = (0, LARGEST_LOSS);
    while high - low > 1 {
        let middle = u16::midpoint(low, high);
        losses[at] = middle;
        match Trend::of(samples, losses, at).slope > 0.0 {
            true => low = middle,
            false => high = middle,
        }
    }
    low
}

/// How the logarithm of what work is left grows with the part of it beside a neighbour, within
/// classes.
struct Trend {
    slope: f64,
    error: f64,
}

impl Trend {
    fn of(samples: &[Sample], losses: &[u16], at: usize) -> Self {
        let left = |sample: &Sample| {
            let lost = sample.beside.iter().zip(losses).map(|(part, loss)| part * f64::from(*loss));
            (sample.work_ns * (1.0 - lost.sum::<f64>() / 1e3).max(0.05)).ln()
        };
        let mut classes: BTreeMap<u64, (f64, f64, f64)> = BTreeMap::new();
        let points: Vec<(u64, f64, f64)> =
            samples.iter().map(|sample| (sample.class, sample.beside[at], left(sample))).collect();
        for (class, x, y) in &points {
            let (n, of_x, of_y) = classes.entry(*class).or_default();
            (*n, *of_x, *of_y) = (*n + 1.0, *of_x + x, *of_y + y);
        }
        let (mut xx, mut xy, mut yy) = (0.0, 0.0, 0.0);
        for (class, x, y) in &points {
            let (n, of_x, of_y) = classes[class];
            let (x, y) = (x - of_x / n, y - of_y / n);
            (xx, xy, yy) = (xx + x * x, xy + x * y, yy + y * y);
        }
        let slope = if xx > 0.0 { xy / xx } else { 0.0 };
        let free = number((points.len() as u64).saturating_sub(classes.len() as u64 + 1)).max(1.0);
        let error = match xx > 0.0 {
            true => ((yy - slope * xy).max(0.0) / free / xx).sqrt(),
            false => f64::INFINITY,
        };
        Self { slope, error }
    }
}

/// How long a neighbour ran beside the work of a slow request, and of one of the middle, on
/// average.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct BesideRow {
    pub name: String,
    pub tail_ns: u64,
    pub middle_ns: u64,
    /// How many times as long work took beside it; `None` where all had equally much of it.
    pub slowdown: Option<f64>,
}

/// A screen has room for so many.
const MOST_ROWS: usize = 4;

pub(crate) fn rows(
    explained: &[Explained],
    slowing: &Slowing,
    slow: &[usize],
    middle: &[usize],
) -> Vec<BesideRow> {
    let mean = |of: &[usize], name: &Arc<str>| {
        let stretches = of.iter().flat_map(|&at| &explained[at].beside);
        let its = stretches.filter(|stretch| stretch.name == *name);
        total(its.map(|stretch| stretch.within(0, u64::MAX))) / (of.len() as u64).max(1)
    };
    let row = |(at, name): (usize, &Arc<str>)| BesideRow {
        name: name.to_string(),
        tail_ns: mean(slow, name),
        middle_ns: mean(middle, name),
        slowdown: slowing.slowdown(at),
    };
    slowing.names.iter().enumerate().map(row).collect()
}

pub(crate) fn table(rows: &[BesideRow]) -> String {
    let row = |row: &BesideRow| {
        let slowdown = match row.slowdown {
            Some(factor) => format!("{factor:.2} times"),
            None => "not known".to_owned(),
        };
        vec![row.name.clone(), show(row.tail_ns), show(row.middle_ns), slowdown]
    };
    let rows: Vec<Vec<String>> = rows.iter().take(MOST_ROWS).map(row).collect();
    lines::lines(&["beside", "tail", "middle", "slowed"], &rows)
}
