//! All requests of a tale, each with what became of its time.

use std::collections::BTreeMap;

use crate::explained::Explained;
use crate::neighbours;
use crate::request::{Request, Requests};
use crate::segment::{Kind, Segment, cause, total};
use crate::timeline::Timeline;
use crate::trace::Tale;
use crate::walk::Walk;

/// All requests of a tale, with what became of each.
#[derive(Debug)]
pub struct Account {
    /// Complete ones, by arrival.
    pub explained: Vec<Explained>,
    /// Latencies of those that lost events.
    pub incomplete: Vec<u64>,
    pub unclear: u64,
}

impl Account {
    pub fn of(tale: &Tale) -> Self {
        let (timeline, requests) = (Timeline::of(tale), Requests::of(tale));
        let walk = Walk::new(tale, &timeline, &requests);
        let is_over_gap = |request: &Request| {
            request.arrived_ns < tale.head.began_ns
                || tale
                    .gaps
                    .iter()
                    .any(|gap| gap.from_ns <= request.ended_ns && request.arrived_ns <= gap.to_ns)
        };
        let (over, complete): (Vec<&Request>, Vec<&Request>) =
            requests.all.iter().partition(|request| is_over_gap(request));
        let explain = |request: &Request| {
            let segments = walk.explain(request)?;
            Some(Explained {
                connection: request.connection,
                arrived_ns: request.arrived_ns,
                ended_ns: request.ended_ns,
                server: server(&segments).unwrap_or(request.sender),
                class: request.class,
                stages: request.stages.clone(),
                beside: neighbours::of(&segments, tale, &timeline),
                faults: faults(&segments, &timeline),
                segments,
            })
        };
        let mut incomplete: Vec<u64> = over.iter().map(|request| request.latency_ns()).collect();
        let mut explained = Vec::new();
        for request in complete {
            match explain(request) {
                Some(one) => explained.push(one),
                // What a damaged trace says of it contradicts itself.
                None => incomplete.push(request.latency_ns()),
            }
        }
        Self { explained, incomplete, unclear: requests.unclear }
    }
}

/// Page faults where the service worked or the kernel let it wait.
fn faults(segments: &[Segment], timeline: &Timeline) -> u64 {
    let ran = segments.iter().filter(|s| {
        matches!(s.kind, Kind::Work | Kind::Stall(_) | Kind::Fault | Kind::Io(None, _))
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
    for segment in segments.iter().filter(|segment| segment.kind == Kind::Work) {
        let ns = work.entry(segment.thread).or_default();
        *ns = total([*ns, segment.ns()].into_iter());
    }
    work.into_iter().max_by_key(|(_, ns)| *ns).map(|(thread, _)| thread)
}

/// What a request's time went to, the most first.
pub fn charges(one: &Explained, tale: &Tale) -> Vec<(String, u64)> {
    let mut sums: BTreeMap<String, u64> = BTreeMap::new();
    for segment in &one.segments {
        let ns = sums.entry(cause(segment.kind, tale)).or_default();
        *ns = total([*ns, segment.ns()].into_iter());
    }
    let mut sums: Vec<(String, u64)> = sums.into_iter().collect();
    sums.sort_by_key(|(_, ns)| std::cmp::Reverse(*ns));
    sums
}
