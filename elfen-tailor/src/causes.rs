//! The causes that requests had, and how much of each: kinds of segments by their names, work
//! beyond what is usual, and what neighbours on the same core took.

use std::collections::BTreeMap;

use crate::explained::Explained;
use crate::neighbours::Slowing;
use crate::replay::{Parts, quantile};
use crate::segment::{BESIDE, Kind, LONG, QUEUE, WORK, cause, is_of, total};
use crate::trace::Tale;

const P50: u64 = 500_000;
const P95: u64 = 950_000;

pub(crate) fn sorted(values: impl Iterator<Item = u64>) -> Vec<u64> {
    let mut values: Vec<u64> = values.collect();
    values.sort_unstable();
    values
}

pub(crate) fn add(sums: &mut BTreeMap<usize, u64>, cause: usize, ns: u64) {
    let sum = sums.entry(cause).or_default();
    *sum = sum.saturating_add(ns);
}

pub(crate) struct Causes {
    pub(crate) names: Vec<String>,
    by_kind: BTreeMap<Kind, usize>,
    long: usize,
    pub(crate) slowing: Slowing,
    /// The first neighbour's; the others' follow.
    first_beside: usize,
    usual: Usual,
}

impl Causes {
    pub(crate) fn of(explained: &[Explained], tale: &Tale) -> Self {
        let slowing = Slowing::of(explained);
        let mut all = Self {
            names: vec![LONG.to_owned()],
            by_kind: BTreeMap::new(),
            long: 0,
            first_beside: 0,
            usual: Usual::of(explained, &slowing),
            slowing,
        };
        let mut by_name: BTreeMap<String, usize> = BTreeMap::new();
        for segment in explained.iter().flat_map(|one| &one.segments) {
            if !all.by_kind.contains_key(&segment.kind) {
                let name = cause(segment.kind, tale);
                let at = *by_name.entry(name).or_insert_with_key(|name| {
                    all.names.push(name.clone());
                    all.names.len() - 1
                });
                all.by_kind.insert(segment.kind, at);
            }
        }
        all.first_beside = all.names.len();
        all.names.extend(all.slowing.names.iter().map(|name| format!("{BESIDE}:{name}")));
        all
    }

    /// The causes that a name stands for: itself, or as `io` all of its kind. Work and queueing are
    /// none that could be taken away.
    pub(crate) fn named<'a>(&'a self, name: &'a str) -> impl Iterator<Item = usize> + 'a {
        let all = self.names.iter().enumerate();
        all.filter(move |(_, cause)| is_removable(cause) && is_of(cause, name)).map(|(at, _)| at)
    }

    /// How much of a request each cause had. Work beyond what is usual is `long`, the rest of it
    /// nobody's charge.
    pub(crate) fn all(&self, one: &Explained) -> Parts {
        self.within(one, (one.arrived_ns, one.ended_ns), &mut self.usual.work_ns(one))
    }

    /// How much each had in spans that follow each other: what is usual comes first.
    pub(crate) fn parts(&self, one: &Explained, spans: &[(u64, u64)]) -> Vec<Parts> {
        let mut usual_ns = self.usual.work_ns(one);
        spans.iter().map(|&span| self.within(one, span, &mut usual_ns)).collect()
    }

    fn within(&self, one: &Explained, span: (u64, u64), usual_ns: &mut u64) -> Parts {
        let mut sums: BTreeMap<usize, u64> = BTreeMap::new();
        let mut work_ns = 0;
        let first = one.segments.partition_point(|segment| segment.to_ns <= span.0);
        for segment in one.segments[first..].iter().take_while(|s| s.from_ns < span.1) {
            let ns = segment.within(span.0, span.1);
            match segment.kind {
                Kind::Work => work_ns = total([work_ns, ns].into_iter()),
                kind => add(&mut sums, self.by_kind[&kind], ns),
            }
        }
        for (neighbour, ns) in self.slowing.added(one, span) {
            let ns = ns.min(work_ns);
            work_ns -= ns;
            add(&mut sums, self.first_beside + neighbour, ns);
        }
        let long_ns = work_ns.saturating_sub(*usual_ns);
        *usual_ns = usual_ns.saturating_sub(work_ns);
        if long_ns > 0 {
            sums.insert(self.long, long_ns);
        }
        sums.into_iter().filter(|(_, ns)| *ns > 0).collect()
    }

    /// What waiting for one's turn is, if any request did.
    pub(crate) fn queue(&self) -> Option<usize> {
        self.by_kind.get(&Kind::Queue).copied()
    }
}

pub(crate) fn is_removable(cause: &str) -> bool {
    cause != WORK && cause != QUEUE
}

/// As long as a request's work would have been with its core to itself.
fn alone_ns(one: &Explained, slowing: &Slowing) -> u64 {
    let added = slowing.added(one, (0, u64::MAX)).map(|(_, ns)| ns);
    one.work_ns().saturating_sub(total(added))
}

/// As much work as a request of its kind has: the median, or, where a service does not say what
/// kinds it has, what 95 % of all have.
struct Usual {
    by_class: BTreeMap<u64, u64>,
    all_ns: u64,
}

/// With fewer requests a class has no median to speak of.
const FEWEST_OF_CLASS: usize = 10;

impl Usual {
    fn of(explained: &[Explained], slowing: &Slowing) -> Self {
        let mut by_class: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        for one in explained.iter().filter(|one| one.class != 0) {
            by_class.entry(one.class).or_default().push(alone_ns(one, slowing));
        }
        by_class.retain(|_, work| work.len() >= FEWEST_OF_CLASS);
        let median = |work: Vec<u64>| quantile(&sorted(work.into_iter()), P50);
        Self {
            by_class: by_class.into_iter().map(|(class, work)| (class, median(work))).collect(),
            all_ns: quantile(&sorted(explained.iter().map(|one| alone_ns(one, slowing))), P95),
        }
    }

    fn work_ns(&self, one: &Explained) -> u64 {
        self.by_class.get(&one.class).copied().unwrap_or(self.all_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::Segment;

    /// Goal: turns of a request have together what it has, and its usual work once. Method: 60 is
    /// usual, and one request takes 250 in two turns.
    #[test]
    fn what_is_usual_comes_first() {
        let work = |from_ns, to_ns| {
            let (kind, thread, cpu, behind) = (Kind::Work, 7, Some(0), None);
            Segment { from_ns, to_ns, kind, thread, cpu, behind }
        };
        let one = |segments: Vec<Segment>| Explained {
            connection: 1,
            arrived_ns: 0,
            ended_ns: segments.last().map_or(0, |last| last.to_ns),
            server: 7,
            class: 0,
            stages: Vec::new(),
            segments,
            faults: 0,
            beside: Vec::new(),
        };
        let mut all: Vec<Explained> = (0..99).map(|_| one(vec![work(0, 60)])).collect();
        all.push(one(vec![work(0, 100), work(200, 350)]));
        let causes = Causes::of(&all, &Tale::default());
        assert_eq!(causes.all(&all[99]), [(causes.long, 190)]);
        let parts = causes.parts(&all[99], &[(0, 100), (200, 350)]);
        assert_eq!(parts, [vec![(causes.long, 40)], vec![(causes.long, 150)]]);
    }
}
