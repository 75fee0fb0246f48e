//! Sums up the causes of the tail over the last minute.

use std::collections::{BTreeMap, VecDeque};

use crate::rank::{SlowThreshold, rank};
use crate::segment::ExplainedRequest;
use crate::trace::Trace;
use elfen_run::watches::{Cause, Tail};

const MINUTE_NS: u64 = 60_000_000_000;

/// The requests of a few seconds.
#[derive(Debug)]
struct Part {
    at_ns: u64,
    requests: u64,
    slow: u64,
    /// The time of slow requests, by cause.
    causes: BTreeMap<String, u64>,
}

#[derive(Debug, Default)]
pub struct LastMinute {
    parts: VecDeque<Part>,
    threshold_ns: u64,
}

impl LastMinute {
    /// Adds the requests of one span of time, in the order of arrival. Requests above the threshold
    /// are slow.
    pub fn add(
        &mut self,
        explained: &[ExplainedRequest],
        trace: &Trace,
        threshold_ns: u64,
        now_ns: u64,
    ) {
        let mut part = Part {
            at_ns: now_ns,
            requests: explained.len() as u64,
            slow: 0,
            causes: BTreeMap::new(),
        };
        if let Ok(ranking) = rank(explained, trace, SlowThreshold::AboveNs(threshold_ns), &[]) {
            part.slow = ranking.slow.len() as u64;
            for (cause, ns) in ranking.charges.into_iter().flatten() {
                let sum = part.causes.entry(cause).or_default();
                *sum = sum.saturating_add(ns);
            }
        }
        self.threshold_ns = threshold_ns;
        self.parts.push_back(part);
        let old = now_ns.saturating_sub(MINUTE_NS);
        self.parts.retain(|part| part.at_ns > old);
    }

    pub fn tail(&self) -> Tail {
        let mut causes: BTreeMap<&str, u64> = BTreeMap::new();
        for (cause, ns) in self.parts.iter().flat_map(|part| &part.causes) {
            let sum = causes.entry(cause).or_default();
            *sum = sum.saturating_add(*ns);
        }
        let charged_ns = causes.values().fold(0, |sum: u64, ns| sum.saturating_add(*ns));
        let cause = |(name, ns): (&str, u64)| Cause { name: name.to_owned(), ns };
        let mut causes: Vec<Cause> = causes.into_iter().map(cause).collect();
        causes.sort_by_key(|cause| std::cmp::Reverse(cause.ns));
        Tail {
            requests: self.parts.iter().map(|part| part.requests).sum(),
            slow: self.parts.iter().map(|part| part.slow).sum(),
            threshold_ns: self.threshold_ns,
            charged_ns,
            causes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::{Segment, SegmentKind};

    /// A request with a millisecond of work, which was stopped before its work.
    fn request(at_ns: u64, stopped_ns: u64) -> ExplainedRequest {
        let segment = |from_ns, to_ns, kind| Segment {
            from_ns,
            to_ns,
            kind,
            thread: 7,
            cpu: None,
            behind: None,
        };
        let begun_ns = at_ns + stopped_ns;
        let ended_ns = at_ns + stopped_ns + 1_000_000;
        let segments = vec![
            segment(at_ns, begun_ns, SegmentKind::Stopped),
            segment(begun_ns, ended_ns, SegmentKind::Work),
        ];
        ExplainedRequest {
            connection: 1,
            arrived_ns: at_ns,
            ended_ns,
            server: 7,
            class: 0,
            stages: Vec::new(),
            segments,
            faults: 0,
            neighbour_spans: Vec::new(),
        }
    }

    /// Goal: the causes of a minute are the sum of its parts, and older parts are removed. Method:
    /// parts of ten seconds in which every hundredth request was stopped, then parts without stops.
    #[test]
    fn a_minute_is_the_sum_of_its_parts() {
        let trace = Trace::default();
        let mut minute = LastMinute::default();
        assert_eq!(minute.tail(), Tail::default());
        let mut part = |at: u64, stopped: bool| {
            let from_ns = at * 10_000_000_000;
            let stop = |n: u64| if stopped && n.is_multiple_of(100) { 15_000_000 } else { 0 };
            let all: Vec<ExplainedRequest> =
                (0..200).map(|n| request(from_ns + n * 40_000_000, stop(n))).collect();
            minute.add(&all, &trace, 5_000_000, from_ns + 10_000_000_000);
            minute.tail()
        };
        assert_eq!((part(0, true).slow, part(1, true).requests), (2, 400));
        let tail = part(2, false);
        assert_eq!((tail.requests, tail.slow, tail.threshold_ns), (600, 4, 5_000_000));
        assert_eq!((tail.causes[0].name.as_str(), tail.causes[0].ns), ("stopped", 60_000_000));
        assert!(tail.share(&tail.causes[0]) > 0.99);
        let later = (3..8).map(|at| part(at, false)).last().unwrap();
        assert_eq!((later.requests, later.slow, later.causes), (1_200, 0, Vec::new()));
    }
}
