//! Divides each request's time among causes: kinds of segments by name, work beyond the usual
//! amount, and slowdown by neighbours on the same core.

use std::collections::BTreeMap;

use crate::neighbours::NeighbourCosts;
use crate::replay::{Parts, quantile};
use crate::segment::{
    ExplainedRequest, LONG, NEIGHBOUR, QUEUE, SegmentKind, WORK, cause_name, is_named_by,
    saturating_sum,
};
use crate::trace::Trace;

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
    by_kind: BTreeMap<SegmentKind, usize>,
    long: usize,
    pub(crate) costs: NeighbourCosts,
    /// The index of the first neighbour's cause. The causes of other neighbours follow it.
    first_neighbour: usize,
    usual: UsualWork,
}

impl Causes {
    pub(crate) fn of(explained: &[ExplainedRequest], trace: &Trace) -> Self {
        let costs = NeighbourCosts::of(explained);
        let mut all = Self {
            names: vec![LONG.to_owned()],
            by_kind: BTreeMap::new(),
            long: 0,
            first_neighbour: 0,
            usual: UsualWork::of(explained, &costs),
            costs,
        };
        let mut by_name: BTreeMap<String, usize> = BTreeMap::new();
        for segment in explained.iter().flat_map(|one| &one.segments) {
            if !all.by_kind.contains_key(&segment.kind) {
                let name = cause_name(segment.kind, trace);
                let at = *by_name.entry(name).or_insert_with_key(|name| {
                    all.names.push(name.clone());
                    all.names.len() - 1
                });
                all.by_kind.insert(segment.kind, at);
            }
        }
        all.first_neighbour = all.names.len();
        all.names.extend(all.costs.names.iter().map(|name| format!("{NEIGHBOUR}:{name}")));
        all
    }

    /// The causes that `name` selects: the cause of this name, or, as in `io`, all causes of a
    /// kind. Work and queueing are excluded because a replay cannot remove them.
    pub(crate) fn matching<'a>(&'a self, name: &'a str) -> impl Iterator<Item = usize> + 'a {
        let all = self.names.iter().enumerate();
        all.filter(move |(_, cause)| is_removable(cause) && is_named_by(cause, name))
            .map(|(at, _)| at)
    }

    /// How much of a request each cause took. Work beyond the usual amount has the cause `long`.
    /// Usual work has no cause.
    pub(crate) fn parts_of_request(&self, one: &ExplainedRequest) -> Parts {
        self.parts_within(one, (one.arrived_ns, one.ended_ns), &mut self.usual.work_ns(one))
    }

    /// Whether a request took longer than others because of its work.
    pub(crate) fn is_long(&self, parts: &Parts) -> bool {
        parts.iter().any(|(cause, _)| *cause == self.long)
    }

    /// How much of consecutive spans each cause took. Usual work is subtracted from the first
    /// spans.
    pub(crate) fn parts_in_spans(
        &self,
        one: &ExplainedRequest,
        spans: &[(u64, u64)],
    ) -> Vec<Parts> {
        let mut usual_ns = self.usual.work_ns(one);
        spans.iter().map(|&span| self.parts_within(one, span, &mut usual_ns)).collect()
    }

    fn parts_within(&self, one: &ExplainedRequest, span: (u64, u64), usual_ns: &mut u64) -> Parts {
        let mut sums: BTreeMap<usize, u64> = BTreeMap::new();
        let mut work_ns = 0;
        let first = one.segments.partition_point(|segment| segment.to_ns <= span.0);
        for segment in one.segments[first..].iter().take_while(|s| s.from_ns < span.1) {
            let ns = segment.within(span.0, span.1);
            match segment.kind {
                SegmentKind::Work => work_ns = saturating_sum([work_ns, ns].into_iter()),
                kind => add(&mut sums, self.by_kind[&kind], ns),
            }
        }
        for (neighbour, ns) in self.costs.added_times(one, span) {
            let ns = ns.min(work_ns);
            work_ns -= ns;
            add(&mut sums, self.first_neighbour + neighbour, ns);
        }
        let long_ns = work_ns.saturating_sub(*usual_ns);
        *usual_ns = usual_ns.saturating_sub(work_ns);
        if long_ns > 0 {
            sums.insert(self.long, long_ns);
        }
        sums.into_iter().filter(|(_, ns)| *ns > 0).collect()
    }

    /// The cause for queueing; `None` if no request queued.
    pub(crate) fn queue_cause(&self) -> Option<usize> {
        self.by_kind.get(&SegmentKind::Queue).copied()
    }
}

pub(crate) fn is_removable(cause: &str) -> bool {
    cause != WORK && cause != QUEUE
}

/// How long the request's work would have taken without neighbours on the core.
fn work_alone_ns(one: &ExplainedRequest, costs: &NeighbourCosts) -> u64 {
    let added = costs.added_times(one, (0, u64::MAX)).map(|(_, ns)| ns);
    one.work_ns().saturating_sub(saturating_sum(added))
}

/// The usual amount of work of a request. If the service reports classes, it is the median of the
/// class, otherwise the 95th percentile of all requests.
struct UsualWork {
    by_class: BTreeMap<u64, u64>,
    all_ns: u64,
}

/// With fewer requests, the median of a class is not meaningful.
const CLASS_MIN: usize = 10;

impl UsualWork {
    fn of(explained: &[ExplainedRequest], costs: &NeighbourCosts) -> Self {
        let mut by_class: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        for one in explained.iter().filter(|one| one.class != 0) {
            by_class.entry(one.class).or_default().push(work_alone_ns(one, costs));
        }
        by_class.retain(|_, work| work.len() >= CLASS_MIN);
        let median = |work: Vec<u64>| quantile(&sorted(work.into_iter()), P50);
        Self {
            by_class: by_class.into_iter().map(|(class, work)| (class, median(work))).collect(),
            all_ns: quantile(&sorted(explained.iter().map(|one| work_alone_ns(one, costs))), P95),
        }
    }

    fn work_ns(&self, one: &ExplainedRequest) -> u64 {
        self.by_class.get(&one.class).copied().unwrap_or(self.all_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::Segment;

    /// Goal: the parts in the slots of a request add up to the parts of the whole request, and its
    /// usual work is subtracted once. Method: 60 is usual, and one request takes 250 in two slots.
    #[test]
    fn usual_work_is_subtracted_first() {
        let work = |from_ns, to_ns| Segment {
            from_ns,
            to_ns,
            kind: SegmentKind::Work,
            thread: 7,
            cpu: Some(0),
            behind: None,
        };
        let one = |segments: Vec<Segment>| ExplainedRequest {
            connection: 1,
            arrived_ns: 0,
            ended_ns: segments.last().map_or(0, |last| last.to_ns),
            server: 7,
            class: 0,
            stages: Vec::new(),
            segments,
            faults: 0,
            neighbour_spans: Vec::new(),
        };
        let mut all: Vec<ExplainedRequest> = (0..99).map(|_| one(vec![work(0, 60)])).collect();
        all.push(one(vec![work(0, 100), work(200, 350)]));
        let causes = Causes::of(&all, &Trace::default());
        assert_eq!(causes.parts_of_request(&all[99]), [(causes.long, 190)]);
        let parts = causes.parts_in_spans(&all[99], &[(0, 100), (200, 350)]);
        assert_eq!(parts, [vec![(causes.long, 40)], vec![(causes.long, 150)]]);
    }
}
