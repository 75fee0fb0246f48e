//! Explains all requests of a trace by segments.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use crate::neighbours;
use crate::request::{Request, Requests};
use crate::segment::{ExplainedRequest, Segment, SegmentKind, cause_name, saturating_sum};
use crate::timeline::Timeline;
use crate::trace::Trace;
use crate::walk::Walk;

/// The requests of a trace: explained ones, and counts of the others.
#[derive(Debug)]
pub struct Account {
    /// Requests without lost events, in the order of arrival.
    pub explained: Vec<ExplainedRequest>,
    /// Latencies of requests that are not explained, because events are lost or contradict each
    /// other.
    pub incomplete: Vec<u64>,
    pub unclear: u64,
}

impl Account {
    pub fn of(trace: &Trace) -> Self {
        Self::of_ended_in(trace, 0..=u64::MAX)
    }

    /// Explains only the requests that ended within a span of time.
    pub fn of_ended_in(trace: &Trace, ended_ns: RangeInclusive<u64>) -> Self {
        let events = trace.events_in_order();
        let timeline = Timeline::new(trace, &events);
        let requests = Requests::new(trace, &events);
        let walk = Walk::new(trace, &timeline, &requests);
        let is_over_gap = |request: &Request| {
            request.arrived_ns < trace.head.began_ns
                || trace
                    .gaps
                    .iter()
                    .any(|gap| gap.from_ns <= request.ended_ns && request.arrived_ns <= gap.to_ns)
        };
        let wanted = requests.all.iter().filter(|request| ended_ns.contains(&request.ended_ns));
        let (over, complete): (Vec<&Request>, Vec<&Request>) =
            wanted.partition(|request| is_over_gap(request));
        let explain = |request: &Request| {
            let segments = walk.explain(request)?;
            Some(ExplainedRequest {
                connection: request.connection,
                arrived_ns: request.arrived_ns,
                ended_ns: request.ended_ns,
                server: server(&segments).unwrap_or(request.sender),
                class: request.class,
                stages: request.stages.clone(),
                neighbour_spans: neighbours::neighbour_spans(&segments, trace, &timeline),
                faults: faults(&segments, &timeline),
                segments,
            })
        };
        let mut incomplete: Vec<u64> = over.iter().map(|request| request.latency_ns()).collect();
        let mut explained = Vec::new();
        for request in complete {
            match explain(request) {
                Some(one) => explained.push(one),
                // The trace is damaged: its events contradict each other about this request.
                None => incomplete.push(request.latency_ns()),
            }
        }
        Self { explained, incomplete, unclear: requests.unclear }
    }
}

/// Counts the page faults of the request's threads while they worked, or waited for the kernel.
fn faults(segments: &[Segment], timeline: &Timeline) -> u64 {
    let ran = segments.iter().filter(|s| {
        matches!(
            s.kind,
            SegmentKind::Work
                | SegmentKind::Stall(_)
                | SegmentKind::Fault
                | SegmentKind::Io(None, _)
        )
    });
    let ended = |s: &Segment| {
        let all = timeline.stalls.faults(s.thread, s.from_ns, s.to_ns);
        all.iter().filter(|(_, ended_ns)| *ended_ns <= s.to_ns).count() as u64
    };
    ran.map(ended).sum()
}

/// The thread that did most of the work.
fn server(segments: &[Segment]) -> Option<u32> {
    let mut work: BTreeMap<u32, u64> = BTreeMap::new();
    for segment in segments.iter().filter(|segment| segment.kind == SegmentKind::Work) {
        let ns = work.entry(segment.thread).or_default();
        *ns = saturating_sum([*ns, segment.ns()].into_iter());
    }
    work.into_iter().max_by_key(|(_, ns)| *ns).map(|(thread, _)| thread)
}

/// What a request's time is charged to, the largest part first.
pub fn charges(one: &ExplainedRequest, trace: &Trace) -> Vec<(String, u64)> {
    let mut sums: BTreeMap<String, u64> = BTreeMap::new();
    for segment in &one.segments {
        let ns = sums.entry(cause_name(segment.kind, trace)).or_default();
        *ns = saturating_sum([*ns, segment.ns()].into_iter());
    }
    let mut sums: Vec<(String, u64)> = sums.into_iter().collect();
    sums.sort_by_key(|(_, ns)| std::cmp::Reverse(*ns));
    sums
}
