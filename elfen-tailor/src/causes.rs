//! The causes that requests had, and how much of each: kinds of segments by their names, work
//! beyond what is usual, and what neighbours on the same core took.

use std::collections::BTreeMap;

use crate::beside::Slowing;
use crate::explained::Explained;
use crate::replay::quantile;
use crate::segment::{BESIDE, Kind, LONG, QUEUE, WORK, cause, is_of, total};
use crate::tale::Tale;

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

    /// How much of a request each cause had in a span. Work beyond what is usual is `long`, the
    /// rest of it nobody's charge.
    pub(crate) fn within(&self, one: &Explained, span: (u64, u64)) -> Vec<(usize, u64)> {
        let mut sums: BTreeMap<usize, u64> = BTreeMap::new();
        let mut work_ns = 0;
        for segment in &one.segments {
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
        let usual_ns = self.usual.work_ns(one);
        if work_ns > usual_ns {
            sums.insert(self.long, work_ns - usual_ns);
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
